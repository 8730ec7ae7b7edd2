"""Rich tables and lines as plain text, for standard output and files alike."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


def console_text(*parts: str | Table, width: int = 100) -> str:
    """``parts`` below each other, tables at most ``width`` columns wide; no style, no trailing spaces."""
    from rich.console import Console

    stream = io.StringIO()
    console = Console(file=stream, width=width, highlight=False, markup=False, emoji=False)
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, str))
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())
