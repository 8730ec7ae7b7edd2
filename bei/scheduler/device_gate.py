"""Turns on a device that several engines share: one step at a time, whichever model it is of.

Engines that ran side by side would take each other's cores (or streaming multiprocessors), and a short step of one
model would last as long as the long steps of another. Where the device is the host's cores, so would a step beside
which images are decoded: it ends with the last of its threads.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

# Interactive work goes first until its model has had this much more engine time than a model that waits; then the other
# gets one turn. This limits how long interactive work of one model can delay bulk work of another.
_MOST_AHEAD_S = 1.0

# Interactive work is expected for so long after the last of it came.
_EXPECTED_S = 2.0

# After a step, bulk work waits at most so long for images that are being decoded; and decoding, for a step that may
# hang.
_LONGEST_DECODING_S = 0.05
_LONGEST_STEP_S = 1.0


class InteractiveExpectation:
    """Expects more interactive work for a moment after the last of it came. The caller passes the time."""

    def __init__(self) -> None:
        self._last_s = float("-inf")

    def note(self, now_s: float) -> None:
        """Interactive work has come."""
        self._last_s = now_s

    def holds(self, now_s: float) -> bool:
        """True while more is expected."""
        return now_s - self._last_s < _EXPECTED_S


class DeviceGate:
    """Lets as many steps run at once as the engine with the most streams has. Safe in threads."""

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._waiting: list[_Place] = []
        self._users: list[GateUser] = []
        self._free = 0  # below 0 where engines have left whose steps still run
        self._num_slots = 0
        self._num_decoding = 0  # threads
        self._decoding_until_s = 0.0

    def join(
        self,
        num_streams: int,
        has_interactive: Callable[[], bool],
        short_step_s: Callable[[], float],
        *,
        uses_cores: bool = False,
    ) -> GateUser:
        """Add an engine. Both are called in any thread: ``has_interactive`` says whether interactive work waits,
        ``short_step_s`` how long a step of one short sequence takes, in seconds. ``uses_cores``: the engine
        computes on the host's cores."""
        with self._lock:
            user = GateUser(self, num_streams, has_interactive, short_step_s, uses_cores=uses_cores)
            user.served_s = max((other.served_s for other in self._users), default=0.0)
            self._users.append(user)
            self._resize()
            return user

    def leave(self, user: GateUser) -> None:
        """Remove an engine that will take no more turns. Its running steps still give back their turns."""
        with self._lock:
            self._users = [other for other in self._users if other is not user]
            self._resize()

    def _resize(self) -> None:
        """Set the number of turns to the most streams of any engine. The caller holds the lock."""
        grown = max((user.num_streams for user in self._users), default=0) - self._num_slots
        self._num_slots += grown
        self._free += grown
        if grown > 0:
            self._lock.notify_all()

    def expects_interactive(self) -> bool:
        """True if interactive work for any engine waits, or came a moment ago, so that more may follow."""
        return any(user.expects_interactive() for user in self._users)

    def shortest_step_s(self) -> float | None:
        """The least ``short_step_s`` of the engines that expect interactive work; where none does, of all; None where
        there are none."""
        users = self._users
        expecting = [user for user in users if user.expects_interactive()]
        return min((user.short_step_s() for user in expecting or users), default=None)

    def begin_decoding(self) -> None:
        """The calling thread decodes images from now on. While interactive work is expected on the host's cores, wait
        for the end of a step there; the next one of bulk work waits for ``end_decoding``."""
        with self._lock:
            self._num_decoding += 1
            self._lock.wait_for(self._may_decode, _LONGEST_STEP_S)

    def may_decode(self) -> bool:
        """False where a thread that decodes had better begin anew."""
        with self._lock:
            return self._may_decode()

    def end_decoding(self) -> None:
        """The calling thread decodes no more for now."""
        with self._lock:
            self._num_decoding -= 1
            if not self._num_decoding and self._waiting:
                self._lock.notify_all()

    def _may_decode(self) -> bool:
        """The caller holds the lock."""
        return not (any(user.uses_cores and user.num_turns for user in self._users) and self.expects_interactive())

    def _awaits_decoding(self, user: GateUser) -> bool:
        """True where the next step of ``user`` waits for threads that decode. The caller holds the lock."""
        return (
            self._num_decoding > 0
            and user.uses_cores
            and time.monotonic() < self._decoding_until_s
            and self.expects_interactive()
            and not user.has_interactive()
        )

    def num_busy(self, user: GateUser) -> int:
        """The number of engines that have a turn or wait for one, ``user`` included."""
        if len(self._users) == 1:
            return 1
        with self._lock:
            running = {other for other in self._users if other.num_turns}
            return len({place.user for place in self._waiting} | running | {user})

    def take(self, user: GateUser) -> None:
        """Wait for ``user``'s turn."""
        with self._lock:
            if self._free > 0 and not self._waiting and not self._awaits_decoding(user):
                self._free -= 1
                user.num_turns += 1
                return
            others = [place.user for place in self._waiting]
            if user not in others:
                # A model that was idle gets no credit for that time.
                least_s = min((other.served_s for other in others), default=user.served_s)
                user.served_s = max(user.served_s, least_s - _MOST_AHEAD_S)
            place = _Place(user)
            self._waiting.append(place)
            while True:
                self._grant()
                if place.has_turn:
                    return
                left_s = self._decoding_until_s - time.monotonic()
                self._lock.wait(left_s if self._num_decoding and left_s > 0 else None)

    def give_back(self, user: GateUser, seconds: float) -> None:
        """Free the turn of ``user``, whose step took ``seconds``, and count these as its engine time."""
        with self._lock:
            user.served_s += seconds
            user.num_turns -= 1
            self._free += 1
            self._decoding_until_s = time.monotonic() + _LONGEST_DECODING_S
            if self._waiting or self._num_decoding:
                self._lock.notify_all()

    def _grant(self) -> None:
        """Give free turns to the threads that are next.

        Each thread that wakes up decides for all. If each decided for itself alone, the waiting work could change in
        between, and no thread might take the turn.
        """
        while self._free > 0 and (ready := [one for one in self._waiting if not self._awaits_decoding(one.user)]):
            place = self._next(ready)
            self._waiting.remove(place)
            self._free -= 1
            place.user.num_turns += 1
            place.has_turn = True
            self._lock.notify_all()

    def _next(self, ready: list[_Place]) -> _Place:
        """The thread whose turn is next: interactive before bulk work, then the model with the least engine time."""
        first = min(ready, key=lambda place: (not place.user.has_interactive(), place.user.served_s))
        least = min(ready, key=lambda place: place.user.served_s)
        return least if first.user.served_s - least.user.served_s > _MOST_AHEAD_S else first


