"""docs/coverage.md: totals of docs/coverage.csv, and what is refused."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.hub_matrix import listed, published
from tests.hub_matrix.entries import ENTRIES
from tests.hub_matrix.table import Row, origin_of, rows
from tests.hub_matrix.verdicts import TOLERANCE, Kind, Verdict

DOCUMENT = Path(__file__).parent.parent.parent / "docs" / "coverage.md"

_TITLE = """# Repositories

What `bei build --precision fp32` makes of {num_names} repositories of the hub. [coverage.csv](coverage.csv) has a row
for each; this page has the totals and the refusals. Written by `python -m tests.hub_matrix`, which fails where a row is
wrong or crashes.

Nothing is downloaded: each structure (class, settings of config.json, files beside the weights, names of tensors) is
written from what is known of the repository, made small with random weights, built, and served. Its answers to texts
or pairs are compared with those of transformers' own class, followed in torch by the pooling, layers and activation
that the repository's files ask for; remote code without a class in transformers is compared with an implementation in
`tests/bei_build/families`. Where a structure builds, the build has compared the token ids of its artifact with those of
transformers' class, for **{compared}** texts and pairs in all.

| verdict | repositories | |
|---|---|---|
{counts}

{kinds}

| task | what it is | builds and matches | refused | of the newest |
|---|---|---|---|---|
{tasks}

