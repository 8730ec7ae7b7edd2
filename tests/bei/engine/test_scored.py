"""Which tokens of a batch are scored, and where their rows are, with and without shared beginnings."""

from __future__ import annotations

import numpy as np

from bei.core import Encoding, PackedBatch
from bei.engine.packing import bucket, graph_inputs
from bei.engine.scored import NAMES, scored_inputs
from bei.engine.shared_prefixes import LEAST_SHARED, sharing

PROMPT = [*range(100, 100 + LEAST_SHARED)]
ANSWERS = ([1, 2, 3], [1, 2, 4, 5], [6])


def batch_of(*, unpooled: bool) -> PackedBatch:
    encodings = [
        Encoding(np.array([*PROMPT, *answer], np.int32), num_unpooled=len(PROMPT) if unpooled else 0)
        for answer in ANSWERS
    ]
    return PackedBatch.from_encodings(encodings)


def scored_of(batch: PackedBatch) -> list[list[tuple[int, int] | None]]:
    """Of each token of each sequence: its id and that of the token in front of it; None if it is not scored."""
    names = ["input_ids", *NAMES] if batch.shared is None else ["input_ids", "position_ids", *NAMES]
    tensors = graph_inputs(batch, names)
    ids, tokens, before, places = (
        tensors[name] for name in ("input_ids", "scored_tokens", "scored_before", "token_scores")
    )
    pairs = [(int(ids[token]), int(ids[left])) for token, left in zip(tokens, before, strict=True)]
    rows = [pairs[place] if place < len(pairs) else None for place in places.tolist()]
    by_token = [rows[place] for place in (range(batch.num_tokens) if batch.shared is None else batch.shared.places)]
    return [by_token[start:end] for start, end in zip(batch.cu_seqlens, batch.cu_seqlens[1:], strict=False)]


def expected(*, unpooled: bool) -> list[list[tuple[int, int] | None]]:
    first = len(PROMPT) if unpooled else 1
    texts = [[*PROMPT, *answer] for answer in ANSWERS]
    return [
        [(text[place], text[place - 1]) if place >= first else None for place in range(len(text))] for text in texts
    ]


def test_all_but_the_first_token_are_scored_or_those_behind_the_prompt() -> None:
    for unpooled in (False, True):
        assert scored_of(batch_of(unpooled=unpooled)) == expected(unpooled=unpooled)


def test_sequences_that_share_tokens_find_the_same_scores() -> None:
    for unpooled in (False, True):
        batch = sharing(batch_of(unpooled=unpooled))
        assert batch.shared is not None
        assert batch.num_computed == len(PROMPT) + 3 + 2 + 1  # the second answer begins as the first
        assert scored_of(batch) == expected(unpooled=unpooled)


def test_a_token_that_one_sequence_scores_and_another_does_not_is_scored() -> None:
    texts = [Encoding(np.array([*PROMPT, 1], np.int32), num_unpooled=count) for count in (len(PROMPT), 3)]
    batch = sharing(PackedBatch.from_encodings([texts[0], texts[1]._replace(input_ids=np.append(texts[1][0], 7))]))
    assert batch.shared is not None
    assert [one is not None for one in scored_of(batch)[1]] == [False] * 3 + [True] * (len(PROMPT) - 1)


def test_sizes_are_bucketed_or_those_of_the_step_and_a_batch_may_score_nothing() -> None:
    alone = PackedBatch.from_encodings([Encoding(np.array([5], np.int32))])
    for fits, size in ((bucket, 8), (None, 16)):
        found = scored_inputs(alone, 16, fits)
        assert {name: len(found[name]) for name in ("scored_tokens", "scored_before")} == {
            "scored_tokens": size,
            "scored_before": size,
        }
        assert (found["token_scores"] == size).all()
