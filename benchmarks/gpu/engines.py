"""Ways to run the packed module: eager, compiled, as a CUDA graph. The engine itself: ``built``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from bei_build.torch_graph.model import PackedModel
from benchmarks.gpu.record import Skipped

Inputs: TypeAlias = dict[str, Tensor]
Engine: TypeAlias = Callable[[Inputs], dict[str, Tensor]]

_WARM_UP = 3  # calls before a capture


def compiled(model: PackedModel, device: torch.device, *, is_tuned: bool = False) -> Engine:
    """``torch.compile``, for one shape. ``is_tuned``: products are also tried as kernels of Triton, which compute the
    activation with them, and the fastest are taken.

    On a CPU the graph is captured and not compiled, which takes minutes: a dry run shows that it can be captured whole.
    """
    if device.type != "cuda":
        return torch.compile(model, dynamic=False, fullgraph=True, backend="eager")
    return torch.compile(model, dynamic=False, fullgraph=True, options={"max_autotune_gemm": is_tuned})


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
