"""Ranges of the numbers that a person sets: sizes, counts, times, shares."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass

from bei.errors import ConfigError

_MOST_DIGITS = 25

# Limits of what is given in seconds and bytes: a week, a terabyte.
WEEK_S = 604_800
TERABYTE = 1_000_000_000_000


@dataclass(frozen=True)
class Range:
    """From ``least`` to ``most``, both included unless ``above`` or ``below`` excludes one. ``unit``: as "seconds"."""

    least: float
    most: float
    unit: str = ""
    above: bool = False
    below: bool = False

    def __contains__(self, value: float) -> bool:
        is_within = self.least <= value <= self.most  # False for NaN
        return is_within and not (self.above and value == self.least) and not (self.below and value == self.most)

    def __str__(self) -> str:
        unit = f" {self.unit}" if self.unit else ""
        if self.above:
            return f"above {shown(self.least)} and {'below' if self.below else 'at most'} {shown(self.most)}{unit}"
        if self.below:
            return f"at least {shown(self.least)} and below {shown(self.most)}{unit}"
        return f"from {shown(self.least)} to {shown(self.most)}{unit}"

    def check(self, name: str, value: float) -> None:
        """Raise ConfigError, about the setting ``name``, if ``value`` is outside."""
        if value not in self:
            raise ConfigError(f"{name} must be {self}, not {shown(value)}.")


def shown(value: object) -> str:
    """A given value in a message: numbers grouped, what is long shortened. A number may have a million digits."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        text = repr(value) if isinstance(value, str) else _of_container(value)
        return text if len(text) <= 80 else f"{text[:60]}... ({len(text):,} characters)"
    if isinstance(value, int) and value.bit_length() > _MOST_DIGITS * math.log2(10):
        return f"a number of {int(value.bit_length() * math.log10(2)) + 1:,} digits"
    if isinstance(value, float) and not (value.is_integer() and abs(value) < 1e15):
        return f"{value:g}"
    return f"{int(value):,}"


def _of_container(value: object) -> str:
    """Not ``repr``: a few lines of YAML can stand for more text than there is memory."""
    if isinstance(value, (list, tuple, set)):
        return f"a list of {len(value):,}"
    return f"a table of {len(value):,}" if isinstance(value, dict) else repr(value)


def whole(least: int, most: int) -> Callable[[str], int]:
    """The type of flags that take a whole number within the range."""
    within = Range(least, most)

    def parse(text: str) -> int:
        if not text.isdecimal() or len(text) > 25 or int(text) not in within:
            raise argparse.ArgumentTypeError(f"must be a whole number {within}, not {shown(text)}")
        return int(text)

    return parse
