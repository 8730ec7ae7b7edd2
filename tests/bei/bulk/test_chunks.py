"""Chunks of texts."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bei.bulk.chunks import ChunkSize, TextChunk, cut
from bei.core import TokenSpans
from bei.errors import ConfigError


@st.composite
def _words(draw: st.DrawFn) -> list[int]:
    """The tokens of each word of a text."""
    return draw(st.lists(st.integers(1, 6), min_size=1, max_size=60))


def _spans(words: list[int]) -> TokenSpans:
    """Tokens of two characters, a blank between words."""
    offsets, numbers, at = [], [], 0
    for number, count in enumerate(words):
        for _ in range(count):
            offsets.append((at, at + 2))
            numbers.append(number)
            at += 2
        at += 1
    special = np.zeros(len(numbers), np.bool_)
    return TokenSpans(np.array(offsets, np.int32), np.array(numbers, np.int32), special)


_SIZES = st.integers(1, 12).flatmap(
    lambda tokens: st.builds(ChunkSize, st.just(tokens), st.integers(0, max(0, tokens - 1)))
)


def _tokens_of(chunk: TextChunk, spans: TokenSpans) -> list[int]:
    starts, stops = spans.offsets[:, 0], spans.offsets[:, 1]
    return [int(place) for place in np.flatnonzero((starts >= chunk.start) & (stops <= chunk.stop))]


@given(words=_words(), size=_SIZES)
def test_chunks_hold_every_token_and_are_no_longer_than_asked(words: list[int], size: ChunkSize) -> None:
    spans = _spans(words)
    tokens = [_tokens_of(chunk, spans) for chunk in cut(spans, size)]
    assert sorted({place for own in tokens for place in own}) == [*range(sum(words))]
    assert all(0 < len(own) <= size.tokens for own in tokens)


@given(words=_words(), size=_SIZES)
def test_chunks_go_forward_and_share_no_more_than_the_overlap(words: list[int], size: ChunkSize) -> None:
    spans = _spans(words)
    tokens = [_tokens_of(chunk, spans) for chunk in cut(spans, size)]
    for before, after in pairwise(tokens):
        assert before[0] < after[0]
        assert before[-1] < after[-1]
        assert len({*before} & {*after}) <= size.overlap


@given(words=_words(), size=_SIZES)
def test_a_word_that_fits_into_a_chunk_is_whole_in_one(words: list[int], size: ChunkSize) -> None:
    spans = _spans(words)
    chunks = [_tokens_of(chunk, spans) for chunk in cut(spans, size)]
    for number, count in enumerate(words):
        own = {int(place) for place in np.flatnonzero(spans.words == number)}
        if count <= size.tokens and all(one <= size.tokens for one in words):
            assert any(own <= {*chunk} for chunk in chunks)


@pytest.mark.parametrize(("size", "fault"), [(ChunkSize(8), "--chunk-tokens"), (ChunkSize(4, 4), "--chunk-overlap")])
def test_sizes_that_cannot_be_are_refused_by_name(size: ChunkSize, fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        size.check(8)
