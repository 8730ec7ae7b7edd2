"""Stages of a request: the time from its headers to its answer, divided into parts that add up.

Inputs of one request may be in different stages at once. Each moment counts for the latest stage: inference while any
input is in a step, else queue while any input waits for one, else tokenization.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from itertools import accumulate
from typing import NamedTuple

RECEIVE = "receive"  # from the headers to the end of the body
PARSE = "parse"  # until the request is accepted or refused
TOKENIZATION = "tokenization"
QUEUE = "queue"
INFERENCE = "inference"
RENDER = "render"  # until the answer begins: delivery, post-processing, serialization

# The limit for stages of one request in a trace: bulk work takes hundreds of steps with waits between them.
MOST_STAGES = 96


class Stage(NamedTuple):
    """A part of a request's time, in microseconds since its beginning."""

    name: str
    begun_us: int
    ended_us: int


class InputStep(NamedTuple):
    """A step that answered inputs of one call: when their first input reached the engine port, and when it ran."""

    submitted_s: float
    started_s: float
    ended_s: float


def ends_of_steps(steps: Iterable[InputStep], accepted_s: float) -> Iterator[tuple[str, float]]:
    """Names and end times of the stages from ``accepted_s`` to the end of the last of ``steps``."""
    ordered = sorted(steps, key=lambda step: step.started_s)
    # For each step, the earliest arrival of an input that it or a later step ran.
    earliest = [*accumulate((step.submitted_s for step in reversed(ordered)), min)][::-1]
    at_s = accepted_s
    for step, submitted_s in zip(ordered, earliest, strict=True):
        if step.started_s > at_s or step is ordered[0]:
            yield TOKENIZATION, min(submitted_s, step.started_s)
            yield QUEUE, step.started_s
        yield INFERENCE, step.ended_s
        at_s = max(at_s, step.ended_s)


def stages_of(begun_s: float, ends: Iterable[tuple[str, float]], ended_s: float) -> list[Stage]:
    """Consecutive stages from names and end times, clamped to the order given and to ``ended_s``. Equal neighbours are
    merged; of stages without length only the first of each name is kept."""
    stages: list[Stage] = []
    names: set[str] = set()
    at_us, last_us = 0, microseconds(ended_s - begun_s)
    for name, end_s in ends:
        end_us = min(max(at_us, microseconds(end_s - begun_s)), last_us)
        if stages and stages[-1].name == name:
            stages[-1] = stages[-1]._replace(ended_us=end_us)
        elif end_us > at_us or name not in names:
            stages.append(Stage(name, at_us, end_us))
            names.add(name)
        at_us = end_us
    return stages if len(stages) <= MOST_STAGES else [*_fewer(stages)]


def totals_us(stages: Iterable[Stage]) -> dict[str, int]:
    """The total time of each stage."""
    totals: dict[str, int] = {}
    for name, begun_us, ended_us in stages:
        totals[name] = totals.get(name, 0) + ended_us - begun_us
    return totals


def microseconds(seconds: float) -> int:
    """Rounded to whole microseconds."""
    return round(seconds * 1e6)


def _fewer(stages: Seq[Stage]) -> Iterator[Stage]:
    """Merges neighbours by name: the total of each stage is kept, not its place in between."""
    num_groups = MOST_STAGES // len({stage.name for stage in stages})
    size = -(-len(stages) // num_groups)
    for first in range(0, len(stages), size):
        group = stages[first : first + size]
        at_us = group[0].begun_us
        for name, total_us in totals_us(group).items():
            yield Stage(name, at_us, at_us + total_us)
            at_us += total_us
