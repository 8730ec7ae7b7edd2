"""Command lines of the benchmarks: a keyword a flag, and its default says the type. The module's text explains them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any


def parsed(text: str | None, arguments: Sequence[str] | None = None, **flags: Any) -> argparse.Namespace:
    """``flags``: False for a switch, a list for several values, a tuple for one of these names, the first being the
    default; a type has None as default."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in flags.items():
        flag = f"--{name.replace('_', '-')}"
        if default is False:
            parser.add_argument(flag, action="store_true")
        elif isinstance(default, list):
            parser.add_argument(flag, nargs="+", type=type(default[0]), default=default)
        elif isinstance(default, tuple):
            parser.add_argument(flag, choices=default, default=default[0])
        elif isinstance(default, type):
            parser.add_argument(flag, type=default)
        else:
            parser.add_argument(flag, type=type(default), default=default)
    return parser.parse_args(arguments)
