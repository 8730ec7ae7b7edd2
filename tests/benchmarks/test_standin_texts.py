"""Texts of benchmarks over the stand-in engine: equal ones in flight would be computed once."""

from __future__ import annotations

from benchmarks.http_workers import standin_text
from tests.e2e.wide_server import wide_tokenizer


def test_texts_differ_in_their_tokens() -> None:
    texts = [standin_text(number) for number in range(6000)]
    assert len({tuple(found.ids) for found in wide_tokenizer().encode_batch(texts)}) == len(texts)
