"""Loads and arrival times. A closed loop keeps a number of requests in flight; an open loop sends at a rate, however
long answers take."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import msgspec

from bei.cli.bench.texts import NUM_SERIAL_WORDS, LengthDistribution, lengths_of
from bei.errors import ConfigError
from bei.utils.ranges import Range, shown

Arrivals = Literal["poisson", "constant"]

_RANGES = {
    "rate": Range(0, 1_000_000, "requests a second", above=True),
    "concurrency": Range(1, 100_000),
    "max_connections": Range(1, 100_000),
}


class LoadPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A load. ``concurrency``: a closed loop; ``rate`` (requests/s): an open loop; neither: an open loop at the
    rates of a sweep. ``inputs`` of a request and ``words`` of a text are distributions
    (``bei.cli.bench.texts.LengthDistribution``)."""

    name: str
    rate: float | None = None
    concurrency: int | None = None
    arrivals: Arrivals = "poisson"
    inputs: str = "1"
    words: str = "20"
    query_words: str = "8"
    lane: str | None = None
    max_connections: int = 1000

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,31}", self.name):
            raise ConfigError(f"A load's name must be at most 32 letters, digits and ._-, not {self.name!r}.")
        if self.rate is not None and self.concurrency is not None:
            raise ConfigError(f"Load {self.name}: a rate makes an open loop, a concurrency a closed one: give one.")
        for name, within in _RANGES.items():
            if (value := getattr(self, name)) is not None:
                within.check(f"Load {self.name}: {name}", value)
        if self.arrivals not in get_args(Arrivals):
            raise ConfigError(f"Load {self.name}: arrivals must be poisson or constant, not {self.arrivals!r}.")
        if self.lane not in (None, "interactive", "bulk"):
            raise ConfigError(f"Load {self.name}: the lane must be interactive or bulk, not {self.lane!r}.")
        for name in ("inputs", "words", "query_words"):
            lengths_of(getattr(self, name), f"Load {self.name}: {name}")

    @property
    def is_swept(self) -> bool:
        """True if its rate is that of a sweep's point."""
        return self.rate is None and self.concurrency is None

    @property
    def shape(self) -> str:
        """A description for people."""
        if self.concurrency is not None:
            kind = f"closed loop, {self.concurrency} at once"
        elif self.rate is not None:
            kind = f"open loop, {self.rate:g} requests/s, {self.arrivals}"
        else:
            kind = f"open loop, {self.arrivals}"
        lane = f", lane {self.lane}" if self.lane else ""
        return f"{kind}; {self.inputs} inputs of {self.words} words{lane}"

    def lengths(self, name: Literal["inputs", "words", "query_words"]) -> LengthDistribution:
        """The distribution of the setting ``name``."""
        return lengths_of(getattr(self, name), name)


def check_words(load: LoadPlan) -> None:
    """Raise ConfigError if generated texts would be too short to be unique."""
    for name in ("words", "query_words"):
        lengths = lengths_of(getattr(load, name), name)
        if lengths.kind != "lognormal" and lengths.least < NUM_SERIAL_WORDS:
            raise ConfigError(
                f"Load {load.name}: generated texts need at least {NUM_SERIAL_WORDS} words, which number them: raise "
                f"{name}, or give --texts FILE."
            )


_KINDS = {"rate": float, "concurrency": int, "max_connections": int}


def load_of(text: str, defaults: Mapping[str, Any]) -> LoadPlan:
    """The load described by ``bulk:concurrency=4,inputs=32`` (name, settings) over ``defaults``. Raises ConfigError."""
    name, _, rest = text.partition(":")
    known = [field for field in LoadPlan.__struct_fields__ if field != "name"]
    values: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in rest.split(","))):
        key, equals, value = part.partition("=")
        key = key.strip().replace("-", "_")
        if not equals or key not in known:
            names = ", ".join(field.replace("_", "-") for field in known)
            raise ConfigError(f"--load {text!r}: {part!r} must be KEY=VALUE with one of the keys {names}.")
        if key in values:
            raise ConfigError(f"--load {text!r}: {key} is there twice.")
        values[key] = _number(value.strip(), _KINDS[key], f"--load {text!r}: {key}") if key in _KINDS else value.strip()
    if "rate" in values or "concurrency" in values:  # its own kind of loop replaces that of the flags
        defaults = {key: value for key, value in defaults.items() if key not in ("rate", "concurrency")}
    return LoadPlan(name=name.strip(), **{**defaults, **values})


def _number(text: str, kind: type[float] | type[int], what: str) -> float | int:
    try:
        return kind(text)
    except ValueError:
        raise ConfigError(f"{what} must be a number, not {shown(text)}.") from None


@dataclass(frozen=True)
class WorkerShare:
    """The share of one of several workers in a load."""

    worker: int
    num_workers: int

    def of(self, count: int) -> int:
        """Its share of a number of connections; all workers' shares add up to ``count``."""
        return count // self.num_workers + (self.worker < count % self.num_workers)

    def arrivals(self, load: LoadPlan, end_s: float, seed: int) -> Iterator[float]:
        """The due times of its requests below ``end_s``, in seconds from the start. All workers' together are the
        load's: Poisson processes add up, and constant arrivals alternate."""
        assert load.rate is not None
        if load.arrivals == "constant":
            return _evenly(load.rate, end_s, self.worker, self.num_workers)
        rng = random.Random(f"{seed} {load.name} {self.worker} {self.num_workers}")
        return _poisson(load.rate / self.num_workers, end_s, rng)


def _evenly(rate: float, end_s: float, first: int, step: int) -> Iterator[float]:
    number = first
    while number / rate < end_s:
        yield number / rate
        number += step


def _poisson(rate: float, end_s: float, rng: random.Random) -> Iterator[float]:
    now = rng.expovariate(rate)
    while now < end_s:
        yield now
        now += rng.expovariate(rate)
