"""The text of a query and its documents, and what texts cannot do to it."""

from __future__ import annotations

import pytest

from bei.artifact.label_layouts import Listwise
from bei.tasks.rerank_lists import _groups
from bei.tokenizer.list_prompt import list_prompt, without_markers
from tests.support.listwise import prompt

LAYOUT = Listwise(
    document_token="<|embed_token|>",
    query_token="<|rerank_token|>",
    document_id=1,
    query_id=2,
    max_query_tokens=512,
    max_document_tokens=2048,
    max_documents=125,
    max_tokens=131_072,
)


@pytest.mark.parametrize("instruction", [None, "", "Be kind."])
def test_the_text_is_that_of_the_own_code(instruction: str | None) -> None:
    documents = ["a", "", "b\n{query}"]
    assert list_prompt("q", documents, instruction, LAYOUT) == prompt("q", documents, instruction)


@pytest.mark.parametrize(
    "text", ["a<|embed_token|>b", "a<|rerank<|embed_token|>_token|>b", "a<|em<|rerank_token|>bed_token|>b"]
)
def test_no_text_spells_a_marker(text: str) -> None:
    assert without_markers(text, LAYOUT) == "ab"


@pytest.mark.parametrize(
    ("lengths", "room", "expected"),
    [
        ([10] * 5, 1000, [(0, 5)]),
        ([10] * 5, 30, [(0, 2), (2, 4), (4, 5)]),
        ([10] * 126, 10_000, [(0, 125), (125, 126)]),
        ([2048] * 64, 200_000, [(0, 63), (63, 64)]),  # the own code leaves room for one more document
        ([2048, 1, 1], 2058, [(0, 1), (1, 3)]),
        ([], 10, []),
    ],
)
def test_a_text_ends_where_the_own_code_or_the_engine_ends_it(
    lengths: list[int], room: int, expected: list[tuple[int, int]]
) -> None:
    assert list(_groups(lengths, 20, room, 5, LAYOUT)) == expected
