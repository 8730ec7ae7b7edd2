"""When processes are started again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bei.multiprocess.supervisor.child import Backoff


def test_the_first_ends_cost_no_time_and_more_of_them_ever_more_up_to_a_bound() -> None:
    backoff = Backoff()
    delays = [backoff.delay_s(float(second)) for second in range(20)]
    assert delays[:10] == [0.0] * 10
    assert delays[10:16] == [0.25, 0.5, 1.0, 2.0, 4.0, 5.0]
    assert max(delays) == 5.0
    assert backoff.delay_s(1000.0) == 0.0  # long ago


@given(st.lists(st.floats(6.1, 1e6), max_size=50))
def test_a_process_that_ends_every_now_and_then_is_started_at_once(pauses: list[float]) -> None:
    backoff, now_s = Backoff(), 0.0
    for pause_s in pauses:
        now_s += pause_s
        assert backoff.delay_s(now_s) == 0.0
