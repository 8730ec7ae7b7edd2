"""Ways to run the packed module: eager, compiled, as a CUDA graph, as an AOTInductor package."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from bei.core import PackedBatch
from bei.packing import graph_inputs
from bei_build.torch_graph.model import PackedModel
from bei_build.torch_graph.package import write_package
from benchmarks.gpu_record import Skipped

Inputs: TypeAlias = dict[str, Tensor]
Engine: TypeAlias = Callable[[Inputs], dict[str, Tensor]]

_WARM_UP = 3  # calls before a capture


def compiled(model: PackedModel, device: torch.device, *, dynamic: bool) -> Engine:
    """``torch.compile``, for one shape or for any.

    On a CPU the graph is captured and not compiled, which takes minutes: a dry run shows that it can be captured whole.
    """
    backend = "inductor" if device.type == "cuda" else "eager"
    return torch.compile(model, dynamic=dynamic, fullgraph=True, backend=backend)


class CapturedEngine:
    """``engine`` recorded for the shapes of ``inputs``: a replay launches all its kernels at once."""

    def __init__(self, engine: Engine, inputs: Inputs, device: torch.device) -> None:
        if device.type != "cuda":
            raise Skipped("CUDA graphs need a GPU")
        self._inputs = {name: tensor.clone() for name, tensor in inputs.items()}
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UP):
                engine(self._inputs)
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._outputs = engine(self._inputs)

    def __call__(self, inputs: Inputs) -> dict[str, Tensor]:
        """Copy ``inputs`` in and replay. The outputs are overwritten by the next call."""
        for name, tensor in inputs.items():
            self._inputs[name].copy_(tensor, non_blocking=True)
        self._graph.replay()
        return self._outputs


def packaged(model: PackedModel, device: torch.device, folder: Path) -> tuple[Engine, dict[str, float]]:
    """The model compiled ahead of time for any number of tokens and sequences, and loaded again; and what that took."""
    if device.type != "cuda":
        raise Skipped("compiling a package for CPUs takes minutes; tests of the second tier do it")
    path = folder / "model.pt2"
    started = time.monotonic()
    write_package(model, path)
    compiled_s = time.monotonic() - started
    engine: Any = torch._inductor.aoti_load_package(str(path))
    seconds = {"compile_s": compiled_s, "load_s": time.monotonic() - started - compiled_s}
    return engine, {name: round(value, 2) for name, value in seconds.items()} | {
        "package_mb": path.stat().st_size >> 20
    }


class Served:
    """``engine`` with all that a step costs but the tokenizer: indices, pinned copies in, float32 rows out."""

    def __init__(self, engine: Engine, model: PackedModel, batch: PackedBatch, device: torch.device) -> None:
        self._engine, self._model, self._batch, self._device = engine, model, batch, device
        self._is_pinned = device.type == "cuda"

    def __call__(self) -> dict[str, Tensor]:
        """One step; returns tensors of the host."""
        arrays = graph_inputs(self._batch, self._model.input_names)
        hosts = {name: torch.from_numpy(array) for name, array in arrays.items()}
        if self._is_pinned:
            hosts = {name: tensor.pin_memory() for name, tensor in hosts.items()}
        inputs = {name: tensor.to(self._device, non_blocking=True) for name, tensor in hosts.items()}
        return {name: rows.cpu() for name, rows in self._engine(inputs).items()}
