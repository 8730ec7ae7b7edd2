"""RowCache: exact, bounded in bytes, the least recently used rows leave first."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bei.core import Row
from bei.scheduler.queue import Identity
from bei.scheduler.row_cache import _OVERHEAD_BYTES, RowCache

WIDTH = 100
SIZE = _OVERHEAD_BYTES + 4 + 4 * WIDTH  # of a row of 100 floats under a key of 4 bytes


def key(number: int, types: bytes | None = None, num_keys: int | None = None) -> Identity:
    return number.to_bytes(4, "little"), types, num_keys, 0, 0, b""


def row(value: float, name: str = "embedding", width: int = WIDTH) -> Row:
    return {name: np.full(width, value, np.float32)}


def value_of(found: Row | None, name: str = "embedding") -> float | None:
    return None if found is None else float(found[name][0])


def test_what_was_put_is_found_under_exactly_its_key() -> None:
    cache = RowCache(100 * SIZE)
    cache.put(key(1), row(1.0))
    assert value_of(cache.get(key(1), {"embedding"})) == 1.0
    for other in (key(2), key(1, b"\0"), key(1, None, 3)):
        assert cache.get(other, {"embedding"}) is None


def test_a_row_is_found_only_with_all_outputs_that_are_asked_for_and_gives_no_others() -> None:
    cache = RowCache(100 * SIZE)
    cache.put(key(1), row(1.0))
    assert cache.get(key(1), {"embedding", "sparse"}) is None
    cache.put(key(1), row(2.0, "sparse"))
    both = cache.get(key(1), {"embedding", "sparse"})
    assert (value_of(both), value_of(both, "sparse")) == (1.0, 2.0)
    only = cache.get(key(1), {"sparse"})
    assert only is not None
    assert set(only) == {"sparse"}


def test_the_least_recently_used_leaves_first() -> None:
    cache = RowCache(4 * SIZE)
    for number in range(4):
        cache.put(key(number), row(number))
    cache.get(key(0), {"embedding"})
    cache.put(key(4), row(4))
    assert [value_of(cache.get(key(number), {"embedding"})) for number in range(5)] == [0, None, 2, 3, 4]


def test_what_is_put_again_counts_as_used() -> None:
    cache = RowCache(4 * SIZE)
    for number in (0, 1, 2, 3, 0, 4):
        cache.put(key(number), row(number))
    assert [value_of(cache.get(key(number), {"embedding"})) for number in range(5)] == [0, None, 2, 3, 4]


def test_a_row_that_would_push_out_a_quarter_is_not_kept_and_what_is_known_stays() -> None:
    cache = RowCache(4 * SIZE)
    cache.put(key(1), row(1.0))
    cache.put(key(1), row(2.0, "tokens", 10 * WIDTH))
    cache.put(key(2), row(2.0, "tokens", 10 * WIDTH))
    assert value_of(cache.get(key(1), {"embedding"})) == 1.0
    assert cache.get(key(1), {"tokens"}) is None
    assert cache.get(key(2), {"tokens"}) is None
    assert cache.num_bytes == SIZE


def test_a_row_of_a_batch_does_not_keep_the_batch() -> None:
    batch = np.zeros((1000, WIDTH), np.float32)
    cache = RowCache(100 * SIZE)
    cache.put(key(1), {"embedding": batch[3]})
    found = cache.get(key(1), {"embedding"})
    assert found is not None
    assert found["embedding"].base is None
    batch[3] = 7.0
    assert value_of(found) == 0.0


@given(
    st.lists(st.tuples(st.integers(0, 9), st.sampled_from(["embedding", "sparse"]), st.integers(1, 200)), max_size=60),
    st.integers(1, 12),
)
def test_bytes_are_counted_and_never_exceed_the_limit(puts: list[tuple[int, str, int]], num_rows: int) -> None:
    cache = RowCache(num_rows * SIZE)
    for number, name, width in puts:
        cache.put(key(number), row(number, name, width))
        kept = sum(
            _OVERHEAD_BYTES + 4 + sum(values.nbytes for values in found.values()) for found in cache._rows.values()
        )
        assert cache.num_bytes == kept <= num_rows * SIZE
    for number in range(10):
        for name in ("embedding", "sparse"):
            found = cache.get(key(number), {name})
            assert found is None or float(found[name][0]) == number


@pytest.mark.parametrize("max_bytes", [1, _OVERHEAD_BYTES])
def test_a_cache_too_small_for_anything_keeps_nothing(max_bytes: int) -> None:
    cache = RowCache(max_bytes)
    cache.put(key(1), row(1.0))
    assert cache.get(key(1), {"embedding"}) is None
    assert cache.num_bytes == 0
