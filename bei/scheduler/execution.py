"""A step on the engine, the worker that runs it, and its rows. A sequence that fails in a step fails alone."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from collections.abc import Set as AbstractSet
from math import inf
from typing import NamedTuple, TypeAlias

import numpy as np

from bei.core import Engine, Outputs, PackedBatch, Row, finite_sequences, rows_of_sequences
from bei.engine.postprocess import unit_length
from bei.engine.shared_prefixes import sharing
from bei.errors import BeiError, EngineDeadError, EngineDiedError, EngineError, NonFiniteOutputError
from bei.port import UNIT_EMBEDDING
from bei.scheduler.device_gate import Turn
from bei.scheduler.queue import Entry
from bei.utils.scarce_resources import scarce_resource

log = logging.getLogger(__name__)

# A step is overdue when it takes so many times what was predicted, and at least ``hang_timeout``.
_OVERDUE_FACTOR = 20.0

# Makes the answers to a step's entries, once.
Answers: TypeAlias = Callable[[], Seq[Row | BeiError]]


class Step:
    """A batch on the engine. Times are monotonic seconds. ``num_shared``: tokens that it need not compute."""

    def __init__(self, entries: list[Entry], predicted_s: float, turn: Turn, num_shared: int = 0) -> None:
        self.entries = entries
        self.predicted_s = predicted_s
        self.turn = turn
        self.num_shared = num_shared
        self.started_s = time.monotonic()
        self.watched_s = 0.0  # how long the watchdog has seen it run; a process that was stopped does not count
        self.is_overdue = False
        self.has_failed = False  # in a run: what it took says nothing of its cost


def left_s(steps: Seq[Step], now_s: float) -> float:
    """Predicted seconds left of a running step, mean over ``steps``; 0 if there is none."""
    return sum(max(0.0, step.predicted_s - (now_s - step.started_s)) for step in steps) / max(1, len(steps))


def longest_s(predicted_s: float, hang_timeout_s: float) -> float:
    """The seconds after which a step is taken to hang; 0 for ``hang_timeout_s``: never."""
    return max(hang_timeout_s, _OVERDUE_FACTOR * predicted_s) if hang_timeout_s else inf


class Worker:
    """A thread that runs steps on one stream of one engine.

    ``is_retired``: its engine has been given up. What its step may still answer is dropped, and it ends then.
    ``others``: the workers of the same engine, itself too.
    """

    def __init__(self, engine: Engine, others: list[Worker]) -> None:
        self.engine = engine
        self.others = others
        self.step: Step | None = None
        self.is_retired = False
        self.has_ended = False
        self.thread = threading.Thread()

    def is_wanted(self) -> bool:
        """True while the answers of its step are still needed."""
        return not self.is_retired


class Done(NamedTuple):
    """``answers()[i]`` is the row or the error of ``entries[i]``. ``step``: the step that ran them, and its seconds."""

    entries: Seq[Entry]
    answers: Answers
    step: tuple[Step, float] | None = None


def known(answers: Seq[Row | BeiError]) -> Answers:
    """Answers that need not be made."""
    return lambda: answers


def run_isolating(
    engine: Engine,
    entries: Seq[Entry],
    on_failure: Callable[[str], None],
    is_wanted: Callable[[], bool],
    *,
    has_died: bool = False,
    shares: bool = False,
) -> Answers:
    """Run ``entries`` as one batch. Returns what gives a row or an error for each: rows are made of the engine's
    outputs by whoever delivers them, while the engine runs the next batch.

    If the engine raises, both halves are run again by themselves, until the sequence it fails on is alone. Sequences
    with NaN or Inf are run again without their neighbours, in case it came from one of them. If the engine's process
    dies (EngineDiedError), each sequence is run again alone, once (``has_died``): a guilty half would cost a process.
    Each failed run is logged, and ``on_failure`` gets its kind: ``exception``, ``non_finite`` or ``engine_died``.
    ``is_wanted`` says whether the answers are still waited for: if not, nothing is run again. ``shares``: entries have
    prefixes that the engine computes once. Raises EngineDeadError where the engine does.
    """

    def again(entries: Seq[Entry], *, has_died: bool = False) -> Seq[Row | BeiError]:
        if not is_wanted():
            return [EngineError("The engine was given up.")] * len(entries)
        return run_isolating(engine, entries, on_failure, is_wanted, has_died=has_died, shares=shares)()

    try:
        ran, poisoned = _run(engine, entries, on_failure, shares=shares)
    except EngineDeadError:  # nothing that is run again would be answered: the caller gives the engine up
        raise
    except EngineDiedError:
        on_failure("engine_died")
        if has_died:
            log.error("a second engine process died with one sequence of %d tokens alone", entries[0].num_tokens)
            died = EngineDiedError("Two engine processes died while they ran this input: do not send it again.")
            return known([died])
        log.warning("an engine's process died with one of %d sequences, running each again alone", len(entries))
        return known([again([entry], has_died=True)[0] for entry in entries])
    except Exception as error:  # a border: a batch's failure must reach its requests, whatever it is
        on_failure("exception")
        if len(entries) == 1:
            lack = scarce_resource(error)  # which its traceback would not explain
            reason = f": {lack}" if lack else ""
            log.error(
                "engine failed on one sequence of %d tokens%s", entries[0].num_tokens, reason, exc_info=lack is None
            )
            failed = EngineError("The engine failed on this input; the server's log says why.")
            failed.__cause__ = error.with_traceback(None)  # which would keep the batch in memory
            return known([failed])
        log.warning("engine failed on a batch of %d sequences, running both halves again: %r", len(entries), error)
        half = len(entries) // 2
        return known([*again(entries[:half]), *again(entries[half:])])
    if not poisoned:
        return ran.rows
    on_failure("non_finite")
    if len(entries) == 1:
        log.warning("engine answered NaN or Inf to a sequence of %d tokens", entries[0].num_tokens)
        return known([NonFiniteOutputError("The model's answer to this input is not a finite vector.")])
    log.warning("engine answered NaN or Inf to %d of %d sequences, running them again", len(poisoned), len(entries))
    with np.errstate(invalid="ignore"):
        answers: list[Row | BeiError] = [*ran.rows()]
    groups = [poisoned] if len(poisoned) < len(entries) else [poisoned[0::2], poisoned[1::2]]
    for group in groups:
        for index, answer in zip(group, again([entries[index] for index in group]), strict=True):
            answers[index] = answer
    return known(answers)


class _Ran(NamedTuple):
    """A batch that the engine has run, and the outputs that each of its sequences wants."""

    outputs: Outputs
    batch: PackedBatch
    wanted: Seq[AbstractSet[str]]
    per_token: AbstractSet[str]
    on_failure: Callable[[str], None]

    def rows(self) -> Seq[Row | BeiError]:
        """One a sequence, or an error for each."""
        try:
            return rows_of_batch(self.outputs, self.batch, self.wanted, self.per_token)
        except Exception:  # a border: the thread that delivers goes on
            self.on_failure("exception")
            log.exception("the outputs of %d sequences could not be read", len(self.wanted))
            error = EngineError("The engine's outputs could not be read; the server's log says why.")
            return [error] * len(self.wanted)


def _run(
    engine: Engine, entries: Seq[Entry], on_failure: Callable[[str], None], *, shares: bool
) -> tuple[_Ran, list[int]]:
    """The engine's outputs, and the places of sequences with NaN or Inf."""
    batch = PackedBatch.from_encodings([entry.encoding for entry in entries])
    if shares:
        batch = sharing(batch)
    wanted = [entry.outputs for entry in entries]
    outputs = engine.run(batch, engine_outputs(frozenset[str]().union(*wanted)))
    per_token = engine.info.per_token
    for name, values in outputs.items():
        expected = batch.num_tokens if name in per_token else batch.batch_size
        if len(values) != expected:
            raise EngineError(f"The engine answered {len(values)} rows of {name} instead of {expected}.")
    poisoned: list[int] = np.flatnonzero(~finite_sequences(outputs, batch, per_token)).tolist()
    return _Ran(outputs, batch, wanted, per_token, on_failure), poisoned


