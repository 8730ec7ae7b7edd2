"""Lengths follow their distributions, and texts are unique unless repetition was requested."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bei.cli.bench.texts import (
    NUM_SERIAL_WORDS,
    GeneratedTexts,
    LengthDistribution,
    TextsPlan,
    WordNumbers,
    lengths_of,
    lines_of,
    plan_of,
    texts_of,
)
from bei.errors import ConfigError


@given(
    text=st.one_of(
        st.integers(1, 500).map(str),
        st.tuples(st.integers(1, 50), st.integers(0, 50)).map(lambda pair: f"uniform:{pair[0]}:{sum(pair)}"),
        st.tuples(st.floats(1, 500), st.floats(0.01, 3), st.integers(1, 600)).map(
            lambda three: f"lognormal:{three[0]}:{three[1]}:{three[2]}"
        ),
    ),
    seed=st.integers(0, 100),
)
def test_lengths_are_whole_numbers_within_their_bounds(text: str, seed: int) -> None:
    lengths, rng = lengths_of(text, "words"), random.Random(seed)
    bounds = {"fixed": (lengths.a, lengths.a), "uniform": (lengths.a, lengths.b), "lognormal": (1, lengths.c)}
    low, high = bounds[lengths.kind]
    for _ in range(20):
        length = lengths.draw(rng)
        assert isinstance(length, int)
        assert low <= length <= high
        assert length >= lengths.least


def test_distributions_have_the_mean_and_the_spread_asked_for() -> None:
    rng = random.Random(0)
    drawn = np.array([lengths_of("lognormal:58:0.85", "words").draw(rng) for _ in range(20_000)])
    assert drawn.mean() == pytest.approx(58, rel=0.03)
    assert np.log(drawn).std() == pytest.approx(0.85, rel=0.03)
    flat = [lengths_of("uniform:5:14", "words").draw(rng) for _ in range(5_000)]
    assert set(flat) == set(range(5, 15))
    assert np.bincount(flat)[5:].std() < 60


@pytest.mark.parametrize(
    "text",
    ["", "0", "-3", "2.5", "x", "uniform:5", "uniform:9:5", "lognormal:5", "lognormal:0:1", "lognormal:5:0", "zipf:3",
     "lognormal:5:9", "nan", "inf", "fixed:1:2", "999999999"],
)  # fmt: skip
def test_what_is_no_distribution_is_refused_by_the_name_of_its_setting(text: str) -> None:
    with pytest.raises(ConfigError, match="Load all: words must be"):
        lengths_of(text, "Load all: words")


@settings(max_examples=30)
@given(num_words=st.integers(1, 3), size=st.integers(1, 12))
def test_numbers_in_words_are_a_permutation(num_words: int, size: int) -> None:
    numbered = WordNumbers([f"w{number}" for number in range(size)], num_words)
    written = [tuple(numbered[number]) for number in range(numbered.size)]
    assert len(set(written)) == numbered.size == size**num_words
    assert written[0] == tuple(numbered[numbered.size])


@settings(max_examples=4, deadline=None)
@given(words=st.integers(1, 40), num_workers=st.integers(1, 4))
def test_no_two_texts_of_any_worker_are_alike(words: int, num_workers: int) -> None:
    lengths = LengthDistribution("fixed", words)
    sources = [texts_of(TextsPlan(seed=1), worker, num_workers) for worker in range(num_workers)]
    texts = [source.take(lengths) for source in sources for _ in range(200)]
    assert len(set(texts)) == len(texts)
    assert {len(text.split()) for text in texts} == {max(words, NUM_SERIAL_WORDS)}


def test_words_come_as_often_as_in_prose_and_the_same_for_the_same_seed() -> None:
    lengths = LengthDistribution("fixed", 200)
    texts = [GeneratedTexts(seed, 0, 1).take(lengths) for seed in (3, 3, 4)]
    assert texts[0] == texts[1] != texts[2]
    source = GeneratedTexts(0, 0, 1)
    words = [word for _ in range(100) for word in source.take(lengths).split()]
    assert 0.04 < words.count("the") / len(words) < 0.12
    assert len(set(words)) > 2000
    assert all(word.isascii() and word.islower() for word in words)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "texts.txt"
    path.write_text("one\n\n  two \nthree\none\n", encoding="utf-8")
    return path


def test_lines_of_a_file_come_in_their_order_and_numbered_when_they_come_again(file: Path) -> None:
    plan = plan_of(file, 0, None)
    assert (plan.file, plan.num_lines) == (str(file), 3)
    source = texts_of(plan, 0, 1)
    texts = [source.take(LengthDistribution("fixed", 9)) for _ in range(9)]
    assert texts[:3] == ["one", "two", "three"]
    assert [text.split()[1] for text in texts[3:]] == ["one", "two", "three"] * 2
    assert len(set(texts)) == 9


def test_workers_share_the_lines_of_a_file(file: Path) -> None:
    sources = [texts_of(plan_of(file, 0, None), worker, 2) for worker in range(2)]
    taken = [source.take(LengthDistribution("fixed", 9)) for source in sources for _ in range(6)]
    assert len(set(taken)) == 12
    assert {"one", "two", "three"} <= set(taken)


def test_texts_are_repeated_where_that_is_asked_for(file: Path) -> None:
    lengths = LengthDistribution("fixed", 5)
    for plan in (TextsPlan(repeated=2), plan_of(file, 0, 2)):
        sources = [texts_of(plan, worker, 2) for worker in range(2)]
        taken = [[source.take(lengths) for _ in range(4)] for source in sources]
        assert taken[0] == taken[1]
        assert taken[0][:2] == taken[0][2:]
        assert taken[0][0] != taken[0][1]


def test_a_file_without_texts_or_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n\n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for name, message in (
        ("empty", "no texts"),
        ("binary", "cannot be read"),
        ("missing", "no texts"),
        (".", "cannot"),
    ):
        with pytest.raises(ConfigError, match=f"{message}|cannot be read"):
            lines_of(tmp_path / name)
