"""run_isolating: of a step that fails, only the sequence that is to blame loses its answer."""

from __future__ import annotations

import logging
from collections.abc import Sequence, Set
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bei.core import Encoding, Limits, Outputs, PackedBatch
from bei.engine.fake import FakeEngine, fake_row
from bei.errors import BeiError, EngineDeadError, EngineDiedError, EngineError, NonFiniteOutputError
from bei.scheduler.execution import run_isolating
from bei.scheduler.queue import Entry, Waiter
from tests.support.engines import NaNEngine, PickyEngine, TokenEngine, ids, sequences_of, token_rows

LIMITS = Limits(max_num_tokens=1024, max_batch_size=64, max_seq_len=16)
POISON = 99


def entries_of(sequences: Sequence[Sequence[int]], outputs: Set[str] = frozenset({"embedding"})) -> list[Entry]:
    return [Entry(Encoding(ids(*values)), Waiter(0, 0, inf, outputs), "bulk", 0.0, 0.0) for values in sequences]


def marked(size: int, guilty: Set[int]) -> list[list[int]]:
    return [[index, POISON if index in guilty else 1] for index in range(size)]


class SpreadingEngine(NaNEngine):
    """NaN spreads from the poisonous sequence to all of its batch."""

    def run(self, batch: PackedBatch, outputs: Set[str] | None = None) -> Outputs:
        rows = super().run(batch)["embedding"]
        return {"embedding": rows if np.isfinite(rows).all() else np.full_like(rows, np.nan)}


_guilty = st.integers(1, 40).flatmap(lambda size: st.tuples(st.just(size), st.sets(st.integers(0, size - 1))))


def wanted() -> bool:
    return True


def check(answers: Sequence[object], guilty: Set[int], error: type[BeiError]) -> None:
    for index, answer in enumerate(answers):
        if index in guilty:
            assert type(answer) is error
        else:
            assert isinstance(answer, dict)
            assert answer["embedding"].tolist() == fake_row(ids(index, 1)).tolist()


@settings(max_examples=60, deadline=None)
@given(_guilty)
def test_every_sequence_that_raises_is_an_error_and_all_others_are_answered(drawn: tuple[int, set[int]]) -> None:
    size, guilty = drawn
    kinds: list[str] = []
    engine = PickyEngine(LIMITS, lambda sequence: POISON in sequence)
    answers = run_isolating(engine, entries_of(marked(size, guilty)), kinds.append, wanted)()
    check(answers, guilty, EngineError)
    assert set(kinds) <= {"exception"}
    assert len(kinds) == sum(any(POISON in values for values in sequences_of(batch)) for batch in engine.batches)


@settings(max_examples=60, deadline=None)
@given(_guilty, st.booleans())
def test_every_sequence_of_nan_is_an_error_and_all_others_are_answered(
    drawn: tuple[int, set[int]], spreads: bool
) -> None:
    size, guilty = drawn
    kinds: list[str] = []
    engine = (SpreadingEngine if spreads else NaNEngine)(LIMITS, POISON)
    answers = run_isolating(engine, entries_of(marked(size, guilty)), kinds.append, wanted)()
    check(answers, guilty, NonFiniteOutputError)
    assert set(kinds) <= {"non_finite"}
    assert bool(kinds) == bool(guilty)


@settings(max_examples=60, deadline=None)
@given(_guilty)
def test_every_sequence_that_ends_engine_processes_is_an_error_and_costs_one_process_alone(
    drawn: tuple[int, set[int]],
) -> None:
    size, guilty = drawn
    kinds: list[str] = []
    engine = PickyEngine(LIMITS, lambda sequence: POISON in sequence, EngineDiedError)
    answers = run_isolating(engine, entries_of(marked(size, guilty)), kinds.append, wanted)()
    check(answers, guilty, EngineDiedError)
    assert kinds == ["engine_died"] * (len(guilty) + bool(guilty))
    assert [batch.batch_size for batch in engine.batches] == [size] + [1] * (size if guilty else 0)


def test_a_process_that_dies_once_costs_nobody_an_answer() -> None:
    class DiesOnce(FakeEngine):
        def run(self, batch: PackedBatch, outputs: Set[str] | None = None) -> Outputs:
            answers = super().run(batch)
            if len(self.batches) == 1:
                raise EngineDiedError("The engine's process ended.")
            return answers

    for size in (1, 5):
        answers = run_isolating(DiesOnce(LIMITS), entries_of(marked(size, set())), lambda kind: None, wanted)()
        check(answers, set(), EngineDiedError)
        assert len(answers) == size


def test_one_guilty_sequence_of_many_is_found_in_a_logarithm_of_runs() -> None:
    engine = PickyEngine(LIMITS, lambda sequence: POISON in sequence)
    run_isolating(engine, entries_of(marked(64, {37})), lambda kind: None, wanted)
    assert len(engine.batches) == 1 + 2 * 6


