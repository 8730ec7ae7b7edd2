"""What differs between values of the same names, in words for messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from bei.utils.ranges import shown


def flag_of(name: str) -> str:
    """The flag of a setting."""
    return f"--{name.replace('_', '-')}"


def differences(
    before: Mapping[str, object], now: Mapping[str, object], named: Callable[[str], str] = flag_of
) -> Iterator[str]:
    """``NAME was X, now Y`` for each that differs; one that is missing is None. ``named``: as the message names it."""
    for name in sorted(before.keys() | now.keys()):
        if before.get(name) != now.get(name):
            yield f"{named(name)} was {_shown(before.get(name))}, now {_shown(now.get(name))}"


def _shown(value: object) -> str:
    if value is None or value == [] or value == ():
        return "not given"
    if isinstance(value, (list, tuple)) and all(isinstance(one, str) for one in value):
        return ",".join(value)
    return value if isinstance(value, str) and len(value) < 80 else shown(value)
