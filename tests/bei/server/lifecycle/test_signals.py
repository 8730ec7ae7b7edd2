"""The terminal of the log. Signals themselves are tested end to end (tests/e2e)."""

from __future__ import annotations

import os
import pty
from collections.abc import Iterator

import pytest

from bei.utils.sighup import LogTerminal


@pytest.fixture
def stderr() -> Iterator[None]:
    """Whatever a test makes of descriptor 2."""
    kept = os.dup(2)
    yield
    os.dup2(kept, 2)
    os.close(kept)


def test_a_terminal_is_closed_once_its_other_end_is(stderr: None) -> None:
    master, slave = pty.openpty()
    os.dup2(slave, 2)
    os.close(slave)
    terminal = LogTerminal()
    was_closed = terminal.is_closed
    os.close(master)
    assert (was_closed, terminal.is_closed) == (False, True)


def test_a_log_that_goes_elsewhere_has_no_terminal_to_be_closed(stderr: None) -> None:
    reading, writing = os.pipe()
    os.dup2(writing, 2)
    terminal = LogTerminal()
    os.close(writing)
    os.close(reading)
    assert not terminal.is_closed