def test_neighbours_of_nan_are_not_run_again() -> None:
    engine = NaNEngine(LIMITS, POISON)
    run_isolating(engine, entries_of(marked(8, {2, 5})), lambda kind: None, wanted)
    assert sequences_of(engine.batches[1]) == [[2, POISON], [5, POISON]]


def test_each_failure_is_logged_and_what_the_engine_said_does_not_reach_the_client(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = PickyEngine(LIMITS, lambda sequence: POISON in sequence)
    with caplog.at_level(logging.WARNING):
        answers = run_isolating(engine, entries_of(marked(2, {1})), lambda kind: None, wanted)()
    assert [record.levelname for record in caplog.records] == ["WARNING", "ERROR"]
    assert "batch of 2 sequences" in caplog.text
    assert "poison" in caplog.text
    assert "poison" not in str(answers[1])


@pytest.mark.parametrize(
    "engine",
    [
        PickyEngine(LIMITS, lambda sequence: POISON in sequence),
        PickyEngine(LIMITS, lambda sequence: POISON in sequence, EngineDiedError),
        NaNEngine(LIMITS, POISON),
    ],
    ids=["raises", "dies", "NaN"],
)
def test_nothing_is_run_again_when_nobody_waits_for_it_any_more(engine: FakeEngine) -> None:
    answers = run_isolating(engine, entries_of(marked(8, {2, 5})), lambda kind: None, lambda: False)()
    assert len(engine.batches) == 1
    assert len(answers) == 8


def test_what_ends_the_thread_is_not_held_back() -> None:
    class Dying(FakeEngine):
        def run(self, batch: PackedBatch, outputs: Set[str] | None = None) -> Outputs:
            raise SystemExit

    with pytest.raises(SystemExit):
        run_isolating(Dying(LIMITS), entries_of(marked(3, set())), lambda kind: None, wanted)


def test_a_dead_engine_is_not_asked_again() -> None:
    class Dead(FakeEngine):
        num_runs = 0

        def run(self, batch: PackedBatch, outputs: Set[str] | None = None) -> Outputs:
            self.num_runs += 1
            raise EngineDeadError("The GPU is lost: restart the server.")

    engine = Dead(LIMITS)
    with pytest.raises(EngineDeadError, match="GPU is lost"):
        run_isolating(engine, entries_of(marked(8, set())), lambda kind: None, wanted)
    assert engine.num_runs == 1


class Recorder(TokenEngine):
    """Computes what is asked for, and remembers it."""

    def __init__(self) -> None:
        super().__init__(LIMITS, poison_id=POISON)
        self.asked: list[Set[str] | None] = []

    def run(self, batch: PackedBatch, outputs: Set[str] | None = None) -> Outputs:
        self.asked.append(outputs)
        return {name: rows for name, rows in super().run(batch).items() if outputs is None or name in outputs}


def test_a_step_computes_what_any_of_its_sequences_asks_for_and_no_more() -> None:
    engine = Recorder()
    dense, tokens = entries_of([[1], [2]]), entries_of([[3, 4]], frozenset({"token_ids"}))
    run_isolating(engine, dense, lambda kind: None, wanted)
    answers = run_isolating(engine, [*dense, *tokens], lambda kind: None, wanted)()
    assert engine.asked == [{"embedding"}, {"embedding", "token_ids"}]
    rows = [answer for answer in answers if isinstance(answer, dict)]
    assert [set(row) for row in rows] == [{"embedding"}, {"embedding"}, {"token_ids"}]
    np.testing.assert_array_equal(rows[2]["token_ids"], token_rows(ids(3, 4)))


def test_nan_in_an_output_that_only_a_neighbour_asked_for_costs_nobody_else_the_answer() -> None:
    dense, tokens = entries_of([[1, POISON]]), entries_of([[3, 4]], frozenset({"token_ids"}))
    answers = run_isolating(Recorder(), [*dense, *tokens], lambda kind: None, wanted)()
    assert not any(isinstance(answer, BeiError) for answer in answers)


@pytest.mark.parametrize("output", ["embedding", "token_ids"])
def test_an_engine_that_loses_rows_is_an_error(output: str) -> None:
    class Short(Recorder):
        def run(self, batch: PackedBatch, outputs: Set[str] | None = None) -> Outputs:
            return {name: rows[:-1] for name, rows in super().run(batch, outputs).items()}

    engine = Short()
    answers = run_isolating(engine, entries_of([[1, 2], [3]], frozenset({output})), lambda kind: None, wanted)()
    assert [type(answer) for answer in answers] == [EngineError, EngineError]
