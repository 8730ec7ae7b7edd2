"""docs/coverage.csv and .md say what tests/hub_matrix lists, and their verdicts are those of today."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
import transformers

from tests.hub_matrix import published
from tests.hub_matrix.document import DOCUMENT, document, written_comparisons
from tests.hub_matrix.entries import CHAPTERS, ENTRIES
from tests.hub_matrix.listed import NEWEST, UNKNOWN
from tests.hub_matrix.sources import COMMITS, OF_CLASSES, SOURCES
from tests.hub_matrix.structures import Entry
from tests.hub_matrix.table import (
    TABLE,
    Row,
    entry_rows,
    listing,
    origin_of,
    reference,
    text_of,
    written_rows,
    written_verdicts,
)
from tests.hub_matrix.verdicts import Verdict, verdict_of

# One of each way to be right: formats of weights and tokenizers, remote code, pairs, templates, refusals.
QUICK = (
    "sentence-transformers/all-MiniLM-L6-v2",
    "facebook/contriever",
    "BAAI/bge-m3",
    "sentence-transformers/gtr-t5-base",
    "nvidia/llama-nemotron-rerank-1b-v2",
    "zeroentropy/zerank-2",
    "cross-encoder/ettin-reranker-150m-v1",
    "lightonai/GTE-ModernColBERT-v1",
    "minishlab/potion-base-8M",
    "vinai/phobert-base-v2",
    "Xenova/all-MiniLM-L6-v2",
)
_REPOSITORY = r"[\w.-]+/[\w.-]+"
FORMS = rf"github:{_REPOSITORY} \S+|card:{_REPOSITORY}|transformers:\S+\.py|page:\S+ \S+|package:\S+"
NAMES = [name for entry in ENTRIES for name in entry.repositories]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


listed = functools.cache(written_rows)


def without_verdict(row: Row) -> Row:
    return row._replace(verdict="", detail="")


def test_many_repositories_are_listed_once() -> None:
    assert len(NAMES) >= 100
    assert len(NAMES) == len(set(NAMES))
    assert all(name.count("/") == 1 and " " not in name for name in NAMES)


def test_the_table_lists_the_repositories() -> None:
    """``python -m tests.hub_matrix`` writes it."""
    assert list(listed()) == NAMES


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.repository)
def test_a_row_says_what_the_entry_says_and_no_fault(entry: Entry) -> None:
    chapter = next(chapter for chapter, entries in CHAPTERS.items() if entry in entries)
    rows = [listed()[name] for name in entry.repositories]
    expected = entry_rows(entry, Verdict("refused", ""), chapter)
    assert [without_verdict(row) for row in rows] == [without_verdict(row) for row in expected]
    assert len({(row.verdict, row.detail) for row in rows}) == 1
    assert rows[0].verdict in ("builds and matches", "refused")
    assert rows[0].detail


@pytest.mark.parametrize("table", [SOURCES, OF_CLASSES], ids=["of repositories", "of classes"])
def test_sources_are_of_entries_and_say_where_they_were_read(table: Mapping[str, tuple[str, ...]]) -> None:
    assert set(table) <= {entry.repository for entry in ENTRIES}
    for sources in table.values():
        assert sources
        assert all(re.fullmatch(FORMS, source) for source in sources), sources


def test_a_structure_has_one_kind_of_source() -> None:
    assert not SOURCES.keys() & OF_CLASSES.keys()


def all_sources() -> set[str]:
    return {source for entry in ENTRIES for source in entry.sources}


def test_every_repository_of_a_source_has_its_commit() -> None:
    places = {source.split(":", 1)[1].split(" ")[0] for source in all_sources() if source.startswith("github:")}
    assert places == COMMITS.keys()


def test_files_of_transformers_are_there() -> None:
    package = Path(transformers.__file__).parent
    paths = [source.removeprefix("transformers:") for source in all_sources() if source.startswith("transformers:")]
    assert paths
    assert [path for path in paths if not (package / path).is_file()] == []


def test_the_documents_count_and_name_the_sources() -> None:
    text, rows = DOCUMENT.read_text(), listed().values()
    for origin, count in Counter(map(origin_of, ENTRIES)).items():
        assert f"\n| {origin} | {count} | " in text
    named = {source for row in rows if row.origin != "listed" for source in row.sources.split("; ") if source}
    assert named == {reference(source) for source in all_sources()}
    assert all(bool(row.sources) == (row.origin in ("read", "class", "listed")) for row in rows)
    assert all(row.sources == listing(row.repository) for row in rows if row.origin == "listed")


def test_the_newest_models_are_two_hundred_and_counted() -> None:
    names = [name for names in NEWEST.values() for name in names]
    assert len(names) == len(set(names)) == 200
    assert list(NEWEST) == sorted(NEWEST, reverse=True)
    kinds = Counter(listed()[name].verdict if name in listed() else "" for name in names)
    counts = f"{kinds['builds and matches']} build and match, {kinds['refused']} are refused, {kinds['']} have no row"
    assert counts in DOCUMENT.read_text()
    unknown = [name for names in UNKNOWN.values() for name in names]
    assert sorted(unknown) == sorted(name for name in names if name not in listed())


def test_the_page_counts_the_rows_and_names_what_is_refused() -> None:
    text, rows = DOCUMENT.read_text(), listed().values()
    assert f" {len(rows)} repositories of the hub" in text
    for verdict, count in Counter(row.verdict for row in rows).items():
        assert f"\n| {verdict} | {count} | " in text
    refused = text.split("\n## Refused\n")[1].split("\n## ")[0]
    for row in rows:
        assert bool(re.search(rf"[ |]{re.escape(row.repository)}[, ]", refused)) == (row.verdict == "refused")


def test_the_readme_has_the_counts_of_the_page() -> None:
    counts = Counter(row.verdict for row in listed().values())
    built, refused = counts["builds and matches"], counts["refused"]
    text = (DOCUMENT.parent.parent / "README.md").read_text()
    assert f"[{len(listed())} repositories of the hub](docs/coverage.md)" in text
    assert f" {built} build and match the reference, {refused} are refused" in text


def test_verdicts_are_read_from_the_table_as_they_were_written() -> None:
    verdicts = written_verdicts()
    assert verdicts.keys() == {entry.repository for entry in ENTRIES}
    assert text_of(verdicts) == TABLE.read_text()
    assert document(verdicts, published.written_rows(), written_comparisons()) == DOCUMENT.read_text()


def test_the_models_page_links_the_list() -> None:
    assert "](coverage.md)" in (DOCUMENT.parent / "models.md").read_text()


def verdict_holds(entry: Entry) -> None:
    """The row's verdict; of a difference only its kind, not its digits."""
    verdict = verdict_of(entry.structure)
    assert not verdict.is_fault, str(verdict)
    row = listed()[entry.repository]
    assert row.verdict == verdict.kind
    assert verdict.kind == "builds and matches" or row.detail == " ".join(verdict.detail.split())


@pytest.mark.parametrize("name", QUICK)
def test_a_verdict_is_that_of_the_list(name: str) -> None:
    verdict_holds(next(entry for entry in ENTRIES if entry.repository == name))


@pytest.mark.slow
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.repository)
def test_every_verdict_is_that_of_the_list(entry: Entry) -> None:
    verdict_holds(entry)
