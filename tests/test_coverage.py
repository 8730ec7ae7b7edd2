"""docs/coverage.md lists what tests/coverage lists, and its verdicts are those of today."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch

from tests.coverage.document import DOCUMENT, repository_rows
from tests.coverage.entries import ENTRIES
from tests.coverage.structures import Entry
from tests.coverage.verdicts import Verdict, verdict_of

# One of each way to be right: formats of weights and tokenizers, remote code, pairs, templates, refusals.
QUICK = (
    "sentence-transformers/all-MiniLM-L6-v2",
    "facebook/contriever",
    "BAAI/bge-m3",
    "sentence-transformers/gtr-t5-base",
    "nvidia/llama-nemotron-rerank-1b-v2",
    "zeroentropy/zerank-2",
    "lightonai/GTE-ModernColBERT-v1",
    "minishlab/potion-base-8M",
    "vinai/phobert-base-v2",
    "Xenova/all-MiniLM-L6-v2",
)
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
    """``python -m tests.coverage`` writes it."""
    assert list(listed()) == NAMES


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.repository)
def test_a_row_says_what_the_entry_says_and_no_fault(entry: Entry) -> None:
    rows = listed()
    for name, (start, _) in zip(entry.repositories, repository_rows(entry, Verdict("refused", "")), strict=True):
        verdict = rows[name].removeprefix(start)
        assert verdict != rows[name]
        assert verdict.startswith(("builds and matches", "refused"))


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
