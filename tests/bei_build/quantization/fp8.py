"""FP8 checkpoints as ModelOpt exports them, written without the builder's code."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch

from tests.support.checkpoints import change_config, read_tensors, write_json, write_tensors

FP8 = torch.float8_e4m3fn
LARGEST = 448.0

Tensors = dict[str, torch.Tensor]


def is_linear(name: str, tensor: torch.Tensor) -> bool:
    """True if ModelOpt would quantize it: tables of words, positions and types are not linear layers."""
    return name.endswith(".weight") and tensor.ndim == 2 and "embed" not in name


def quantize(
    folder: Path, excluded: Sequence[str] = (), *, per_row: bool = False, inputs: bool = True, said: str = "both"
) -> Tensors:
    """Rewrite the checkpoint in ``folder`` in FP8; returns its tensors with the values that they stand for, by their
    names.

    Modules that match a pattern of ``excluded`` stay as they are. ``per_row``: a scale per row instead of one per
    matrix. The input scale of the n-th matrix is ``input_scale(n)``, unless ``inputs`` are left out. ``said``: see
    ``say``.
    """
    stored, read = Tensors(), Tensors()
    for name, tensor in sorted(read_tensors(folder).items()):
        module = name.removesuffix(".weight")
        if not is_linear(name, tensor) or any(fnmatch(module, pattern) for pattern in excluded):
            stored[name] = read[name] = tensor
            continue
        largest = tensor.float().abs().amax(dim=1) if per_row else tensor.float().abs().max()
        scale = largest / LARGEST
        rows = scale[:, None] if per_row else scale
        stored[name], stored[f"{name}_scale"] = (tensor.float() / rows).clamp(-LARGEST, LARGEST).to(FP8), scale
        read[name] = stored[name].float() * rows
        if inputs:
            stored[f"{module}.input_scale"] = torch.tensor(input_scale(len(stored)))
    write_tensors(folder, stored)
    say(folder, "FP8_PER_CHANNEL_PER_TOKEN" if per_row else "FP8", excluded, said)
    return read


def input_scale(number: int) -> float:
    """A matrix's input scale: all are different, and not in the order of their names."""
    return 0.01 + (number * 37 % 101) / 1000


def say(folder: Path, algorithm: str | None, excluded: Sequence[str] = (), said: str = "both", **more: Any) -> None:
    """Write ModelOpt's settings for a checkpoint: ``said`` in "both" places, "inline" (config.json), in its own "file",
    or "inline, as in 2025", when config.json did not name the method."""
    producer = {"name": "modelopt", "version": "0.47.0"}
    if said != "file":
        method = {} if said == "inline, as in 2025" else {"quant_method": "modelopt"}
        settings = {**method, "quant_algo": algorithm, "ignore": list(excluded), "producer": producer, **more}
        change_config(folder, quantization_config=settings)
    if not said.startswith("inline"):
        own = {"quant_algo": algorithm, "kv_cache_quant_algo": None, "exclude_modules": list(excluded), **more}
        write_json(folder / "hf_quant_config.json", {"producer": producer, "quantization": own})
