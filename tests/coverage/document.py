"""docs/coverage.md: every repository of the list, and its verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from tests.coverage.entries import CHAPTERS
from tests.coverage.structures import Entry
from tests.coverage.verdicts import TOLERANCE, Verdict

DOCUMENT = Path(__file__).parent.parent.parent / "docs" / "coverage.md"

_TITLE = """# Repositories

What `bei build --precision fp32` makes of {num_names} repositories of the hub. Nothing is downloaded: each structure
(class, settings of config.json, files beside the weights, names of tensors) is written from what is known of the
repository, made small with random weights, built, and served. What it answers to texts or pairs is compared with
transformers' own class, followed in torch by the pooling, layers and activation that the repository's files ask for;
remote code without a class in transformers is compared with an implementation in `tests/bei_build/families`.

| verdict | repositories | |
|---|---|---|
{counts}

Settings that the user must give are in the column "special". A "?" marks what is from memory or a guess; the notes
below the table say what. Written by `python -m tests.coverage`, which fails where a row is wrong or crashes.
"""
_MEANINGS = {
    "builds and matches": f"all answers are within {TOLERANCE:.0e}; the largest difference is given",
    "refused": "the build stops with the message whose first sentence is given",
    "WRONG": "builds, and answers something else: a defect",
    "CRASHES": "stops with an error that is none of bei's: a defect",
}
_HEADER = "| repository | class | task | special | verdict |\n|---|---|---|---|---|"


def document(verdicts: Mapping[str, Verdict]) -> str:
    """The whole page; ``verdicts`` by the first repository of each entry."""
    counts: Counter[str] = Counter()
    for entries in CHAPTERS.values():
        for entry in entries:
            counts[verdicts[entry.repository].kind] += len(entry.repositories)
    shown = "\n".join(f"| {kind} | {counts[kind]} | {meaning} |" for kind, meaning in _MEANINGS.items() if counts[kind])
    title = _TITLE.format(num_names=sum(counts.values()), counts=shown)
    return "\n".join([title, *(_chapter(name, entries, verdicts) for name, entries in CHAPTERS.items())])


def _chapter(name: str, entries: tuple[Entry, ...], verdicts: Mapping[str, Verdict]) -> str:
    rows = [
        f"{start}{verdict} |"
        for entry in entries
        for start, verdict in repository_rows(entry, verdicts[entry.repository])
    ]
    notes = [f"- {entry.repository}: {entry.unsure}." for entry in entries if entry.unsure]
    parts = [f"## {name}", "", _HEADER, *rows, ""]
    return "\n".join([*parts, *(["Unsure:", "", *notes, ""] if notes else [])])


def repository_rows(entry: Entry, verdict: Verdict) -> list[tuple[str, str]]:
    """A row for each repository, cut in front of its verdict; those of the same structure refer to the first."""
    mark = " ?" if entry.unsure else ""
    architecture = f"`{entry.structure.architecture}`" if entry.structure.architecture else "none"
    kind = f"{architecture} | {entry.structure.task}"
    first = f"| {entry.repository}{mark} | {kind} | {_special(entry)} | "
    others = [(f"| {name} | {kind} | as {entry.repository} | ", verdict.kind) for name in entry.same_as]
    return [(first, _cell(str(verdict))), *others]


def _special(entry: Entry) -> str:
    options = " ".join(f"--{name.replace('_', '-')} {_text(value)}" for name, value in entry.structure.options.items())
    return _cell("; ".join(part for part in (entry.special, f"`{options}`" if options else "") if part))


def _text(value: object) -> str:
    text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return f'"{text}"' if " " in text or "\n" in text else text


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
