"""docs/coverage.md lists what tests/coverage lists, and its verdicts are those of today."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
import transformers

from tests.hub_matrix.document import (
    DOCUMENT,
    document,
    numbers,
    origin_of,
    repository_rows,
    written_comparisons,
    written_verdicts,
)
from tests.hub_matrix.entries import ENTRIES
from tests.hub_matrix.published import written_rows
from tests.hub_matrix.sources import COMMITS, OF_CLASSES, SOURCES
from tests.hub_matrix.structures import Entry
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


@functools.cache
def listed() -> dict[str, str]:
    """The rows of the document by repository."""
    rows = [line for line in DOCUMENT.read_text().split("\n") if line.startswith("| ") and "/" in line.split("|")[1]]
    return {row.split("|")[1].strip().removesuffix(" ?"): row for row in rows}


def test_many_repositories_are_listed_once() -> None:
    assert len(NAMES) >= 100
    assert len(NAMES) == len(set(NAMES))
    assert all(name.count("/") == 1 and " " not in name for name in NAMES)


def test_the_document_lists_the_repositories() -> None:
    """``python -m tests.hub_matrix`` writes it."""
    assert list(listed()) == NAMES


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.repository)
def test_a_row_says_what_the_entry_says_and_no_fault(entry: Entry) -> None:
    rows = listed()
    for name, (start, _) in zip(entry.repositories, repository_rows(entry, Verdict("refused", "")), strict=True):
        verdict = rows[name].removeprefix(start)
        assert verdict != rows[name]
        assert verdict.startswith(("builds and matches", "refused"))


@pytest.mark.parametrize("table", [SOURCES, OF_CLASSES], ids=["of repositories", "of classes"])
def test_sources_are_of_entries_and_say_where_they_were_read(table: Mapping[str, tuple[str, ...]]) -> None:
    assert set(table) <= {entry.repository for entry in ENTRIES}
    for sources in table.values():
        assert sources
        assert all(re.fullmatch(FORMS, source) for source in sources), sources


def test_a_structure_has_one_kind_of_source() -> None:
    assert not SOURCES.keys() & OF_CLASSES.keys()


def test_every_repository_of_a_source_has_its_commit() -> None:
    places = {source.split(":", 1)[1].split(" ")[0] for source in numbers() if source.startswith("github:")}
    assert places == COMMITS.keys()


def test_files_of_transformers_are_there() -> None:
    package = Path(transformers.__file__).parent
    paths = [source.removeprefix("transformers:") for source in numbers() if source.startswith("transformers:")]
    assert paths
    assert [path for path in paths if not (package / path).is_file()] == []


def test_the_document_counts_and_lists_the_sources() -> None:
    text = DOCUMENT.read_text()
    for origin, count in Counter(map(origin_of, ENTRIES)).items():
        assert f"\n| {origin} | {count} | " in text
    listed_sources = text.split("\n## Sources\n")[1].strip().split("\n")
    assert [line.split(". ")[0] for line in listed_sources] == [str(number) for number in numbers().values()]


def test_verdicts_are_read_from_the_document_as_they_were_written() -> None:
    verdicts = written_verdicts()
    assert verdicts.keys() == {entry.repository for entry in ENTRIES}
    assert document(verdicts, written_rows(), written_comparisons()) == DOCUMENT.read_text()


def test_the_models_page_links_the_list() -> None:
    assert "](coverage.md)" in (DOCUMENT.parent / "models.md").read_text()


def verdict_holds(entry: Entry) -> None:
    """The row's verdict but for the difference's digits."""
    verdict = verdict_of(entry.structure)
    assert not verdict.is_fault, str(verdict)
    expected = str(verdict).split(" (")[0] if verdict.kind == "builds and matches" else str(verdict)
    start, _ = repository_rows(entry, verdict)[0]
    assert listed()[entry.repository].replace("\\|", "|").startswith(start.replace("\\|", "|") + expected)


@pytest.mark.parametrize("name", QUICK)
def test_a_verdict_is_that_of_the_list(name: str) -> None:
    verdict_holds(next(entry for entry in ENTRIES if entry.repository == name))


@pytest.mark.slow
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.repository)
def test_every_verdict_is_that_of_the_list(entry: Entry) -> None:
    verdict_holds(entry)
