"""What engine processes and the batch manager's have in common: one call of the supervisor after the other."""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable
from typing import NamedTuple

from bei.multiprocess.control.channel import Channel
from bei.multiprocess.control.messages import Configure, Served, Step, Stop
from bei.utils.log_format import configure

log = logging.getLogger(__name__)


class Received(NamedTuple):
    """A call, with the descriptors that came along."""

    id: int
    step: Step
    descriptors: list[int]


def obey(channel: Channel, act: Callable[[Step, list[int]], Served | None]) -> None:
    """``act`` on the calls of ``channel`` in this thread, until ``Stop``."""
    received: queue.SimpleQueue[Received] = queue.SimpleQueue()
    channel.start(lambda *call: received.put(Received(*call)))
    while True:
        number, step, descriptors = received.get()
        if isinstance(step, Configure):
            configure(step.config.log_format, channel.name)
        try:
            channel.done(number, act(step, descriptors))
        except Exception as error:  # a border: the supervisor decides what becomes of a process that cannot do this
            channel.failed(number, error)
        if isinstance(step, Stop):
            return