def engine_outputs(wanted: AbstractSet[str]) -> AbstractSet[str]:
    """The outputs that the engine must compute for ``wanted``."""
    return (wanted - {UNIT_EMBEDDING}) | {"embedding"} if UNIT_EMBEDDING in wanted else wanted


def rows_of_batch(
    outputs: Outputs, batch: PackedBatch, wanted: Seq[AbstractSet[str]], per_token: AbstractSet[str]
) -> list[Row]:
    """Row i has the outputs ``wanted[i]``.

    Rows of outputs per token are copies: a view would keep the tokens of the whole batch in memory until the last
    sequence of the batch is answered.
    """
    asked = frozenset[str]().union(*wanted)
    parts = {
        name: rows_of_sequences(rows, batch, per_token=name in per_token)
        for name, rows in outputs.items()
        if name in asked
    }
    if UNIT_EMBEDDING in asked:
        parts[UNIT_EMBEDDING] = list(unit_length(outputs["embedding"]))
    return [
        {name: parts[name][index].copy() if name in per_token else parts[name][index] for name in names}
        for index, names in enumerate(wanted)
    ]


def part_of(answer: Row | BeiError, outputs: AbstractSet[str]) -> Row | BeiError:
    """The outputs that were asked for; an equal sequence may have been computed with more."""
    if isinstance(answer, BeiError) or len(answer) == len(outputs):
        return answer
    return {name: answer[name] for name in outputs}
