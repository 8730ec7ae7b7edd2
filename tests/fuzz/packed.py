"""Matrices in few bits: settings of each method, and tensors of other shapes and types under their names."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import save_file

from bei_build.weights.packed import PackedStore
from bei_build.weights.packed_format import modelopt_packed, parse_packed
from bei_build.weights.tensor_store import open_weights
from tests.fuzz.mutation import changed
from tests.fuzz.trial import Trial

_GROUPS = {"a": {"weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 8, "symmetric": True}}}
_SETTINGS: tuple[dict[str, Any], ...] = (
    {"quant_method": "gptq", "bits": 4, "group_size": 8, "checkpoint_format": "gptq", "desc_act": True},
    {"quant_method": "awq", "bits": 4, "group_size": 8, "version": "gemm", "zero_point": True},
    *(
        {"quant_method": "compressed-tensors", "format": form, "config_groups": _GROUPS, "ignore": ["lm_head"]}
        for form in ("pack-quantized", "int-quantized", "float-quantized", "nvfp4-pack-quantized", "mxfp8-quantized")
    ),
)
_TYPES = (torch.int32, torch.int8, torch.uint8, torch.float16, torch.float32, torch.float8_e4m3fn, torch.int64)
_PARTS: tuple[str, ...] = (
    "qweight",
    "qzeros",
    "scales",
    "g_idx",
    "weight",
    "weight_packed",
    "weight_scale",
    "weight_scale_2",
)
_PARTS += ("weight_shape", "weight_zero_point", "weight_global_scale", "weight_g_idx", "input_scale")
_ZEROS = torch.full((2, 1), 0x77777777, dtype=torch.int32)
# Matrices of 8 rows and 16 columns in two groups.
_GOOD: dict[str, dict[str, torch.Tensor]] = {
    "gptq": {
        "qweight": torch.ones(2, 8, dtype=torch.int32),
        "qzeros": _ZEROS,
        "scales": torch.ones(2, 8),
        "g_idx": torch.arange(16, dtype=torch.int32) // 8,
    },
    "awq": {"qweight": torch.ones(16, 1, dtype=torch.int32), "qzeros": _ZEROS, "scales": torch.ones(2, 8)},
    "pack-quantized": {
        "weight_packed": torch.ones(8, 2, dtype=torch.int32),
        "weight_scale": torch.ones(8, 2),
        "weight_shape": torch.tensor([8, 16]),
    },
    "int-quantized": {"weight": torch.ones(8, 16, dtype=torch.int8), "weight_scale": torch.ones(8, 2)},
    "float-quantized": {"weight": torch.ones(8, 16).to(torch.float8_e4m3fn), "weight_scale": torch.ones(8, 2)},
}


def packed(folder: Path) -> Trial:
    """All parts of one matrix, right or wrong, under settings that are right or wrong."""
    file = folder / "model.safetensors"

    def trial(random: Random) -> None:
        generator = torch.Generator().manual_seed(random.randrange(1 << 30))
        content = random.choice(_SETTINGS)
        parts = dict(_GOOD.get(content.get("format", content["quant_method"]), {}))
        for part in random.sample(_PARTS, random.randrange(0 if parts else 2, 4)):
            shape = [random.choice((1, 2, 8, 16)) for _ in range(random.choice((0, 1, 2, 2, 2, 2, 3)))]
            parts[part] = torch.randint(-128, 127, shape, generator=generator).to(random.choice(_TYPES))
        tensors = {f"layers.0.{part}": tensor for part, tensor in parts.items()}
        save_file(tensors, file)
        settings = changed(random, content) if random.random() < 0.5 else content
        stored = parse_packed(settings if isinstance(settings, dict) else content)
        form = random.choice(("NVFP4", "MXFP8"))
        store = open_weights(folder)
        try:
            matrices = PackedStore(store, stored or modelopt_packed(form))
            for name in matrices.shapes:
                matrices.read(name)
        finally:
            store.close()

    return trial
