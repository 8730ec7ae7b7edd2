"""The first messages of a process, read by several threads at once: what msgspec knows of their classes is whole."""

from __future__ import annotations

import socket
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from bei.core import Encoding, PackedBatch
from bei.engine.fake import FakeEngine
from bei.multiprocess.control.messages import Call, Stop
from bei.multiprocess.transport.channel import Channel
from bei.multiprocess.transport.messages import Run, Submit, Welcome
from bei.port import Item, Submission
from tests.bei.multiprocess.chain import model_info_of
from tests.bei.scheduler.front import LIMITS
from tests.support.engines import DEADLINE_S

_TRANSPORT, _CONTROL = "bei.multiprocess.transport.messages", "bei.multiprocess.control.messages"
_IDS = np.array([1, 2], np.int32)
_WELCOME = Welcome(model_info_of(FakeEngine(LIMITS)))

# Threads read the same frame, each on a connection of its own, and take turns as often as they can.
_PROGRAM = """
import importlib, sys, threading
from socket import socketpair
from bei.multiprocess.transport.channel import Channel

module, name, data = sys.argv[1:]
messages = getattr(importlib.import_module(module), name)
begin = threading.Barrier(8)
read = []

def receive():
    ours, theirs = socketpair()
    theirs.sendall(bytes.fromhex(data))
    begin.wait()
    read.append(repr(Channel(ours, messages).receive().message))

threads = [threading.Thread(target=receive) for _ in range(8)]
sys.setswitchinterval(1e-6)
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(len(read), len(set(read)))
"""


def frame_of(message: object) -> bytes:
    ours, theirs = socket.socketpair()
    with theirs:
        channel: Channel[Any] = Channel(ours, None)
        channel.send(message)
        channel.end()
        return theirs.recv(1 << 16)


@pytest.mark.parametrize(
    ("module", "name", "message"),
    [
        (_TRANSPORT, "ToRemoteEngine", _WELCOME),
        (_TRANSPORT, "ToRemotePort", _WELCOME),
        (_TRANSPORT, "ToEngineServer", Run(PackedBatch.from_encodings([Encoding(_IDS)]), None)),
        (_TRANSPORT, "ToPortServer", Submit(1, Submission(1, "bulk", frozenset(), [Item(0, Encoding(_IDS))]))),
        (_CONTROL, "FromSupervisor", Call(1, Stop())),
    ],
)
def test_threads_that_read_the_first_messages_of_a_process_read_the_same(
    module: str, name: str, message: object
) -> None:
    command = [sys.executable, "-c", _PROGRAM, module, name, frame_of(message).hex()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert (done.returncode, done.stdout) == (0, "8 1\n"), done.stderr
