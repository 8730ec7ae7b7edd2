"""Whether a process still does its work. It is asked again and again; one that does not answer for too long hangs.

A front end answers on its event loop, the batch manager when each of its queues has said how it stands, an engine
process from a thread beside its engine (steps that do not end are watched by ``remote_engine``).
"""

from __future__ import annotations

from bei.server.status.peers import PATIENCE_S

# The question.
PULSE = "pulse"

EVERY_S = 1.0

# Nobody is taken to hang who is silent for less than that, whatever ``hang_timeout`` says of steps: a process reads a
# tokenizer, say, or shares its core with many others.
LEAST_S = 5.0

# A round of asking takes no longer than that while whoever asks is awake.
_MOST_OF_A_ROUND_S = EVERY_S + 2 * PATIENCE_S


class Silence:
    """How long one process has not answered. Told the time.

    Counts what passed while the one who asks was awake: after the whole machine has stood still, nobody hangs.
    """

    def __init__(self, now_s: float) -> None:
        self.seconds = 0.0
        self._looked_s = now_s

    def note(self, now_s: float, *, has_answered: bool) -> None:
        """A round of asking has ended."""
        passed_s, self._looked_s = now_s - self._looked_s, now_s
        self.seconds = 0.0 if has_answered else self.seconds + min(passed_s, _MOST_OF_A_ROUND_S)