class _Place:
    """A thread that waits for a turn of ``user``."""

    def __init__(self, user: GateUser) -> None:
        self.user = user
        self.has_turn = False


class GateUser:
    """An engine at a gate. ``served_s``: seconds of its steps so far. ``num_turns``: turns it holds now."""

    def __init__(
        self,
        gate: DeviceGate,
        num_streams: int,
        has_interactive: Callable[[], bool],
        short_step_s: Callable[[], float],
        *,
        uses_cores: bool = False,
    ) -> None:
        self.gate = gate
        self.num_streams = num_streams
        self.has_interactive = has_interactive
        self.short_step_s = short_step_s
        self.uses_cores = uses_cores
        self._interactive = InteractiveExpectation()
        self.served_s = 0.0
        self.num_turns = 0

    def note_interactive(self) -> None:
        """Interactive work has come."""
        self._interactive.note(time.monotonic())

    def expects_interactive(self) -> bool:
        return self._interactive.holds(time.monotonic()) or self.has_interactive()

    def turn(self) -> Turn:
        """Wait for a turn, and return it."""
        self.gate.take(self)
        return Turn(self)

    def leave(self) -> None:
        """The engine runs no more steps."""
        self.gate.leave(self)


class Turn:
    """The right to run one step. ``end`` may be called twice: a step that hangs loses its turn while it runs."""

    def __init__(self, user: GateUser) -> None:
        self._user: GateUser | None = user
        self._lock = threading.Lock()

    def end(self, seconds: float) -> None:
        """Give the turn back. ``seconds``: the duration of the step."""
        with self._lock:
            user, self._user = self._user, None
        if user is not None:
            user.gate.give_back(user, seconds)
