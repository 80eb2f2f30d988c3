"""The data sets of Reasoning Gym that need care: read one by one, in version 0.1.25."""

from __future__ import annotations

from collections.abc import Mapping

_RUNS_MODEL_TEXT = "its score_answer runs model text as code"

REFUSED: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "binary_matrix",
            "countdown",
            "intermediate_integration",
            "n_queens",
            "polynomial_multiplication",
            "puzzle24",
            "simple_integration",
            "spiral_matrix",
            "string_insertion",
        ),
        _RUNS_MODEL_TEXT,
    ),
    "codeio": "making its questions executes code out of its data file",
    "composite": "it can hold any other data set; list several tasks instead",
    "propositional_logic": "its answer is None",
}
"""Data sets that must not be used in the trainer's process, and why."""

SEVERAL_ANSWERS = frozenset(
    {
        "cryptarithm",
        "graph_color",
        "group_anagrams",
        "jugs",
        "kakurasu",
        "knight_swap",
        "knights_knaves",
        "palindrome_generation",
        "palindrome_partitioning",
        "prime_factorization",
        "quantum_lock",
        "shortest_path",
        "sokoban",
        "tower_of_hanoi",
        "word_ladder",
    }
)
"""Data sets whose questions have several right answers, and whose ``score_answer`` is safe."""

HASH_DEPENDENT = frozenset({"isomorphic_strings", "knight_swap", "ransom_note", "word_ladder"})
"""Data sets that walk through sets of strings: ``seed`` alone does not fix their questions."""
