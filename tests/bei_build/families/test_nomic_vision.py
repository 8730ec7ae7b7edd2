"""nomic-embed-vision: its own code's vectors, computed here in torch as that code is written, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bei.core import Float32Array, PackedBatch
from bei.errors import CheckpointError, ConfigError
from bei.image.source import ImageInput
from bei_build.checkpoint.image_tower import ImageCheckpoint, read_images_alone
from bei_build.checkpoint.locate import locate
from bei_build.torch_graph.model import packed_model, run
from bei_build.verification.images import encoder_of_tower
from tests.bei_build.families.nomic_vision import Oracle, config_of, save
from tests.support.builds import build_artifact, running
from tests.support.cpus import needs_bf16
from tests.support.two_towers import drawn_files

FILES = drawn_files()


def tower_of(folder: Path) -> ImageCheckpoint:
    return read_images_alone(locate(str(folder)))


def batch_of(images: ImageCheckpoint) -> PackedBatch:
    return PackedBatch.from_encodings(encoder_of_tower(images).encode([ImageInput(content) for content in FILES]))


def unit(rows: Float32Array) -> Float32Array:
    found: Float32Array = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return found


@pytest.mark.parametrize("changes", [{}, {"norm_mlp": False, "use_rotary_pos_emb": False}])
def test_the_module_gives_its_own_codes_vectors(changes: dict[str, Any], tmp_path: Path) -> None:
    images = tower_of(save(tmp_path / "nomic", **changes))
    with images.checkpoint.weights() as weights:
        model = packed_model(images.checkpoint.spec, weights.read, images.checkpoint.max_seq_len)
    found = run(model, batch_of(images))["embedding"]
    np.testing.assert_allclose(unit(found), Oracle(tmp_path / "nomic").vectors(FILES), atol=2e-4)


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=[pytest.mark.slow, needs_bf16])])
def test_artifacts_give_its_own_codes_vectors(precision: str, tmp_path: Path) -> None:
    folder = save(tmp_path / "nomic")
    artifact = build_artifact(folder, tmp_path / "out", precision=precision)
    assert artifact.certificate.kind == "self-consistency"  # transformers has no class of it
    with running(artifact) as engine:
        found = unit(engine.run(batch_of(tower_of(folder)))["embedding"])
    expected = Oracle(folder).vectors(FILES)
    if precision == "fp32":
        np.testing.assert_allclose(found, expected, atol=2e-4)
    assert (found * expected).sum(axis=1).min() > 0.999


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"register_tokens": 4}, "register_tokens"),
        ({"global_pool": "avg"}, "global_pool"),
        ({"activation_function": "gelu"}, "activation_function"),
        ({"rotary_emb_fraction": 1.0}, "rotary_emb_fraction"),
        ({"img_size": [48, 32]}, "image_size"),
        ({"auto_map": {"AutoModel": "someone/else--code.OtherModel"}}, "code of its own"),
    ],
)
def test_what_the_family_does_not_describe_is_refused(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    folder = save(tmp_path / "nomic")
    (folder / "config.json").write_text(json.dumps(config_of(**changes)))
    with pytest.raises(CheckpointError, match=named):
        tower_of(folder)


def test_a_reference_that_there_is_not_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--reference hf: transformers has no NomicVisionModel"):
        build_artifact(save(tmp_path / "checkpoint"), tmp_path / "out", reference="hf")
