"""Image towers and the decoders that read their states, compiled by TensorRT-RTX: patches are a product of matrices,
and each tower's positions, windows and pooling."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from bei_build.checkpoint.checkpoint import Checkpoint
from bei_build.checkpoint.image_tower import read_image_tower, read_images_alone
from bei_build.checkpoint.locate import locate
from bei_build.onnx_graph.attention import AttentionCore, lowerings
from bei_build.spec.dtypes import DType
from tests.bei_build.families import nomic_vision
from tests.bei_build.targets.rtx import compiled, needs_rtx, parsed
from tests.bei_build.targets.tiny import graph_of_checkpoint
from tests.support.colpali import save_colpali
from tests.support.colqwen2 import save_colqwen2
from tests.support.embedding_gemma2 import save_embedding_gemma2
from tests.support.qwen3_vl import save_qwen3_vl
from tests.support.reading import read
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


DECODERS: dict[str, Callable[[Path], Path]] = {
    "ColPali": save_colpali,
    "ColQwen2": save_colqwen2,
    "ColQwen2.5": lambda folder: save_colqwen2(folder, second=True),
    "Qwen3-VL": save_qwen3_vl,
    "EmbeddingGemma 2": lambda folder: save_embedding_gemma2(folder, text={"max_position_embeddings": 512}),
}


@needs_rtx
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [DType.BF16, DType.FP32])
@pytest.mark.parametrize("core", [AttentionCore.TRT_ATTENTION, AttentionCore.TRT_PACKED])
@pytest.mark.parametrize("kind", DECODERS)
def test_decoders_and_their_towers_compile(
    trt: ModuleType, kind: str, core: AttentionCore, dtype: DType, tmp_path: Path
) -> None:
    """With profiles of the rows of images, and of windows."""
    decoder = read(DECODERS[kind](tmp_path / "checkpoint"))
    images = read_image_tower(decoder)
    assert images is not None
    for name, checkpoint in (("decoder", decoder), ("tower", images.checkpoint)):
        own = AttentionCore.TRT_ATTENTION if checkpoint.spec.joins_rows else core
        path = graph_of_checkpoint(checkpoint, tmp_path / name, dtype, own)
        written = lowerings(checkpoint.spec, own)
        if own is AttentionCore.TRT_ATTENTION:
            assert compiled(trt, path, written, checkpoint.max_seq_len)
        else:
            with parsed(trt, path, written):
                pass
