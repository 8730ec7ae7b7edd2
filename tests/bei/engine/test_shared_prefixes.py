"""Laws of prefixes that are computed once: which tokens are kept, and where each sequence finds its own."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bei.core import Encoding, PackedBatch
from bei.engine.packing import SHARED_KEYS, Sizes, bucket, can_share, graph_inputs, why_unshared
from bei.engine.shared_prefixes import LEAST_SHARED, common_length, num_shared, shared_lengths, sharing
from tests.support.engines import ids
from tests.support.prefixes import encodings_with_prefixes, texts_with_prefixes

NAMES = ("input_ids", "position_ids", "unpad_index", "pad_index", "slot_mask", "seq_lens", "first_index", "last_index")
law = settings(deadline=None)


def packed(*texts: list[int]) -> PackedBatch:
    return PackedBatch.from_encodings([Encoding(ids(*text)) for text in texts])


@law
@given(texts_with_prefixes())
def test_every_token_of_the_batch_is_found_once_among_the_computed_ones(texts: list[list[int]]) -> None:
    batch = sharing(packed(*texts))
    if batch.shared is None:
        return
    kept, places = batch.shared
    assert sorted(set(kept.tolist())) == sorted(kept.tolist())
    np.testing.assert_array_equal(batch.input_ids[kept][places], batch.input_ids)
    np.testing.assert_array_equal(places[kept], np.arange(len(kept)))


@law
@given(texts_with_prefixes())
def test_a_computed_token_serves_only_texts_that_are_equal_up_to_it(texts: list[list[int]]) -> None:
    batch = sharing(packed(*texts))
    if batch.shared is None:
        return
    before: dict[int, tuple[int, ...]] = {}
    for start, end in pairwise(batch.cu_seqlens.tolist()):
        text = batch.input_ids[start:end].tolist()
        places = batch.shared.places[start:end].tolist()
        assert places == sorted(set(places))
        for position, place in enumerate(places):
            prefix = tuple(text[: position + 1])
            assert before.setdefault(place, prefix) == prefix


@law
@given(texts_with_prefixes())
def test_as_much_is_shared_as_with_the_best_partner_among_all_others(texts: list[list[int]]) -> None:
    as_bytes = [ids(*text).tobytes() for text in texts]
    by_hand = 0
    for index, text in enumerate(texts):
        lengths = [
            next((i for i, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), min(len(text), len(other)))
            for other in texts[:index]
        ]
        best = max(lengths, default=0)
        by_hand += best if best >= LEAST_SHARED else 0
    assert num_shared(as_bytes) == by_hand
    batch = sharing(packed(*texts))
    assert batch.num_computed == batch.num_tokens - by_hand


@law
@given(text=st.lists(st.integers(0, 300), max_size=40), other=st.lists(st.integers(0, 300), max_size=40))
def test_the_common_length_is_that_of_token_ids_not_of_bytes(text: list[int], other: list[int]) -> None:
    expected = next(
        (i for i, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), min(len(text), len(other))
    )
    assert common_length(ids(*text).tobytes(), ids(*other).tobytes()) == expected


def test_ids_that_have_bytes_in_common_share_nothing_of_a_token() -> None:
    start = list(range(LEAST_SHARED))
    batch = sharing(packed([*start, 0x0101], [*start, 0x0201]))
    assert batch.num_computed == LEAST_SHARED + 2


def test_a_batch_without_common_prefixes_stays_as_it_is() -> None:
    short = list(range(LEAST_SHARED - 1))
    batch = packed([*short, 7], [*short, 8], [3])
    assert sharing(batch) is batch
    assert shared_lengths([ids(*short).tobytes(), ids(*short, 1).tobytes()]) == []


def test_texts_of_adapters_token_types_and_partial_keys_are_not_shared() -> None:
    text = ids(*range(30))
    typed = PackedBatch.from_encodings([Encoding(text, np.ones(30, np.int32)), Encoding(text)])
    partial = PackedBatch.from_encodings([Encoding(text, num_keys=3), Encoding(text)])
    assert sharing(typed) is typed
    assert sharing(partial) is partial
    adapted = PackedBatch.from_encodings([Encoding(text, adapter=1), Encoding(text, adapter=2)])
    assert sharing(adapted) is adapted


@law
@given(encodings_with_prefixes(), st.integers(0, 40), st.integers(0, 3))
def test_inputs_of_shared_tokens_lead_every_slot_to_the_token_of_the_whole_batch(
    encodings: list[Encoding], spare: int, fillers: int
) -> None:
    whole = PackedBatch.from_encodings(encodings)
    batch = sharing(whole)
    longest = int(np.diff(whole.cu_seqlens).max())
    sizes = Sizes(batch.num_computed + fillers + spare, whole.batch_size + fillers, longest + spare)
    for given_sizes in (None, sizes):
        expected = graph_inputs(whole, NAMES)
        found = graph_inputs(batch, NAMES, given_sizes)
        assert len(found["input_ids"]) == (given_sizes.tokens if given_sizes else bucket(batch.num_computed))
        rows = slice(whole.batch_size)
        width = min(expected["pad_index"].shape[1], found["pad_index"].shape[1])
        for name in ("input_ids", "position_ids"):
            for index in ("pad_index", "first_index", "last_index"):
                gathered, wanted = (tensors[name][tensors[index]][rows] for tensors in (found, expected))
                if index == "pad_index":
                    gathered, wanted = gathered[:, :width], wanted[:, :width]
                np.testing.assert_array_equal(gathered, wanted)
        flat = found["pad_index"].reshape(-1)
        tokens = np.arange(batch.num_computed)
        np.testing.assert_array_equal(flat[found["unpad_index"][: batch.num_computed]], tokens)


@law
@given(texts_with_prefixes(), st.integers(0, 3))
def test_packed_attention_reads_each_text_from_shared_rows_and_then_its_own(
    texts: list[list[int]], fillers: int
) -> None:
    batch = sharing(packed(*texts))
    sizes = Sizes(batch.num_computed + fillers, len(texts) + fillers, max(map(len, texts)))
    for given_sizes in (None, sizes):
        found = graph_inputs(batch, [*NAMES, "cu_query_lens", *SHARED_KEYS], given_sizes)
        owned, borrowed = (pairwise(found[name].tolist()) for name in ("cu_query_lens", "cu_shared_lens"))
        read, num_rows = [], len(found["input_ids"])
        for (first, last), (start, end) in zip(owned, borrowed, strict=True):
            rows = [*found["shared_rows"][start:end].tolist(), *range(first, last)]
            assert max(rows) < num_rows
            read.append(found["input_ids"][rows].tolist())
            if first < batch.num_computed:
                assert found["position_ids"][rows].tolist() == list(range(len(rows)))
        assert sorted(read[: len(texts)]) == sorted(texts)
        assert all(text == [0] for text in read[len(texts) :])
        assert len(read) == len(found["seq_lens"])


@pytest.mark.parametrize(
    "name", ["cu_query_lens", "token_seq_lens", "sequence_ids", "position_ids_but_0", "token_ones"]
)
def test_a_graph_whose_tokens_know_their_sequence_cannot_share(name: str) -> None:
    batch = sharing(packed([*range(20), 1], [*range(20), 2]))
    assert batch.shared is not None
    assert can_share(NAMES)
    assert not can_share([*NAMES, name])
    with pytest.raises(ValueError, match="share"):
        graph_inputs(batch, [*NAMES, name])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("cu_query_lens", "starts of texts (bei-kernels-cpu"),
        ("token_adapters", "each text reads its adapter"),
        ("token_seq_lens", "LongRoPE"),
        ("position_ids_but_0", "pass over a token"),
        ("sequence_ids", "packed tokens by text"),
    ],
)
def test_an_engine_says_why_it_computes_each_text_whole(name: str, said: str) -> None:
    assert why_unshared(NAMES, is_causal=True) is None
    assert said in (why_unshared([*NAMES, name], is_causal=True) or "")
    reads_shared_keys = [*NAMES, name, "cu_query_lens", *SHARED_KEYS]
    assert (why_unshared(reads_shared_keys, is_causal=True) is None) == (name == "cu_query_lens")
    assert name == "cu_query_lens" or said in (why_unshared(reads_shared_keys, is_causal=True) or "")
    assert why_unshared(NAMES, is_causal=False) == "its tokens see those behind them"
