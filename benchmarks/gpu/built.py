"""The engine of target cuda as a server has it: compiled by the target's compiler, loaded by the runtime, asked for
rows on the host. And ``bei build --target cuda`` itself, from a checkpoint to a certificate (``http``: to HTTP).

On a CPU (a dry run) the target is ``cuda-twin``, the same way with slow kernels.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from bei.core import Limits, PackedBatch
from bei_build.torch_graph.model import PackedModel
from benchmarks.gpu.peers import random_checkpoint, require
from benchmarks.gpu.record import Found, Skipped, latency
from benchmarks.gpu.records import provide
from benchmarks.gpu.shapes import Shape, quantization_of

if TYPE_CHECKING:
    from bei.artifact.manifest import Artifact
    from bei.engine.cuda.engine import CudaEngine

_MAX_NUM_TOKENS, _MAX_BATCH_SIZE = 36_864, 1024
_CALLS_A_STREAM = 20


class Built:
    """The engine of ``model``, whose layers are not joined, in BF16 or, as ``shape`` says, FP8. ``facts``: seconds and
    size of the package."""

    def __init__(self, shape: Shape, model: PackedModel, device: torch.device) -> None:
        require("onnx", "ml_dtypes", "safetensors")  # the builder's own
        provide()
        from bei.artifact.manifest import OutputInfo
        from bei.engine.cuda.engine import CudaEngine, CudaOptions
        from bei_build.checkpoint.remote_code import attention_of
        from bei_build.config import BuildConfig
        from bei_build.targets.base import Numerics
        from bei_build.targets.choose import compiler_for

        with ExitStack() as resources:
            folder = Path(resources.enter_context(tempfile.TemporaryDirectory()))
            target = "cuda" if device.type == "cuda" else "cuda-twin"
            limits = Limits(max(_MAX_NUM_TOKENS, shape.max_seq_len), _MAX_BATCH_SIZE, shape.max_seq_len)
            compiler = compiler_for(BuildConfig(model=shape.name, target=target))
            compiler.check_able()
            started = time.monotonic()
            tensors = model.weights_by_name()
            weights: Any = SimpleNamespace(read=lambda name: tensors[name].float().cpu().numpy())
            numerics = Numerics("fp8", quantization_of(shape.spec)) if shape.is_fp8 else Numerics("bf16")
            needs = compiler.compile(shape.spec, weights, numerics, limits, folder, lambda _: None)
            compiled = time.monotonic()
            manifest: Any = SimpleNamespace(  # of a model that has no checkpoint: the engine reads no more of it
                name=shape.name,
                target=target,
                precision=numerics.precision,
                engine=needs,
                limits=limits,
                spec=SimpleNamespace(attention=attention_of(shape.spec)),
                outputs=[
                    OutputInfo(name=it.output, dimension=shape.spec.dimensions[it.output], per_token=not it.pooling)
                    for it in shape.spec.heads
                ],
            )
            self._engine = CudaEngine(folder, manifest, CudaOptions())
            resources.callback(self._engine.close)
            loaded = time.monotonic()
            self._engine.warmup()
            seconds = {"compile_s": compiled - started, "load_s": loaded - compiled}
            seconds["warmup_s"] = time.monotonic() - loaded
            size = sum(file.stat().st_size for file in folder.iterdir())
            facts = {name: round(value, 2) for name, value in seconds.items()}
            self.facts: Found = {**facts, "package_mb": size >> 20}
            self._resources = resources.pop_all()

    def close(self) -> None:
        self._resources.close()

    def answers(self, batch: PackedBatch) -> dict[str, Tensor]:
        return {name: torch.from_numpy(rows) for name, rows in self._engine.run(batch).items()}

    def one_by_one(self, batch: PackedBatch, device: torch.device, budget_s: float) -> Found:
        """Milliseconds of a call on an idle device, and how many of the host's cores are busy meanwhile."""
        busy, started = time.process_time(), time.perf_counter()
        found = latency(lambda: self._engine.run(batch), device, budget_s=budget_s)
        busy_cores = (time.process_time() - busy) / (time.perf_counter() - started)
        return {**found, "busy_cores": round(busy_cores, 2)}

    def spinning(self, device: torch.device) -> AbstractContextManager[None]:
        """Within, callers wait for the GPU awake: is what they gain worth a core?"""
        if device.type != "cuda":
            raise Skipped("steps on a CPU are not waited for")
        return waiting_awake(self._engine, torch)

    def all_streams(self, batch: PackedBatch) -> Found:
        """Milliseconds a call, with as many callers as the engine has streams."""
        streams = self._engine.info.num_streams

        def calls() -> None:
            for _ in range(_CALLS_A_STREAM):
                self._engine.run(batch)

        with ThreadPoolExecutor(streams) as threads:
            _all(threads, calls, streams)  # memory of this shape is allocated
            started = time.perf_counter()
            _all(threads, calls, streams)
            seconds = time.perf_counter() - started
        count = streams * _CALLS_A_STREAM
        return {"ms": round(1000 * seconds / count, 4), "streams": streams, "repetitions": count}


def _all(threads: ThreadPoolExecutor, work: Callable[[], None], count: int) -> None:
    for future in [threads.submit(work) for _ in range(count)]:
        future.result()


@contextmanager
def waiting_awake(engine: CudaEngine, torch_module: Any) -> Iterator[None]:
    """Within, threads wait for the events of ``engine`` awake; its own sleep."""
    streams = engine._all_streams
    asleep = [stream._stream for stream in streams]
    for stream in streams:
        stream._stream = replace(stream._stream, done=torch_module.cuda.Event(blocking=False))
    try:
        yield
    finally:
        for stream, before in zip(streams, asleep, strict=True):
            stream._stream = before


class Made(NamedTuple):
    """The artifact that ``bei build`` made in ``build_s`` seconds; its words w0, w1, ... are a token each."""

    artifact: Artifact
    num_words: int
    build_s: float


def random_artifact(shape: Shape, device: torch.device, folder: Path) -> Made:
    """``bei build`` in ``folder``, of a random checkpoint of transformers' class for ``shape``."""
    require("transformers", "tokenizers", "onnx", "ml_dtypes", "safetensors", "msgspec", "rich")
    from bei.engine.load import load_engine
    from bei_build.config import BuildConfig
    from bei_build.pipeline import build
    from bei_build.progress import Progress

    checkpoint, out = folder / "checkpoint", folder / "artifact"
    num_words = random_checkpoint(shape, checkpoint)
    target = "cuda" if device.type == "cuda" else "cuda-twin"
    config = BuildConfig(model=str(checkpoint), out=str(out), target=target, precision="bf16", pooling="mean")
    started = time.monotonic()
    artifact = build(config, load_engine, Progress())
    return Made(artifact, num_words, time.monotonic() - started)
