"""Output of a build."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from bei_build.progress import Progress


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
