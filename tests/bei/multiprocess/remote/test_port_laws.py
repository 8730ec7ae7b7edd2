"""The laws of the engine port (tests.bei.batching.test_port) hold over a socket, too."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

from hypothesis import settings

from bei.multiprocess.remote import engine_port_server
from bei.multiprocess.remote.engine_port_client import RemotePort
from bei.multiprocess.remote.engine_port_server import PortModel, PortServer
from bei.port import EnginePort, OnAnswers
from bei.scheduler.batch_manager import BatchManager
from bei.scheduler.queue import Waiter
from tests.bei.multiprocess.chain import MODEL, SHARED, Place, model_info_of, own_metrics
from tests.bei.scheduler.test_port import Port


class PortInAnotherProcess(Port):
    """A front end's port, the port server, and the manager behind it."""

    def opened(self, open_manager: Callable[[OnAnswers], BatchManager]) -> EnginePort:
        self._soon = mock.patch.object(engine_port_server, "_TELL_AT_MOST_EVERY_S", 0.0005)
        self._soon.start()
        self._place = Place()
        served = PortModel(
            lambda on_answers, _: open_manager(on_answers), model_info_of(self.engines[0]), own_metrics()
        )
        self._server = PortServer(self._place.listener)
        self._server.add_model(served)
        self._server.start()
        return RemotePort(self._place.address, MODEL, self.on_answers, own_metrics(), SHARED.loop)

    def place_of(self, waiter: Waiter) -> tuple[int, int]:
        asked = self._server._services[MODEL]._asked.get(waiter.request_id)
        return (-1 if asked is None else asked.request_id), waiter.place

    def is_up_to_date(self) -> bool:
        here, there = self.port.stats(), self.manager.stats()
        return here._replace(running_s=0.0) == there._replace(running_s=0.0)

    def close(self) -> None:
        self.port.close()
        self._server.close()
        self._place.close()
        self._soon.stop()


TestPortInAnotherProcess = PortInAnotherProcess.TestCase
TestPortInAnotherProcess.settings = settings(max_examples=12, stateful_step_count=20, deadline=None)
