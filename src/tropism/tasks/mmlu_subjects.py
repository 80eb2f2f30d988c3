"""The 57 subjects of MMLU, by the names of its files (Hendrycks et al. 2021, 2009.03300)."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

SCIENCE = (
    "anatomy",
    "astronomy",
    "college_biology",
    "college_chemistry",
    "college_medicine",
    "college_physics",
    "conceptual_physics",
    "electrical_engineering",
    "high_school_biology",
    "high_school_chemistry",
    "high_school_physics",
    "medical_genetics",
    "virology",
)
"""The 13 subjects of MMLU that are natural science, or applied natural science."""

OTHER_SUBJECTS = (
    "abstract_algebra",
    "business_ethics",
    "clinical_knowledge",
    "college_computer_science",
    "college_mathematics",
    "computer_security",
    "econometrics",
    "elementary_mathematics",
    "formal_logic",
    "global_facts",
    "high_school_computer_science",
    "high_school_european_history",
    "high_school_geography",
    "high_school_government_and_politics",
    "high_school_macroeconomics",
    "high_school_mathematics",
    "high_school_microeconomics",
    "high_school_psychology",
    "high_school_statistics",
    "high_school_us_history",
    "high_school_world_history",
    "human_aging",
    "human_sexuality",
    "international_law",
    "jurisprudence",
    "logical_fallacies",
    "machine_learning",
    "management",
    "marketing",
    "miscellaneous",
    "moral_disputes",
    "moral_scenarios",
    "nutrition",
    "philosophy",
    "prehistory",
    "professional_accounting",
    "professional_law",
    "professional_medicine",
    "professional_psychology",
    "public_relations",
    "security_studies",
    "sociology",
    "us_foreign_policy",
    "world_religions",
)
"""The other 44."""


def check_subjects(subjects: Sequence[str]) -> None:
    """Refuse what is no subject.

    Raises:
        ValueError: None at all, one twice, or an unknown one, with the names that are meant perhaps
            and all that there are.
    """
    every = sorted((*SCIENCE, *OTHER_SUBJECTS))
    if not subjects or len(set(subjects)) != len(subjects):
        raise ValueError(f"subjects={list(subjects)}: name at least one, and each once.")
    for subject in subjects:
        if subject not in every:
            near = get_close_matches(subject.lower().replace(" ", "_"), every)
            meant = f" Is it {' or '.join(map(repr, near))}?" if near else ""
            raise ValueError(
                f"subjects has {subject!r}, which MMLU lacks.{meant} There are, of science: "
                f"{', '.join(SCIENCE)}; others: {', '.join(OTHER_SUBJECTS)}."
            )
