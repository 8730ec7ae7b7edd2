"""An InferenceService over a fake engine, for a test's length."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from bei.artifact import TOKENIZER, Artifact
from bei.config import ServeConfig
from bei.core import Engine
from bei.metrics import Metrics
from bei.service import InferenceService
from bei.tokenization import TextEncoder
from tests.artifacts import LIMITS
from tests.engines import DEADLINE_S, GatedEngine


def make_service(
    artifact: Artifact, engine: Engine, metrics: Metrics | None = None, **settings: Any
) -> InferenceService:
    """A service on the running event loop. ``settings`` are those of ServeConfig."""
    config = ServeConfig(**{"tokenizer_threads": 1, **settings})
    tokenizer: Path = artifact.path / TOKENIZER
    encoder = TextEncoder(tokenizer, LIMITS.max_seq_len, auto_truncate=config.auto_truncate)
    return InferenceService(artifact, engine, encoder, config, metrics or Metrics())


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
