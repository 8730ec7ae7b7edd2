"""A simulated GPU in place of ``bei.engine.cuda.device``: its streams do nothing until they are waited for.

Overwriting memory that a step still needs, or reading outputs too early, therefore gives wrong numbers. Fresh memory
holds garbage. The package's "embedding" identifies a sequence ([tokens, first id, last id, sum of ids]), its
"token_embedding" a token ([id, position]).
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from bei.artifact.manifest import CUDA_WEIGHTS, EngineRequirements, Manifest, OutputInfo, Package, cuda_package
from bei.core import Float32Array, PackedBatch
from bei.engine.cuda.device import HostBuffer, RecordedGraph, TensorSlice, TransferBuffer
from bei.engine.cuda.engine import CudaEngine, CudaOptions
from tests.support.artifacts import save_artifact
from tests.support.engines import DEADLINE_S

INPUTS = ["cu_query_lens", "input_ids", "position_ids", "slot_ids"]
OUTPUTS = [
    OutputInfo(name="embedding", dimension=4),
    OutputInfo(name="token_embedding", dimension=2, per_token=True),
]
LIMITS = {"max_num_tokens": 2048, "max_batch_size": 16, "max_seq_len": 256}
RUBBISH = 0xAB
MATRIX = np.arange(6, dtype=np.float32).reshape(2, 3)  # the package's one weight
GIGABYTE = 10**9


class View:
    """A tensor in a buffer, read when the work that needs it is done."""

    def __init__(self, memory: npt.NDArray[np.uint8], place: TensorSlice) -> None:
        self._memory, self.place = memory, place

    def read(self) -> npt.NDArray[Any]:
        """A copy of its current content."""
        return self._memory[self.place.start : self.place.end].view(self.place.dtype).reshape(self.place.shape).copy()


class Answer:
    """An output, empty until its step is done."""

    def __init__(self) -> None:
        self.rows: Float32Array | None = None


class Stream:
    """Queued work. ``is_lost``: the device will do none of it."""

    def __init__(self) -> None:
        self.work: deque[Callable[[], None]] = deque()
        self.num_recorded = 0

    def drain(self) -> None:
        """Do all queued work."""
        while self.work:
            self.work.popleft()()


class Simulated:
    """The device. ``most_tokens``: the largest step that fits into memory. ``graph_bytes``: memory of each recorded
    step."""

    is_gpu = True
    name, architecture = "Simulated GPU (SM90)", "SM90"

    def __init__(self, most_tokens: int = 1 << 30, graph_bytes: int = 1000) -> None:
        self.most_tokens = most_tokens
        self.bytes_of_each_graph = graph_bytes
        self.free = GIGABYTE
        self.error: RuntimeError | None = None  # what the next step raises
        self.lost: str | None = None  # the device's final error
        self.recording_error: RuntimeError | None = None
        self.records_numbers = False  # graphs contain the numbers of the recording
        self.computed: list[tuple[int, int]] = []  # tokens and sequences of steps that were not recorded
        self.replayed: list[tuple[int, int]] = []
        self.downloads: list[tuple[int, int]] = []  # rows and their width
        self.barrier: threading.Barrier | None = None  # all streams must have work before one is waited for
        self.is_released = False
        self.held: tuple[int, int | None] | None = None  # bytes of weights, and the process's limit
        self._memory: list[weakref.ref[npt.NDArray[np.uint8]]] = []

    def load(self, package: Path, weights: Path) -> object:
        """Accepts any files."""
        if not package.is_file() or not weights.is_file():
            raise RuntimeError("no such package\nand a stack of C++ frames")
        self.free -= 1000
        return object()

    def hold(self, weight_bytes: int, most: int | None) -> None:
        self.held = weight_bytes, most

    def stream(self) -> Stream:
        return Stream()

    def _new(self, size: int) -> npt.NDArray[np.uint8]:
        memory = np.full(size, RUBBISH, np.uint8)
        self._memory.append(weakref.ref(memory))
        return memory

    def num_live(self) -> int:
        """Number of live pieces of memory."""
        return sum(memory() is not None for memory in self._memory)

    def block(self, size: int) -> TransferBuffer:
        host = self._new(size)
        return TransferBuffer(host, size, host, self._new(size))

    def results(self, size: int) -> HostBuffer:
        host = self._new(size)
        return HostBuffer(host, size, host)

    def upload(self, block: TransferBuffer, num_bytes: int, stream: Stream) -> None:
        def copy() -> None:
            block.memory[:num_bytes] = block.host[:num_bytes]

        stream.work.append(copy)

    def views(self, block: TransferBuffer, places: Sequence[TensorSlice]) -> list[View]:
        assert all(place.end <= block.size for place in places)
        return [View(block.memory, place) for place in places]

    def compute(self, package: object, inputs: Sequence[View], stream: Stream) -> list[Answer]:
        shapes = dict(zip(INPUTS, (view.place.shape for view in inputs), strict=True))
        tokens, sequences = shapes["input_ids"][0], shapes["cu_query_lens"][0] - 1
        assert sequences >= 2, "the package was exported for two sequences and more"
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        if tokens > self.most_tokens:
            raise RuntimeError(f"CUDA out of memory. Tried to allocate {tokens} tokens\nand a stack of C++ frames")
        self.computed.append((tokens, sequences))
        answers = [Answer() for _ in OUTPUTS]
        stream.work.append(lambda: _compute(inputs, answers))
        return answers

    def download(self, rows: Answer, count: int, results: HostBuffer, start: int, stream: Stream) -> None:
        def copy() -> None:
            assert rows.rows is not None
            values = rows.rows[:count]
            self.downloads.append(values.shape)
            results.host[start : start + values.nbytes] = values.reshape(-1).view(np.uint8)

        stream.work.append(copy)

    def wait(self, stream: Stream) -> None:
        if self.barrier is not None:
            self.barrier.wait(DEADLINE_S)
        stream.drain()

    def free_cache(self) -> None:
        pass

    def record(self, package: object, inputs: Sequence[View], stream: Stream) -> RecordedGraph:
        assert not stream.work, "what was given before is recorded too"
        if self.recording_error is not None:
            raise self.recording_error
        stream.num_recorded += 1
        answers = [Answer() for _ in OUTPUTS]
        numbers = [view.read() for view in inputs]
        return RecordedGraph(numbers if self.records_numbers else None, inputs, answers)

    def replay(self, graph: RecordedGraph, stream: Stream) -> None:
        shapes = dict(zip(INPUTS, (view.place.shape for view in graph.inputs), strict=True))
        self.replayed.append((shapes["input_ids"][0], shapes["cu_query_lens"][0] - 1))
        stream.work.append(lambda: _compute(graph.inputs, graph.outputs, graph.executable))

    def graph_bytes(self, stream: Stream) -> int:
        return stream.num_recorded * self.bytes_of_each_graph

    def free_bytes(self) -> int | None:
        return self.free

    def is_out_of_memory(self, error: BaseException) -> bool:
        return "out of memory" in str(error)

    def settle(self, stream: Stream) -> str | None:
        stream.work.clear()
        return self.lost

    def release(self) -> None:
        self.is_released, self.held = True, None


def _compute(inputs: Sequence[View], answers: Sequence[Answer], numbers: Any = None) -> None:
    """The package: reads its inputs when the work is done."""
    arrays = dict(zip(INPUTS, numbers or [view.read() for view in inputs], strict=True))
    for answer, rows in zip(answers, rows_of_the_package(arrays), strict=True):
        answer.rows = rows


def rows_of_the_package(arrays: Mapping[str, npt.NDArray[Any]]) -> tuple[Float32Array, Float32Array]:
    """The package's outputs for the inputs ``arrays``, filler rows included."""
    ids, starts = arrays["input_ids"].astype(np.float32), arrays["cu_query_lens"]
    assert starts[-1] <= len(ids)
    parts = [ids[start:end] for start, end in pairwise(starts)]
    assert all(len(part) <= len(arrays["slot_ids"]) for part in parts)
    of_sequences = np.array([[len(part), part[0], part[-1], part.sum()] for part in parts], np.float32)
    return of_sequences, np.stack([ids, arrays["position_ids"]], axis=1).astype(np.float32)


