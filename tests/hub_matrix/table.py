"""docs/coverage.csv: a row for each repository, with its verdict."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, get_args

from tests.hub_matrix import listed
from tests.hub_matrix.entries import CHAPTERS, ENTRIES
from tests.hub_matrix.sources import COMMITS, OF_CLASSES, TRANSFORMERS
from tests.hub_matrix.structures import Entry
from tests.hub_matrix.verdicts import Kind, Verdict

TABLE = Path(__file__).parent.parent.parent / "docs" / "coverage.csv"


class Row(NamedTuple):
    """``same_as``: the repository whose structure was built; empty in the row of that repository, which alone has
    ``unsure``, and unless MTEB's list names the other one, ``origin`` and ``sources``. ``options``: what the user must
    give ``bei build``. ``detail``: the largest difference, or the reason.
    """

    repository: str
    verdict: str
    detail: str
    kind: str
    model_type: str
    architecture: str
    task: str
    special: str
    options: str
    same_as: str
    origin: str
    sources: str
    unsure: str


def rows(verdicts: Mapping[str, Verdict]) -> Iterator[Row]:
    """Rows of all repositories; ``verdicts`` by the first repository of each entry."""
    for chapter, entries in CHAPTERS.items():
        for entry in entries:
            yield from entry_rows(entry, verdicts[entry.repository], chapter)


def entry_rows(entry: Entry, verdict: Verdict, chapter: str) -> list[Row]:
    """A row for each repository of a structure."""
    first = Row(
        repository=entry.repository,
        verdict=verdict.kind,
        detail=_line(verdict.detail),
        kind=chapter,
        model_type=entry.structure.model_type,
        architecture=entry.structure.architecture,
        task=entry.structure.task,
        special=_line(entry.special),
        options=_line(_options(entry)),
        same_as="",
        origin=origin_of(entry),
        sources="; ".join(map(reference, entry.sources)) or listing(entry.repository),
        unsure=_line(entry.unsure),
    )
    others = first._replace(same_as=entry.repository, origin="", sources="", unsure="")
    return [first, *(others._replace(repository=name, **_listed(name)) for name in entry.same_as)]


def _listed(repository: str) -> dict[str, str]:
    found = listing(repository)
    return {"origin": "listed", "sources": found} if found else {}


def listing(repository: str) -> str:
    """The file of MTEB's list that names ``repository``, in words; "" if none of the newest is it."""
    file = listed.FILES.get(repository)
    return reference(f"package:{listed.PACKAGE}: {file}") if file else ""


def text_of(verdicts: Mapping[str, Verdict]) -> str:
    """The whole file."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(Row._fields)
    writer.writerows(rows(verdicts))
    return text.getvalue()


def written_rows() -> dict[str, Row]:
    """Rows of the stored file by repository, in its order."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        return {line["repository"]: Row(**line) for line in csv.DictReader(file)}


def written_verdicts() -> dict[str, Verdict]:
    """Verdicts of the stored file, by the first repository of each entry."""
    stored = written_rows()
    kinds: dict[str, Kind] = {kind: kind for kind in get_args(Kind)}
    found = [stored[entry.repository] for entry in ENTRIES if entry.repository in stored]
    return {row.repository: Verdict(kinds[row.verdict], row.detail) for row in found}


def origin_of(entry: Entry) -> str:
    """One of "read", "class", "listed", "memory"."""
    if entry.repository in OF_CLASSES:
        return "class"
    if entry.sources:
        return "read"
    return "listed" if listing(entry.repository) else "memory"


def reference(source: str) -> str:
    """A source in words, with the commit or version that was read."""
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


def _options(entry: Entry) -> str:
    return " ".join(f"--{name.replace('_', '-')} {_value(value)}" for name, value in entry.structure.options.items())


def _value(value: object) -> str:
    text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return f'"{text}"' if " " in text or "\n" in text else text


def _line(text: str) -> str:
    return " ".join(text.split())
