"""Progress of a call: a bar on standard error, or a callback."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

# True draws a bar; a function gets the numbers of inputs done and of all inputs (None: not known), in the caller's
# thread.
Progress: TypeAlias = bool | Callable[[int, int | None], object]


@contextmanager
def reporting(progress: Progress, total: int | None, what: str) -> Iterator[Callable[[int], None]]:
    """Yield a function that advances the progress by a number of inputs. ``what``: the bar's label."""
    if callable(progress):
        yield _counting(progress, total)
    elif progress:
        with _bar(total, what) as advance:
            yield advance
    else:
        yield lambda count: None


def _counting(progress: Callable[[int, int | None], object], total: int | None) -> Callable[[int], None]:
    num_done = 0

    def advance(count: int) -> None:
        nonlocal num_done
        num_done += count
        progress(num_done, total)

    return advance


@contextmanager
def _bar(total: int | None, what: str) -> Iterator[Callable[[int], None]]:
    from rich import progress as bars
    from rich.console import Console

    columns = (
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.MofNCompleteColumn(),
        bars.TimeElapsedColumn(),
        bars.TimeRemainingColumn(),
    )
    with bars.Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)
