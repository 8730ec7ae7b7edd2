"""How long a process has been silent."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bei.multiprocess.supervisor.child import EVERY_S, Silence
from bei.server.status.peers import PATIENCE_S

ROUND_S = EVERY_S + PATIENCE_S

rounds = st.lists(st.tuples(st.floats(0.0, 1000.0), st.booleans()), max_size=50)


@given(rounds)
def test_nobody_has_been_silent_for_longer_than_since_the_last_answer_nor_while_the_watcher_slept(
    told: list[tuple[float, bool]],
) -> None:
    now_s, silence = 100.0, Silence(100.0)
    since_s, num_rounds = 0.0, 0
    for passed_s, has_answered in told:
        now_s += passed_s
        silence.note(now_s, has_answered=has_answered)
        since_s, num_rounds = (0.0, 0) if has_answered else (since_s + passed_s, num_rounds + 1)
        assert silence.seconds <= since_s + 1e-6
        assert silence.seconds <= num_rounds * 2 * ROUND_S
        if has_answered:
            assert silence.seconds == 0.0


def test_rounds_without_an_answer_add_up() -> None:
    silence = Silence(0.0)
    for number in range(1, 6):
        silence.note(ROUND_S * number, has_answered=False)
        assert silence.seconds == ROUND_S * number
