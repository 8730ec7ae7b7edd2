"""docs/coverage.md: every repository of the list, and its verdict."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from tests.hub_matrix import published
from tests.hub_matrix.entries import CHAPTERS, ENTRIES
from tests.hub_matrix.sources import COMMITS, OF_CLASSES, TRANSFORMERS
from tests.hub_matrix.structures import Entry
from tests.hub_matrix.verdicts import TOLERANCE, Kind, Verdict

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

What is known of a repository is the weak point of this page. The numbers in the column "source" are those of the list
at its end; they are about the first repository of a structure, or about another one that has it. That the others ("as")
have the same structure is from memory where none of these sources names them.

| source | structures | |
|---|---|---|
{sources}

Where a structure builds, the build has compared the token ids of its artifact with those of transformers' class, for
**{compared}** texts and pairs in all.

Settings that the user must give are in the column "special". A "?" marks what is from memory or a guess; the notes
below the table say what. Written by `python -m tests.hub_matrix`, which fails where a row is wrong or crashes.
"""
_ORIGINS = {
    "read": "files, a card, code, tests or documents that name the repository, or another one of its structure",
    "class": "documents or code of its class, its tokenizer or its form of weights, which do not name the repository",
    "memory": "nothing that could be read was found",
}
_MEANINGS: Mapping[Kind, str] = {
    "builds and matches": f"all answers are within {TOLERANCE:.0e}; the largest difference is given",
    "refused": "the build stops with the message whose first sentence is given",
    "WRONG": "builds, and answers something else: a defect",
    "CRASHES": "stops with an error that is none of bei's: a defect",
}
_HEADER = "| repository | class | task | special | source | verdict |\n|---|---|---|---|---|---|"


def written_verdicts() -> dict[str, Verdict]:
    """Those of the page that is there, by the first repository of each entry."""
    rows = [line.split(" | ") for line in DOCUMENT.read_text().splitlines() if line.startswith("| ")]
    cells = {row[0].strip("| ").removesuffix(" ?"): row[-1].removesuffix(" |").replace("\\|", "|") for row in rows}
    verdicts = {}
    for entry in ENTRIES:
        cell = cells.get(entry.repository, "")
        if (kind := next((kind for kind in _MEANINGS if cell.startswith(kind)), None)) is not None:
            matches = cell.removeprefix(kind).startswith(" (")
            verdicts[entry.repository] = Verdict(kind, cell[len(kind) + 2 : len(cell) - matches])
    return verdicts


def written_comparisons() -> int:
    """Texts and pairs that the builds of the page that is there have compared the token ids of."""
    found = re.search(r"\*\*([\d,]+)\*\* texts and pairs", DOCUMENT.read_text())
    return int(found[1].replace(",", "")) if found else 0


def document(verdicts: Mapping[str, Verdict], tokenizers: published.Rows, num_compared: int) -> str:
    """The whole page; ``verdicts`` by the first repository of each entry, ``tokenizers`` those of ``published``."""
    counts: Counter[str] = Counter()
    for entries in CHAPTERS.values():
        for entry in entries:
            counts[verdicts[entry.repository].kind] += len(entry.repositories)
    shown = "\n".join(f"| {kind} | {counts[kind]} | {meaning} |" for kind, meaning in _MEANINGS.items() if counts[kind])
    origins = Counter(origin_of(entry) for entry in ENTRIES)
    sources = "\n".join(f"| {origin} | {origins[origin]} | {meaning} |" for origin, meaning in _ORIGINS.items())
    title = _TITLE.format(num_names=sum(counts.values()), counts=shown, sources=sources, compared=f"{num_compared:,}")
    chapters = (_chapter(name, entries, verdicts) for name, entries in CHAPTERS.items())
    return "\n".join([title, *chapters, published.section(tokenizers), _references()])


def origin_of(entry: Entry) -> str:
    """One of "read", "class", "memory"."""
    if entry.repository in OF_CLASSES:
        return "class"
    return "read" if entry.sources else "memory"


@functools.cache
def numbers() -> dict[str, int]:
    """The sources' numbers, in the order of the page."""
    return {source: n for n, source in enumerate(dict.fromkeys(s for entry in ENTRIES for s in entry.sources), 1)}


def _references() -> str:
    lines = [f"{number}. {_reference(source)}" for source, number in numbers().items()]
    return "\n".join(["## Sources", "", *lines, ""])


def _reference(source: str) -> str:
    """What a source is, and the state in which it was read."""
    kind, name = source.split(":", 1)
    place, _, path = name.partition(" ")
    shown = {
        "github": f"{place} at {COMMITS.get(place)}: {path}",
        "transformers": f"transformers {TRANSFORMERS}: {name}",
        "card": f"the model card of {name}",
        "package": f"PyPI's package {name}",
        "page": f"{place} on {path}",
    }
    return shown[kind]


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
    first = f"| {entry.repository}{mark} | {kind} | {_special(entry)} | {_source(entry)} | "
    others = [(f"| {name} | {kind} | as {entry.repository} | | ", verdict.kind) for name in entry.same_as]
    return [(first, _cell(str(verdict))), *others]


def _source(entry: Entry) -> str:
    origin, shown = origin_of(entry), ", ".join(str(numbers()[source]) for source in entry.sources)
    return {"read": shown, "class": f"class: {shown}", "memory": "memory"}[origin]


def _special(entry: Entry) -> str:
    options = " ".join(f"--{name.replace('_', '-')} {_text(value)}" for name, value in entry.structure.options.items())
    return _cell("; ".join(part for part in (entry.special, f"`{options}`" if options else "") if part))


def _text(value: object) -> str:
    text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return f'"{text}"' if " " in text or "\n" in text else text


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
