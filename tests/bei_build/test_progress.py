"""What a build says."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from bei_build.progress import Progress, in_bytes


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (45_192_360, "45.2 MB"),
        (2_000_000_000, "2.0 GB"),
        (5_000_000_000_000, "5000.0 GB"),
    ],
)
def test_bytes_are_readable(size: int, text: str) -> None:
    assert in_bytes(size) == text


def test_a_log_gets_one_line_a_step_with_time_and_details() -> None:
    text = io.StringIO()
    progress = Progress(Console(file=text, width=40))
    with progress.step("Compile") as step:
        step.details.append("45.2 MB [not markup] " + "long " * 20)
    progress.note("something [odd]")
    progress.finish("Built it")
    compiled, note, built = text.getvalue().splitlines()
    assert re.match(r"  Compile +\d+\.\d\d s  45\.2 MB \[not markup\] long", compiled)
    assert note == "  note: something [odd]"
    assert re.fullmatch(r"Built it in \d+\.\d s", built)


def test_a_step_that_fails_is_not_reported_as_done() -> None:
    text = io.StringIO()
    with pytest.raises(ValueError, match="broken"), Progress(Console(file=text)).step("Compile"):
        raise ValueError("broken")
    assert text.getvalue() == ""