The last column counts the [newest models](#the-newest-models) that build and match, and all that have a row.

**Builds and matches, by `model_type`:** {types}.

## How much of it is known

What is known of a repository is the weak point of this list. Each structure has an origin and, unless it is from
memory, its sources: files, cards and code at a named commit or version. They are about the repository, or about another
one of the same structure. Other repositories of a structure (column `same_as`) were not built: that they have it is
from memory where none of its sources names them and they are not `listed`. The column `unsure` says what is from
memory, or a guess, in spite of a source.

| origin | structures | |
|---|---|---|
{origins}

## Columns of coverage.csv

| column | |
|---|---|
| `repository` | on the hub |
| `verdict`, `detail` | as above; the largest difference, or the first sentence of the message that refuses it |
| `kind` | the group of the table above |
| `model_type`, `architecture`, `task` | the first two as config.json names them; the task that was compared |
| `special`, `options` | what sets the structure apart; flags that `bei build` needs for it |
| `same_as` | the repository of the same structure that was built |
| `origin`, `sources`, `unsure` | of the structure, in the row of the one that was built; `listed` in others too |

## The newest models

The 200 newest open text models of MTEB's list ({package}), of any size, by month of release: {newest}.

| month | models | builds and matches | refused | no row |
|---|---|---|---|---|
{months}

Without a row, as their structure is not known:

| repositories | what is known, and what is not |
|---|---|
{unknown}

## Refused

The message up to its first semicolon; coverage.csv has all of the sentence.

{refused}
"""
_ORIGINS = {
    "read": "files, a card, code, tests or documents that name the repository, or another one of its structure",
    "class": "documents or code of its class, its tokenizer or its form of weights, which do not name the repository",
    "listed": "MTEB's list of models names the repository, its library and its numbers of parameters; no file was read",
    "memory": "nothing that could be read was found",
}
_MEANINGS: Mapping[Kind, str] = {
    "builds and matches": f"all answers are within {TOLERANCE:.0e}; the largest difference is given",
    "refused": "the build stops with the message whose first sentence is given",
    "WRONG": "builds, and answers something else: a defect",
    "CRASHES": "stops with an error that is none of bei's: a defect",
}


_TASKS = {
    "embed": "a vector for a text",
    "embed_sparse": "a weight for each word of the vocabulary",
    "embed_tokens": "a vector for each token (late interaction)",
    "rerank": "a score for a query and a document",
    "classify": "labels of a text, or of two",
    "classify_tokens": "labels of words",
    "extract": "spans of a text, for labels that the request brings",
    "decide": "a probability for every option of a question",
}


def written_comparisons() -> int:
    """Texts and pairs of the stored page whose token ids the builds have compared."""
    found = re.search(r"\*\*([\d,]+)\*\* texts and pairs", DOCUMENT.read_text("utf-8"))
    return int(found[1].replace(",", "")) if found else 0


def document(verdicts: Mapping[str, Verdict], tokenizers: published.Rows, num_compared: int) -> str:
    """The whole page; ``verdicts`` by the first repository of each entry, ``tokenizers`` those of ``published``."""
    table = list(rows(verdicts))
    counts = Counter(row.verdict for row in table)
    origins = Counter(map(origin_of, ENTRIES))
    page = _TITLE.format(
        num_names=len(table),
        compared=f"{num_compared:,}",
        counts=_lines((kind, counts[kind], meaning) for kind, meaning in _MEANINGS.items() if counts[kind]),
        kinds=_totals_by_kind(table),
        tasks=_totals_by_task(table),
        types=_types_built(table),
        origins=_lines((origin, origins[origin], meaning) for origin, meaning in _ORIGINS.items()),
        refused=_refused(table),
        **_newest(table),
    )
    return "\n".join([page, published.section(tokenizers)])


def _totals_by_kind(table: list[Row]) -> str:
    shown = [kind for kind in _MEANINGS if any(row.verdict == kind for row in table)]
    counts = Counter((row.kind, row.verdict) for row in table)
    kinds = dict.fromkeys(row.kind for row in table)
    lines = _lines((kind, *(counts[kind, verdict] or "" for verdict in shown)) for kind in kinds)
    return "\n".join([f"| kind | {' | '.join(shown)} |", "|---" * (len(shown) + 1) + "|", lines])


def _totals_by_task(table: list[Row]) -> str:
    """Lines of the table of tasks: what is compared of a repository, and how many of them there are."""
    new = {name for names in listed.NEWEST.values() for name in names}
    counts = Counter((row.task, row.verdict) for row in table)
    newest = Counter((row.task, row.verdict == "builds and matches") for row in table if row.repository in new)
    return _lines(
        (
            f"`{task}`",
            meaning,
            counts[task, "builds and matches"],
            counts[task, "refused"],
            f"{newest[task, True]} of {newest[task, True] + newest[task, False]}",
        )
        for task, meaning in _TASKS.items()
    )


def _newest(table: list[Row]) -> dict[str, str]:
    """Counts of the newest models by month, and those without a row."""
    verdicts = {row.repository: row.verdict for row in table}
    shown = ("builds and matches", "refused", "no row")
    counts = Counter((month, verdicts.get(name, "no row")) for month, names in listed.NEWEST.items() for name in names)
    totals = (sum(counts[month, kind] for month in listed.NEWEST) for kind in shown)
    lines = (
        (month, len(names), *(counts[month, kind] or "" for kind in shown)) for month, names in listed.NEWEST.items()
    )
    return {
        "package": listed.PACKAGE,
        "newest": "{} build and match, {} are refused, {} have no row".format(*totals),
        "months": _lines(lines),
        "unknown": _lines((", ".join(names), what) for what, names in listed.UNKNOWN.items()),
    }


def _types_built(table: list[Row]) -> str:
    counts = Counter(row.model_type for row in table if row.verdict == "builds and matches")
    named = sorted((-count, name) for name, count in counts.items() if name)
    without = [f"{counts['']} whose files name none"] if counts[""] else []
    return ", ".join([*(f"{name} {-count}" for count, name in named), *without])


def _refused(table: list[Row]) -> str:
    """A table a kind; repositories that are refused with the same words share a line."""
    by_reason: dict[str, dict[str, list[str]]] = {}
    for row in table:
        if row.verdict == "refused":
            reasons = by_reason.setdefault(row.kind, {})
            reasons.setdefault(row.detail.split(";")[0].replace("|", "\\|"), []).append(row.repository)
    return "\n\n".join(
        f"| {kind} | refused |\n|---|---|\n" + _lines((", ".join(names), reason) for reason, names in reasons.items())
        for kind, reasons in by_reason.items()
    )


def _lines(cells: Iterable[tuple[object, ...]]) -> str:
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in cells)
