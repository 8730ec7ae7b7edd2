"""Texts that a server has not met: none twice in a lap, and a refusal where they run out."""

from __future__ import annotations

import random
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.harness.servers import Fleet, UnseenTexts
from benchmarks.harness.texts import PASSAGES, SHORT, Prose, ProseExhaustedError, Words, read_prose

_RNG = random.Random(0)
DOCUMENTS = [" ".join(f"w{_RNG.randrange(2_000)}" for _ in range(120)) for _ in range(40)]
LIBRARY = [" ".join(f"w{_RNG.randrange(2_000)}" for _ in range(120)) for _ in range(500)]


@given(
    documents=st.lists(st.text("ab ", min_size=1, max_size=60), max_size=30),
    counts=st.lists(st.integers(0, 8), max_size=6),
    mean=st.integers(3, 6),
)
def test_no_text_is_handed_out_twice_in_a_lap_however_often_documents_repeat(
    documents: list[str], counts: list[int], mean: int
) -> None:
    prose, taken = Prose(documents * 3), list[str]()
    for count in counts:
        try:
            taken += prose.take(count, Words(mean, 0.3))
        except ProseExhaustedError:
            break
    assert len(set(taken)) == len(taken) == prose.num_taken


def test_passages_are_whole_words_of_the_documents_with_the_lengths_asked_for() -> None:
    texts = Prose(LIBRARY).take(500, Words(8))
    assert {len(text.split()) for text in texts} == {8}
    words = set(" ".join(LIBRARY).split())
    assert all(set(text.split()) <= words for text in texts)
    lengths = [len(text.split()) for text in Prose(LIBRARY).take(2_000, SHORT)]
    assert 18 < sum(lengths) / len(lengths) < 22
    assert max(lengths) <= SHORT.most
    assert min(lengths) >= 3


def test_where_the_prose_ends_it_refuses_and_keeps_what_it_could_not_complete() -> None:
    prose = Prose(DOCUMENTS)
    first = prose.take(100, Words(30))
    with pytest.raises(ProseExhaustedError, match="100 texts"):
        prose.take(61, Words(30))  # 4,800 words are 160 of them
    rest = prose.take(60, Words(30))
    assert len({*first, *rest}) == 160


def test_what_was_given_back_is_handed_out_again_and_nothing_else_is() -> None:
    prose = Prose(DOCUMENTS)
    texts = prose.take(10, SHORT)
    prose.give_back(texts[6:], SHORT)
    again = prose.take(6, SHORT)
    assert again[:4] == texts[6:]
    assert not set(again[4:]) & set(texts)
    assert prose.num_taken == 12


def test_a_new_lap_is_another_order_and_the_same_seed_the_same_texts() -> None:
    one, other = Prose(DOCUMENTS, seed=1), Prose(DOCUMENTS, seed=1)
    assert one.take(20, SHORT) == other.take(20, SHORT)
    one.new_lap()
    assert one.take(20, SHORT) != Prose(DOCUMENTS, seed=1).take(20, SHORT)


def test_prose_that_repeats_goes_on_in_a_new_lap() -> None:
    prose = Prose(DOCUMENTS, repeats=True)
    assert len(prose.take(500, Words(30))) == 500
    assert prose.lap == 3


def test_corpora_that_are_not_there_are_named_with_the_command(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"tests\.real\.fetch scifact fiqa"):
        read_prose(folder=tmp_path)
    for name in ("scifact", "fiqa"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "corpus.jsonl").write_text('{"_id": "1", "title": "A b", "text": "c d e f g"}\n')
    assert read_prose(folder=tmp_path).take(1, Words(7))[0] == "A b c d e f g"
    assert PASSAGES.mean > SHORT.mean


class Restarted:
    """A fleet that counts."""

    num_starts = 1

    def restart(self) -> None:
        self.num_starts += 1


def test_servers_are_restarted_before_texts_come_that_they_have_met() -> None:
    fleet = Restarted()
    texts = UnseenTexts(Prose(DOCUMENTS), cast(Fleet, fleet))
    met = set[str]()
    for turn in range(1, 6):  # 160 texts a lap: two turns of 60
        (short, other) = texts.take((40, Words(30)), (20, Words(30)))
        assert fleet.num_starts == (turn + 1) // 2
        met = set() if turn % 2 else met
        assert len({*short, *other}) == 60
        assert not met & {*short, *other}
        met |= {*short, *other}
    assert texts.described()["laps"] == 3
