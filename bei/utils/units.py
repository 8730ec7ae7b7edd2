"""Parses and formats sizes and durations: ``50GB``, ``30d``."""

from __future__ import annotations

import re

from bei.errors import ConfigError
from bei.utils.ranges import shown

_POWERS = {"b": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?(b|[kmgt](i?)b?)", re.IGNORECASE)
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_DURATION = re.compile(rf"([0-9]+(?:\.[0-9]+)?) ?([{''.join(_SECONDS)}])", re.IGNORECASE)

# An exabyte, and a century.
_MOST_BYTES = 10**18
_MOST_SECONDS = 5200 * _SECONDS["w"]


def parsed_size(name: str, text: str) -> int:
    """Bytes of ``text``: 50GB (10^9 each), 50GiB (2^30), 500000B, 0. Raises ConfigError, about the setting ``name``."""
    if text.strip() == "0":  # the only number that means the same in every unit
        return 0
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{name} must be a size such as 50GB, 500MB or 20GiB, not {shown(text)}.")
    number, unit, binary = match.groups()
    value = float(number) * (1024 if binary else 1000) ** _POWERS[unit[0].lower()]
    if value > _MOST_BYTES:
        raise ConfigError(f"{name} must be at most {shown_size(_MOST_BYTES)}, not {shown(text)}.")
    return int(value)


def parsed_duration(name: str, text: str) -> float:
    """Seconds of ``text``: 90s, 45m, 12h, 30d, 2w. Raises ConfigError, about the setting ``name``."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{name} must be a time such as 12h, 30d or 2w, not {shown(text)}.")
    seconds = float(match[1]) * _SECONDS[match[2].lower()]
    if seconds > _MOST_SECONDS:
        raise ConfigError(f"{name} must be at most {_MOST_SECONDS // _SECONDS['w']:,}w, not {shown(text)}.")
    return seconds


def shown_size(num_bytes: int) -> str:
    """``45192360`` -> ``45.2 MB``."""
    value = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def shown_age(seconds: float) -> str:
    """``200000`` -> ``2 d``."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return "now"
