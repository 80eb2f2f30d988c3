"""Names around the themes: wrapper keys and nested parts, disjoint by split like the themes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tropism.tasks.base import Split


@dataclass(frozen=True)
class Names:
    """What a document of one split may call its parts.

    Args:
        wrappers: Top-level keys that a prompt may ask for.
        sections: Objects that hold some of the fields.
        lists: Arrays of objects.
        awkward: Strings that must contain characters to escape.
    """

    wrappers: tuple[str, ...]
    sections: tuple[str, ...]
    lists: tuple[str, ...]
    awkward: tuple[str, ...]


NAMES: Mapping[Split, Names] = {
    "train": Names(
        wrappers=("records", "entries", "results", "collection", "payload", "data_set", "export"),
        sections=("details", "background", "specs", "profile", "context"),
        lists=("reviews", "incidents", "upgrades", "samples"),
        awkward=("quoted_remark", "log_line", "file_path", "slogan"),
    ),
    "validation": Names(
        wrappers=("inventory", "listing", "batch", "register", "submission", "roster"),
        sections=("overview", "facts", "logistics", "particulars", "setting"),
        lists=("inspections", "repairs", "milestones", "loans"),
        awkward=("inscription", "error_message", "command_line", "footnote"),
    ),
    "test": Names(
        wrappers=("dossier", "bundle", "archive", "output_list", "feed", "manifest"),
        sections=("summary", "attributes", "extras", "circumstances", "outline"),
        lists=("sightings", "complaints", "transfers", "votes"),
        awkward=("transcript", "search_pattern", "caption", "shell_snippet"),
    ),
}
