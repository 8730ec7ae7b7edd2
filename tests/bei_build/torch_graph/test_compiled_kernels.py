"""Every Triton kernel of the module, compiled for SM 9.0 as the module launches it. No GPU is needed."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bei_build.torch_graph.pretended_gpu import GPUS


@pytest.fixture(autouse=True)
def _compiler() -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed: pip install --no-deps triton")
    try:
        from triton.backends.nvidia.compiler import get_ptxas

        get_ptxas(90)
    except (ImportError, RuntimeError) as error:  # other vendors' wheels
        pytest.skip(f"Triton has no compiler for NVIDIA GPUs: {error}")


TYPES = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


class Launch:
    """Replaces a kernel, and records its launch arguments."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        self.grid = grid
        return self._keep

    def _keep(self, *arguments: object, **settings: Any) -> None:
        self.arguments, self.settings = arguments, settings


def launched(module: Any, work: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> Launch:
    """The launch that ``work`` makes of the kernel of ``module``."""
    found: list[Launch] = []

    def wrap(kernel: Any) -> Launch:
        found.append(Launch(kernel))
        return found[-1]

    monkeypatch.setattr(module, "wrap_triton", wrap)
    work()
    (launch,) = found
    return launch


def compiled(launch: Launch, capability: int = 90) -> Any:
    """Compiled by Triton for SM 9.0 or another, with the launcher's knowledge of the arguments."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = launch.kernel.arg_names
    options = {name: value for name, value in launch.settings.items() if name not in names}
    options["enable_fp_fusion"] = True  # said, since Triton 3.9 warns that its default will change
    constants: dict[str, Any] = {name: value for name, value in launch.settings.items() if name in names}
    signature: dict[str, str] = {}
    attributes: dict[tuple[int], list[list[object]]] = {}
    for index, (name, value) in enumerate(zip(names, launch.arguments, strict=False)):
        if value is None or (isinstance(value, int) and value == 1):
            constants[name] = value
        elif isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0):
            attributes[(index,)] = [["tt.divisibility", 16]]
        if value is not None:
            signature[name] = TYPES[value.dtype] if isinstance(value, Tensor) else "i32"
    signature |= dict.fromkeys(constants, "constexpr")
    assert list(names) == [name for name in names if name in signature]
    source = ASTSource(launch.kernel, {name: signature[name] for name in names}, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def spilled(ptx: str, folder: Path) -> int:
    """Bytes of spilled registers, by the ptxas that Triton uses."""
    from triton.backends.nvidia.compiler import get_ptxas

    path = folder / "kernel.ptx"
    path.write_text(ptx)
    command = [get_ptxas(90).path, "-v", "-arch=sm_90a", str(path), "-o", str(folder / "kernel.cubin")]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return sum(int(count) for count in re.findall(r"(\d+) bytes spill", said))


def rows(width: int, count: int = 64) -> Tensor:
    return torch.zeros(count, width, dtype=torch.bfloat16)


def norm(width: int, *, is_rms: bool, smooth: bool) -> tuple[Any, Callable[[], object]]:
    from bei_build.torch_graph.fused import add_norm as module

    vector = torch.zeros(width, dtype=torch.bfloat16)
    arguments = rows(width), rows(width), vector, None if is_rms else vector, torch.ones(width if smooth else 1)
    return module, partial(module.add_norm, *arguments, 1e-5, 0.0, 1.0, is_rms, is_rms, not is_rms)


def activation(name: str, *, is_gated: bool, rounds: bool) -> tuple[Any, Callable[[], object]]:
    from bei_build.torch_graph.fused import activate as module

    gate = rows(4096) if is_gated else None
    return module, partial(module.activate, rows(4096), gate, torch.ones(1) if rounds else None, name)


def rotation(head_dim: int, heads: tuple[int, int], norm: str, *, neighbours: bool) -> tuple[Any, Callable[[], object]]:
    from bei_build.torch_graph.fused import rotate as module

    query, key = (torch.zeros(64, count, head_dim, dtype=torch.bfloat16) for count in heads)
    table, position = torch.zeros(512, head_dim // 2), torch.zeros(64, dtype=torch.int32)
    vector = torch.zeros(head_dim, dtype=torch.bfloat16) if norm else None
    bias = vector if norm == "layer" else None
    parameters = vector, bias, vector, bias, norm, 1e-6, 0.0, neighbours
    return module, partial(module.rotate, query, key, table, table, position, *parameters)


def pooling(mode: str, *, normalizes: bool, width: int = 1024) -> tuple[Any, Callable[[], object]]:
    from bei_build.torch_graph.fused import pool as module

    starts = torch.zeros(9, dtype=torch.int32)
    return module, partial(module.pool, rows(width), starts, torch.ones(64), mode, 0.0, normalizes)


def attention(**settings: Any) -> tuple[Any, Callable[[], object]]:
    from bei_build.torch_graph import ragged_attention as module

    head_dim, heads = settings.get("head_dim", 64), 12
    states = torch.zeros(64, heads, head_dim, dtype=torch.bfloat16)
    products = torch.zeros(64, heads, 512, dtype=torch.bfloat16) if "rows" in settings else None
    table = torch.zeros(1023, dtype=torch.int32) if "rows" in settings else None
    tables = (
        torch.zeros(heads) if "alibi" in settings else None,
        torch.zeros(257, heads) if "bias" in settings else None,
        *(products, products, table),
        torch.ones(heads * head_dim) if "smooth" in settings else torch.ones(1) if "rounds" in settings else None,
    )
    starts, lengths = torch.zeros(5, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    numbers = 512, 0.125, settings.get("softcap", 0.0), settings.get("window", -1), "causal" in settings
    return module, partial(module._ragged, states, states, states, starts, lengths, *tables, *numbers)


KERNELS: dict[str, Callable[[], tuple[Any, Callable[[], object]]]] = {
    "norm: BERT-large": partial(norm, 1024, is_rms=False, smooth=False),
    "norm: MiniLM, smoothed": partial(norm, 384, is_rms=False, smooth=True),
    "norm: Mistral-7B": partial(norm, 4096, is_rms=True, smooth=False),
    "norm: the widest": partial(norm, 16_384, is_rms=True, smooth=True),
    "activation: GELU, rounded": partial(activation, "gelu", is_gated=False, rounds=True),
    "activation: SwiGLU, rounded": partial(activation, "silu", is_gated=True, rounds=True),
    "activation: GeGLU": partial(activation, "gelu_tanh", is_gated=True, rounds=False),
    "activation: Mish": partial(activation, "mish", is_gated=False, rounds=False),
    "activation: clipped GELU": partial(activation, "gelu_10", is_gated=False, rounds=False),
    "activation: squared ReLU": partial(activation, "relu2", is_gated=False, rounds=True),
    "rounding": partial(activation, "identity", is_gated=False, rounds=True),
    "rotation: Mistral-7B": partial(rotation, 128, (32, 8), "", neighbours=False),
    "rotation: Gemma 3": partial(rotation, 256, (4, 1), "rms", neighbours=False),
    "rotation: neighbours, LayerNorms of heads": partial(rotation, 64, (12, 12), "layer", neighbours=True),
    "pooling: mean": partial(pooling, "mean", normalizes=False),
    "pooling: mean, unit length": partial(pooling, "mean", normalizes=True, width=4096),
    "pooling: max": partial(pooling, "max", normalizes=False),
    "pooling: a token's row, unit length": partial(pooling, "row", normalizes=True),
    "attention: ALiBi, partial keys": partial(attention, alibi=True),
    "attention: MPNet": partial(attention, bias=True),
    "attention: DeBERTa": partial(attention, rows=True),
    "attention: ALiBi, rounded": partial(attention, alibi=True, rounds=True),
    "attention: heads of 26, rounded and smoothed": partial(attention, head_dim=26, smooth=True),
    "attention: Gemma 2": partial(attention, head_dim=256, softcap=50.0, window=4096, causal=True),
}
FIRST = ("activation: SwiGLU, rounded",)  # test_generated compiles the others in the first tier


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FIRST else pytest.mark.slow) for name in KERNELS]
)
def test_a_kernel_compiles_for_sm_90(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    launch = launched(*KERNELS[name](), monkeypatch)
    kernel = compiled(launch)
    ptx = kernel.asm["ptx"]
    assert ".target sm_90a" in ptx
    assert len(kernel.asm["cubin"]) > 1000
    rounds = any(isinstance(each, Tensor) and each.dtype == torch.float8_e4m3fn for each in launch.arguments)
    assert ("cvt.rn.satfinite.e4m3x2.f32" in ptx) == rounds  # the hardware's rounding to FP8
    if not name.startswith("attention"):
        assert spilled(ptx, tmp_path) == 0


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "attention: Gemma 2" else pytest.mark.slow)
        for name in KERNELS
        if name.startswith("attention")
    ],
)
def test_attention_fits_into_the_shared_memory_of_all_gpus(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of compute capability 8.6, 8.9 and 12.0 have the least."""
    kernel = compiled(launched(*KERNELS[name](), monkeypatch), 89)
    assert kernel.metadata.shared <= GPUS[89].shared_memory
