"""Output of a running build: steps with their times, and bytes written."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.status import Status

from bei.utils.share_done import ShareDone, Tell


class Step:
    """``details`` are printed at the end of the step; ``say`` shows its current work on a terminal, ``tell`` how much
    of it is done, in a log now and then."""

    def __init__(self, say: Callable[[str], None], tell: Tell) -> None:
        self.details: list[str] = []
        self.say = say
        self.tell = tell


class Progress:
    """Reports to stderr: live on a terminal, one line per step in a log. ``worded`` rewrites notes."""

    def __init__(self, console: Console | None = None, worded: Callable[[str], str] = str) -> None:
        self._worded = worded
        self._console = console or Console(stderr=True, highlight=False)
        self._started = time.perf_counter()

    @contextmanager
    def step(self, title: str) -> Iterator[Step]:
        """Time a step. Its details are printed after its title."""
        started = time.perf_counter()
        with self._console.status(f"{title} ...") as status:
            yield (step := self._step(title, status))
        seconds = time.perf_counter() - started
        details = " ".join(step.details)
        self._print(f"  {title:<24} {seconds:7.2f} s  {details}".rstrip(), " " * 38)

    def _step(self, title: str, status: Status) -> Step:
        def say(text: str) -> None:
            status.update(f"{title} ... {escape(text)}")

        def log(text: str) -> None:
            self._print(f"  {title}: {text}")

        return Step(say, ShareDone(say) if self._console.is_terminal else ShareDone(log=log))

    def note(self, text: str) -> None:
        """Print a note for the user."""
        self._print(f"  note: {self._worded(text)}", " " * 8)

    def finish(self, text: str) -> None:
        """Print the last line."""
        seconds = time.perf_counter() - self._started
        self._print(f"{text} in {seconds:.1f} s")

    def _print(self, text: str, indent: str = "") -> None:
        """In a log as one line; on a terminal in lines that end between words, all but the first behind ``indent``."""
        if self._console.is_terminal:
            width = self._console.width
            text = textwrap.fill(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
        self._console.print(text, markup=False, soft_wrap=True)
