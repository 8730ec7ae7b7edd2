"""Sizes and durations as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bei.errors import ConfigError
from bei.utils.units import parsed_duration, parsed_size, shown_age, shown_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("500000B", 500_000),
        ("50GB", 50 * 10**9),
        ("50 gb", 50 * 10**9),
        ("1.5T", 15 * 10**11),
        ("20GiB", 20 * 2**30),
        ("7 kB", 7000),
        ("12b", 12),
    ],
)
def test_a_size_is_read(text: str, size: int) -> None:
    assert parsed_size("x", text) == size


@pytest.mark.parametrize("text", ["", "-1", "GB", "1PB", "1ib", "50", "1.5", "1e9", "1,000", "nan", "1 G B", "٣GB "])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="cache_max_size must be a size such as 50GB"):
        parsed_size("cache_max_size", text)


@given(st.integers(0, 10**15))
def test_a_size_that_is_shown_is_read_again_but_for_its_rounding(size: int) -> None:
    assert parsed_size("x", shown_size(size)) == pytest.approx(size, rel=0.06)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("45m", 2700), ("1.5h", 5400), ("30d", 2592000), ("2W", 1209600)]
)
def test_a_duration_is_read(text: str, seconds: float) -> None:
    assert parsed_duration("x", text) == seconds


@pytest.mark.parametrize("text", ["", "30", "d", "-1d", "1y", "1d 2h"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--older-than must be a time such as 12h"):
        parsed_duration("--older-than", text)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (45_192_360, "45.2 MB"),
        (2_000_000_000, "2.0 GB"),
        (5_000_000_000_000_000, "5000.0 TB"),
    ],
)
def test_bytes_are_readable(size: int, text: str) -> None:
    assert shown_size(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(-5, "now"), (59, "now"), (61, "1 min"), (7300, "2 h"), (200_000, "2 d")]
)
def test_an_age_is_readable(seconds: float, text: str) -> None:
    assert shown_age(seconds) == text
