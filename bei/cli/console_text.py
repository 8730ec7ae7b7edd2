"""Rich tables and lines as plain text, for standard output and files alike; progress on standard error."""

from __future__ import annotations

import io
import shutil
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from bei.utils.share_done import ShareDone, Tell

if TYPE_CHECKING:
    from rich.table import Table

# Columns that every terminal has.
TERMINAL_WIDTH = 80


def stdout_width() -> int:
    """The columns of the terminal that standard output is; in a file those that every terminal has."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else TERMINAL_WIDTH


def wrapped(text: str) -> str:
    """``text`` for standard output: on a terminal in lines that end between words, in a file as it is."""
    if not sys.stdout.isatty():
        return text
    return textwrap.fill(text, stdout_width(), break_long_words=False, break_on_hyphens=False)


def console_text(*parts: str | Table, width: int = TERMINAL_WIDTH) -> str:
    """``parts`` below each other, tables at most ``width`` columns wide; no style, no trailing spaces."""
    from rich.console import Console

    stream = io.StringIO()
    console = Console(file=stream, width=width, highlight=False, markup=False, emoji=False)
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, str))
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())


@contextmanager
def shown_share(what: str) -> Iterator[Tell]:
    """Show on standard error how much of ``what`` is done: live on a terminal, else a line now and then."""
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield ShareDone(log=lambda words: print(f"{what}: {words}", file=sys.stderr, flush=True))  # noqa: T201
        return
    with console.status(what) as status:
        yield ShareDone(show=lambda words: status.update(f"{what}: {words}"))