def expected(batch: PackedBatch) -> dict[str, Float32Array]:
    """The package's outputs for ``batch``."""
    ids = batch.input_ids.astype(np.float32)
    spans = list(pairwise(batch.cu_seqlens))
    parts = [ids[start:end] for start, end in spans]
    positions = np.concatenate([np.arange(end - start) for start, end in spans])
    return {
        "embedding": np.array([[len(part), part[0], part[-1], part.sum()] for part in parts], np.float32),
        "token_embedding": np.stack([ids, positions], axis=1).astype(np.float32),
    }


def batch_of(lengths: Sequence[int], seed: int = 0) -> PackedBatch:
    """A batch of random ids."""
    ids = np.random.default_rng(seed).integers(1, 100, sum(lengths)).astype(np.int32)
    return PackedBatch(ids, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))


def check(engine: CudaEngine, batch: PackedBatch, outputs: frozenset[str] | None = None) -> None:
    """Check that the engine's outputs are the package's."""
    answers, right = engine.run(batch, outputs), expected(batch)
    assert answers.keys() == (right.keys() if outputs is None else outputs)
    for name, rows in answers.items():
        assert rows.dtype == np.float32
        np.testing.assert_array_equal(rows, right[name])


def manifest_in(folder: Path, weight_bytes: int = 1000, **changes: Any) -> Manifest:
    """The manifest of a package in ``folder``, with a file in its place."""
    about = Package(
        cuda="13.0", inputs=INPUTS, kernels=["flash"], fallbacks=[], weight_bytes=weight_bytes, weights="beside"
    )
    needs = EngineRequirements(
        compiler="aotinductor", compiler_version="2.13.0", device="H200", capabilities=["SM90"], package=about
    )
    fields: dict[str, Any] = {"target": "cuda", "outputs": OUTPUTS, "engine": needs, **LIMITS, **changes}
    manifest = save_artifact(folder / "artifact", **fields).manifest
    (folder / "artifact" / "engine" / cuda_package("SM90")).write_bytes(b"compiled code")
    save_file({"matrix": MATRIX, "unread": np.zeros(3, np.float32)}, folder / "artifact" / "engine" / CUDA_WEIGHTS)
    return manifest


def engine_on(
    device: Simulated,
    folder: Path,
    *,
    num_streams: int = 2,
    cuda_graphs: int = 256,
    memory: int = 0,
    **changes: Any,
) -> CudaEngine:
    """An engine on ``device``, which the caller closes."""
    manifest = manifest_in(folder, **changes)
    options = CudaOptions(num_streams, cuda_graphs, memory)
    return CudaEngine(folder / "artifact" / "engine", manifest, options, device=device)
