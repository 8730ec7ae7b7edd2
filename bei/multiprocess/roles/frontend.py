"""The process of a front end: HTTP, tokenizers, and the tasks that turn the engine's outputs into answers."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
from collections.abc import Sequence as Seq

from bei.artifact.store import received
from bei.config.settings import ServeConfig
from bei.metrics.registry import Metrics
from bei.multiprocess.control.channel import ControlChannel
from bei.multiprocess.control.messages import (
    HEARTBEAT,
    Abandon,
    Close,
    Command,
    Configure,
    Drain,
    OpenModel,
    Reload,
    Serve,
    Served,
    Stop,
    Switch,
)
from bei.multiprocess.remote.engine_port_client import ask_model_info, remote_port
from bei.multiprocess.shared_memory.limits import SharedLimits
from bei.multiprocess.shared_memory.limits_page import SharedPage
from bei.multiprocess.transport.connect import path_of
from bei.scheduler.cost_model import CostModel
from bei.server.app import create_app
from bei.server.batches.worker import worker_of
from bei.server.endpoint.models import Models
from bei.server.grpc.server import GrpcServer, grpc_of
from bei.server.http.connections import Connections, fitting_connections
from bei.server.http.listener import MOST_HANDSHAKES
from bei.server.http.memory_budgets import AnswerMemory
from bei.server.http.tls import tls_of
from bei.server.lifecycle.drain import DrainingServer, Drains, uvicorn_config
from bei.server.lifecycle.swap import check_new, close_replaced, closed, in_thread, replace
from bei.server.process_tuning import collect_rarely, run_on_loop
from bei.server.server_parts import ServerParts
from bei.server.status.whole_server import on_loop
from bei.service.image_side import image_side_of
from bei.service.label_side import label_encoder_of
from bei.service.loader import encoder_of, next_encoder, side_of_second, tower_port
from bei.service.service import InferenceService, OpenPort
from bei.utils.log_format import configure

# The longest wait for the batch manager's process, which may be restarting: that takes seconds, or fails.
_MODEL_INFO_S = 60.0
# How often the tokenizer threads are checked.
_WATCH_EVERY_S = 0.5


def run(channel: ControlChannel) -> None:
    """Run a front end until the supervisor sends ``Stop``."""
    run_on_loop(FrontEnd(channel).run())


class FrontEnd:
    """Carries out the supervisor's commands, on the event loop."""

    _config: ServeConfig
    _started_s: int
    _limits: SharedLimits
    _address: int

    def __init__(self, channel: ControlChannel) -> None:
        self._channel = channel
        self._metrics = Metrics()
        self._opened: dict[str, InferenceService] = {}  # by key; replaced ones too
        self._models: Models | None = None  # once it serves
        self._server: DrainingServer | None = None
        self._grpc: GrpcServer | None = None
        self._serving: asyncio.Task[None] | None = None
        self._watch: asyncio.Task[None] | None = None
        self._under_way: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Carry out commands until ``Stop``, each in a task of its own, since some take long."""
        loop = asyncio.get_running_loop()
        received: asyncio.Queue[tuple[int, Command, list[int]]] = asyncio.Queue()
        self._channel.start(lambda *call: loop.call_soon_threadsafe(received.put_nowait, call))
        self._channel.offer(HEARTBEAT, on_loop(bytes))
        while True:
            number, command, descriptors = await received.get()
            if isinstance(command, Stop):
                await self._end()
                return
            task = asyncio.ensure_future(self._run_command(number, command, descriptors))
            self._under_way.add(task)
            task.add_done_callback(self._under_way.discard)

    async def _run_command(self, number: int, command: Command, descriptors: list[int]) -> None:
        try:
            await self._act(command, descriptors)
            self._channel.done(number)
        except Exception as error:  # a border: the supervisor decides what becomes of a process that cannot do this
            self._channel.failed(number, error)

    async def _act(self, command: Command, descriptors: list[int]) -> None:
        if isinstance(command, Configure):
            self._configure(command, descriptors)
        elif isinstance(command, OpenModel):
            await self._open(command, descriptors)
        elif isinstance(command, Serve):
            await self._serve([socket.socket(fileno=descriptor) for descriptor in descriptors])
        elif isinstance(command, Switch):
            assert self._models is not None, "it serves"
            replace(self._models, self._opened[command.key], self._metrics)
        elif isinstance(command, Close):
            await self._close(command.key)
        elif isinstance(command, Reload):
            for part in (self._parts.keys, self._tls):
                if part is not None:
                    await part.reload()
        elif isinstance(command, Drain):
            assert self._server is not None, "it serves"
            self._server.begin_drain()
            await self._server.wait_drained()
        elif isinstance(command, Abandon):
            assert self._models is not None, "it serves"
            self._models.abandon()

    def _configure(self, command: Configure, descriptors: list[int]) -> None:
        """What is wrong with keys, certificates or traces is known before gigabytes are loaded."""
        config = command.config
        configure(config.log_format, self._channel.name)
        self._config, self._started_s = config, command.started_s
        self._address, page = descriptors
        self._limits = SharedLimits(SharedPage(page, config.http_workers, command.num_models, command.index))
        self._parts = ServerParts.of(config, self._metrics, self._limits.bucket)
        self._tls = tls_of(config)

    # Models.

    async def _open(self, command: OpenModel, descriptors: list[int]) -> None:
        """Connect to the model's batch manager, and ask the canary. Raises BeiError."""
        served = command.served
        former = None if command.replaces is None else self._opened.get(command.replaces.key)
        assert served.costs is not None, "the engine has said what steps cost"
        with received(served.artifact, descriptors) as artifact:
            encoder = (
                encoder_of(artifact, self._config) if former is None else next_encoder(artifact, former.text_encoder)
            )
            labels = label_encoder_of(artifact)
        costs = CostModel.from_json(served.costs)
        port = await self._port_to(served, costs)
        second = None
        if (tower := served.of_second) is not None:
            assert tower.costs is not None, "the engine has said what steps cost"
            tower_costs = CostModel.from_json(tower.costs)
            second = side_of_second(served.artifact, labels, self._config, tower_costs, costs, encoder)
            port = tower_port(port, await self._port_to(tower, second.costs), second)
        elif not served.artifact.manifest.reads_texts:
            second = image_side_of(served.artifact, self._config, costs)
        service = InferenceService(
            served.artifact,
            encoder,
            self._config_of_service(),
            self._metrics,
            port,
            costs,
            elsewhere=self._limits.accepted(served.number),
            second=second,
        )
        await check_new(service)
        self._opened[served.key] = service

    async def _port_to(self, served: Served, costs: CostModel) -> OpenPort:
        """To the batch manager of a model, or of one of its towers. Raises BeiError."""
        address = path_of(self._address)
        # In a thread: the service's port would wait for the other process on the event loop.
        await in_thread(ask_model_info, address, served.key, _MODEL_INFO_S)
        return remote_port(address, served.key, costs)

    def _config_of_service(self) -> ServeConfig:
        """With this front end's share of the tokenizers' threads."""
        threads = max(1, self._config.tokenizer_threads // self._config.http_workers)
        return dataclasses.replace(self._config, tokenizer_threads=threads)

    async def _close(self, key: str) -> None:
        service = self._opened.pop(key, None)
        if service is None:  # a process that was started in the meantime has never had it
            return
        if self._models is not None and self._models.is_replaced(service):
            await close_replaced(self._models, service)
        else:
            await in_thread(closed, service)

    # HTTP.

    async def _serve(self, sockets: list[socket.socket]) -> None:
        config = self._config
        self._models = Models([*self._opened.values()], started_s=self._started_s, aliases=config.alias)
        for service in self._models:
            self._metrics.artifact(service.name, service.manifest.digest)
        answers = AnswerMemory(config.answer_memory, self._limits.answers)
        parts = self._parts
        app = create_app(self._models, parts, answers=answers, peers=self._channel)
        batches = worker_of(parts.batches, app, parts.keys, config)
        workers: Seq[Drains] = (self._models,) if batches is None else (batches, self._models)
        room = fitting_connections(config.max_connections, MOST_HANDSHAKES if self._tls is not None else 0)
        connections = Connections(
            config,
            self._metrics,
            room,
            parts.request_log,
            others=self._limits.front_ends,
            bodies=self._limits.bodies,
            answers=answers,
        )
        self._grpc = grpc_of(self._models, parts, self._tls, answers, connections.bodies, self._channel)
        if self._grpc is not None:
            await self._grpc.start()
            workers = (*workers, self._grpc)
        started = asyncio.Event()
        self._server = DrainingServer(uvicorn_config(app), workers, connections, self._tls, started.set)
        collect_rarely()
        self._serving = asyncio.ensure_future(self._server.serve(sockets=sockets))
        self._watch = asyncio.ensure_future(self._watch_tokenizers())
        starting = asyncio.ensure_future(started.wait())
        await asyncio.wait((starting, self._serving), return_when=asyncio.FIRST_COMPLETED)
        if self._serving.done():
            starting.cancel()
            self._serving.result()

    async def _watch_tokenizers(self) -> None:
        """Ask the supervisor to replace this process once a tokenizer thread has died: none is started again."""
        while True:
            await asyncio.sleep(_WATCH_EVERY_S)
            for service in self._opened.values():
                if not service.can_tokenize:
                    self._channel.ailing(f"a tokenizer thread of {service.name} has died")
                    return

    async def _end(self) -> None:
        """Stop the HTTP server, which waits a while until clients have received their answers, and then tracing."""
        if self._watch is not None:
            self._watch.cancel()
        if self._server is not None and self._serving is not None:
            self._server.stop()
            await self._serving
        if self._grpc is not None:
            await self._grpc.stop()
        if self._parts.tracing is not None:
            await asyncio.get_running_loop().run_in_executor(None, self._parts.tracing.close)
