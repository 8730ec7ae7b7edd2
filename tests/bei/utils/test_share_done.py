"""How much is done and how long the rest may take, on a terminal and in a log."""

from __future__ import annotations

from bei.utils.share_done import ShareDone


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_terminal_is_told_the_share_and_the_time_left() -> None:
    clock, shown = Clock(), list[str]()
    tell = ShareDone(shown.append, clock=clock)
    for after_s, done in ((0.0, 0), (0.5, 1), (10.0, 10), (60.0, 25)):
        clock.now = 100.0 + after_s
        tell(done, 100)
    assert shown == ["0%", "1%", "10%, 1 min 30 s left", "25%, 3 min 00 s left"]


def test_a_log_gets_a_line_now_and_then() -> None:
    clock, lines = Clock(), list[str]()
    tell = ShareDone(log=lines.append, clock=clock)
    for second in range(100):
        clock.now = 100.0 + second
        tell(second, 100)
    assert lines == ["30%, 1 min 10 s left", "60%, 40 s left", "90%, 10 s left"]


def test_work_that_begins_anew_is_timed_anew() -> None:
    clock, shown = Clock(), list[str]()
    tell = ShareDone(shown.append, clock=clock)
    tell(5, 10)
    clock.now += 1000
    tell(0, 10)
    clock.now += 10
    tell(5, 10)
    assert shown[-1] == "50%, 10 s left"
    clock.now += 1000
    tell(1, 10)
    assert shown[-1] == "10%"


def test_nothing_to_do_is_no_error() -> None:
    shown: list[str] = []
    ShareDone(shown.append)(0, 0)
    assert shown == ["0%"]
