"""A process of a server, to be killed.

    python -m tests.bei.multiprocess.killed ROLE FD [ENGINE_ADDRESS | RECORDS_FD]

Its engine says on standard output, a line a step, which sequences it has begun to run. Of the token ids, 50 waits for
ever, where the process was started as ``waiting``, and 66 ends the process by SIGSEGV.
"""

from __future__ import annotations

import json
import signal
import socket
import sys
import threading
from collections.abc import Set
from pathlib import Path

from bei.core import Outputs, PackedBatch
from bei.multiprocess.remote.engine_pool import RemoteEngines
from bei.multiprocess.remote.recorded_engine import RecordedEngine, StepRecords
from tests.bei.scheduler.front import LIMITS
from tests.support.engines import TokenEngine, sequences_of

WAITS, CRASHES = 50, 66


def say(value: object) -> None:
    """To the test."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


class TalkingEngine(TokenEngine):
    """See above."""

    def __init__(self, waits: bool) -> None:
        super().__init__(LIMITS)
        self._waits = waits

    def run(self, batch: PackedBatch, outputs: Set[str] | None = None) -> Outputs:
        say(sequences_of(batch))
        if CRASHES in batch.input_ids:
            signal.pthread_kill(threading.get_ident(), signal.SIGSEGV)
        if self._waits and WAITS in batch.input_ids:
            threading.Event().wait()
        return super().run(batch, outputs)


def main(role: str, fd: int, address: str = "") -> None:
    """Serve until killed; a front end asks, and then keeps what it was answered."""
    from tests.bei.multiprocess import chain

    place = chain.Place.__new__(chain.Place)
    if role != "front":
        place.listener = socket.socket(fileno=fd)
    if role in ("engine", "waiting"):
        chain.serve_engine(place, TalkingEngine(role == "waiting"))
    elif role == "lone":
        records = StepRecords.attach(int(address))
        engine = RecordedEngine(TalkingEngine(waits=True), chain.MODEL, records)
        models = {chain.MODEL: chain.served_model(engine)}
        chain.serve_port(place, models, has_culprits=records.has_found_steps)
    elif role == "manager":
        engines = RemoteEngines([Path(address)], chain.MODEL, hang_timeout_s=0.0)
        chain.serve_port(place, {chain.MODEL: chain.served_model(engines)})
    else:
        asker = chain.Asker(Path(address))
        rows = asker.rows([1], [2])
        asker.submit(*([WAITS, value] for value in range(12)))
        say(len(rows))
        threading.Event().wait()
    threading.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
