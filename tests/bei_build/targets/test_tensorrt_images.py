"""Image towers, compiled by TensorRT-RTX: patches are a product of matrices, and each tower's positions and pooling."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from bei_build.checkpoint.checkpoint import Checkpoint
from bei_build.checkpoint.image_tower import read_images_alone
from bei_build.checkpoint.locate import locate
from bei_build.onnx_graph.attention import AttentionCore, lowerings
from bei_build.spec.dtypes import DType
from tests.bei_build.families import nomic_vision
from tests.bei_build.targets.rtx import compiled, needs_rtx, parsed
from tests.bei_build.targets.tiny import graph_of_checkpoint
from tests.support.two_towers import save_clip, save_naflex, save_siglip, save_tower

TOWERS: dict[str, Callable[[Path], Path]] = {
    "CLIP": save_clip,
    "SigLIP": save_siglip,
    "NaFlex": save_naflex,
    "ViT": lambda folder: save_tower(folder, "ViTModel"),
    "DINOv2 with registers": lambda folder: save_tower(folder, "Dinov2WithRegistersModel", image_size=80),
    "DINOv3": lambda folder: save_tower(folder, "DINOv3ViTModel", num_register_tokens=4),
    "nomic": nomic_vision.save,
}


def tower_of(kind: str, folder: Path) -> Checkpoint:
    return read_images_alone(locate(str(TOWERS[kind](folder / "checkpoint")))).checkpoint


@needs_rtx
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("NaFlex", DType.BF16),
        *(
            pytest.param(kind, dtype, marks=pytest.mark.slow)
            for kind in TOWERS
            for dtype in (DType.BF16, DType.FP16, DType.FP32)
            if (kind, dtype) != ("NaFlex", DType.BF16)
        ),
    ],
)
def test_image_towers_compile(trt: ModuleType, kind: str, dtype: DType, tmp_path: Path) -> None:
    tower = tower_of(kind, tmp_path)
    path = graph_of_checkpoint(tower, tmp_path / "graph", dtype)
    assert compiled(trt, path, lowerings(tower.spec, AttentionCore.TRT_ATTENTION), tower.max_seq_len)


@needs_rtx
@pytest.mark.slow
@pytest.mark.parametrize("kind", TOWERS)
def test_image_towers_are_read_with_packed_attention(trt: ModuleType, kind: str, tmp_path: Path) -> None:
    tower = tower_of(kind, tmp_path)
    path = graph_of_checkpoint(tower, tmp_path / "graph", DType.BF16, AttentionCore.TRT_PACKED)
    written = lowerings(tower.spec, AttentionCore.TRT_PACKED)
    assert written == ["packed"] * len(tower.spec.layers)
    with parsed(trt, path, written):
        pass
