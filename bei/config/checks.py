"""Checks of a configuration that its fields describe: numbers within their ranges."""

from __future__ import annotations

from dataclasses import fields
from typing import Any


def check_ranges(config: Any) -> None:
    """Check the numbers of ``config``, a dataclass, by ``within`` in the metadata of its fields. Raises ConfigError."""
    for field in fields(config):
        value, within = getattr(config, field.name), field.metadata.get("within")
        if within is not None and value is not None:
            within.check(field.name, value)
