"""An InferenceService over a fake engine, for a test's length."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence, Set
from contextlib import asynccontextmanager
from typing import Any

from bei.artifact.manifest import Artifact
from bei.config.settings import ServeConfig
from bei.core import Encoding, Engine
from bei.metrics.registry import Metrics
from bei.scheduler.cost_model import CostModel
from bei.service.call import InferenceResult, ModelInput, ModelRequest
from bei.service.loader import encoder_of, local_port
from bei.service.service import InferenceService
from bei.tokenizer.encoder import AS_CONFIGURED, EncodingOptions, Input
from tests.support.engines import DEADLINE_S, GatedEngine


def make_service(
    artifact: Artifact,
    engine: Engine,
    metrics: Metrics | None = None,
    *,
    reload: Callable[[], Engine] | None = None,
    **settings: Any,
) -> InferenceService:
    """A service on the running event loop. ``settings`` are those of ServeConfig."""
    config = ServeConfig(**{"tokenizer_threads": 1, **settings})
    encoder = encoder_of(artifact, config)
    costs = CostModel.assumed(engine.info.limits)
    port = local_port(engine, costs, config, reload=reload)
    return InferenceService(artifact, encoder, config, metrics or Metrics(), port, costs)


async def infer(
    service: InferenceService,
    inputs: Sequence[ModelInput],
    options: EncodingOptions = AS_CONFIGURED,
    outputs: Set[str] = frozenset({"embedding"}),
    **asked: Any,
) -> InferenceResult:
    """Admit ``inputs`` and run them. ``asked``: lane, deadline and flow."""
    with service.admit(inputs, **asked) as ticket:
        return await service.infer(ModelRequest(inputs, options), ticket=ticket, outputs=outputs)


async def encode(
    service: InferenceService, inputs: Sequence[Input], options: EncodingOptions = AS_CONFIGURED
) -> list[Encoding]:
    """Admit ``inputs`` and tokenize them."""
    with service.admit(inputs) as ticket:
        return await service.encode(ModelRequest(inputs, options), ticket=ticket)


@asynccontextmanager
async def running_service(artifact: Artifact, engine: Engine, **settings: Any) -> AsyncIterator[InferenceService]:
    """``make_service``, closed at the end, the gate of a GatedEngine opened before."""
    service = make_service(artifact, engine, **settings)
    try:
        yield service
    finally:
        if isinstance(engine, GatedEngine):
            engine.open(engine.info.num_streams)
        await asyncio.get_running_loop().run_in_executor(None, service.close)


async def entered(engine: GatedEngine) -> None:
    """Wait, off the event loop, until another batch has arrived at the engine."""
    await asyncio.get_running_loop().run_in_executor(None, engine.wait_entered)


async def within_deadline(work: Awaitable[object]) -> None:
    """Wait for ``work``; a test that would hang fails."""
    await asyncio.wait_for(work, DEADLINE_S)


def run_async(test: Callable[[], Awaitable[None]]) -> None:
    """Run a test's coroutine function on an event loop of its own."""

    async def main() -> None:
        await within_deadline(test())

    asyncio.run(main())
