"""Output of a build."""

from __future__ import annotations

import io
import re
import time

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


def test_on_a_terminal_lines_end_between_words_and_go_on_behind_the_time() -> None:
    text = io.StringIO()
    progress = Progress(Console(file=text, width=80, force_terminal=True, color_system=None))
    with progress.step("Compare tokens") as step:
        step.details.append("131 texts and 122 pairs, as transformers 5.24.0 (BertTokenizer)")
    progress.note(f"building it into {'/long' * 20} (once)")
    *_, first, second, note, path, rest = text.getvalue().splitlines()
    assert first.endswith("131 texts and 122 pairs, as transformers")
    assert second == " " * 38 + "5.24.0 (BertTokenizer)"
    assert (note, path, rest) == ("  note: building it into", " " * 8 + "/long" * 20, " " * 8 + "(once)")


def test_a_step_that_fails_is_not_reported_as_done() -> None:
    text = io.StringIO()
    with pytest.raises(ValueError, match="broken"), Progress(Console(file=text)).step("Compile"):
        raise ValueError("broken")
    assert text.getvalue() == ""


def test_a_step_that_takes_long_says_now_and_then_in_a_log_how_much_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bei.utils.share_done._LOG_INTERVAL_S", 0.0)
    text = io.StringIO()
    with Progress(Console(file=text, width=40)).step("Ask reference") as step:
        step.tell(1, 4)
    first, last = text.getvalue().splitlines()
    assert first == "  Ask reference: 25%"
    assert last.startswith("  Ask reference  ")


def test_a_terminal_shows_how_much_of_a_step_is_done_and_keeps_no_line_of_it() -> None:
    text = io.StringIO()
    with Progress(Console(file=text, width=60, force_terminal=True, color_system=None)).step("Ask reference") as step:
        step.tell(1, 4)
        time.sleep(0.3)  # the screen is drawn some times a second
    assert "Ask reference ... 25%" in text.getvalue()
    kept = text.getvalue().rpartition("\x1b[2K")[2]  # behind the last line that was erased
    assert re.fullmatch(r"  Ask reference +\d\.\d\d s\n", kept)
