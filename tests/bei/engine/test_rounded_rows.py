"""Rounding by a kernel of our own: where the graph has it, and that it computes what the graph computes."""

from __future__ import annotations

from contextlib import closing
from importlib.util import find_spec
from pathlib import Path

import msgspec
import numpy as np
import pytest

from bei.artifact.manifest import ENGINE_DIR, OPENVINO_ROUNDINGS, Artifact
from bei.engine.load import load_engine
from bei.engine.rounded_rows import RoundingSite, encoded_roundings, use_rounding_kernel
from bei.errors import EngineError
from bei_build.quantization import scales
from tests.support.builds import build_artifact, embed
from tests.support.zoo import CASES, MAX_TOKENS, encodings_of, save_case

needs_kernels = pytest.mark.skipif(find_spec("bei_kernels_cpu") is None, reason="bei-kernels-cpu is not installed")

# GELU, a gated MLP, experts' products of some tokens, and scores that the kernel of attention leaves alone.
NAMES = ("BertModel", "LlamaModel", "NomicBertModel", "DebertaV2Model")
BY_NAME = {case.name: case for case in CASES}


def made(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Artifact:
    """In int8, with a range for each token wherever that is better at all."""
    monkeypatch.setattr(scales, "_WORTH_A_RANGE_A_TOKEN", 1.0)
    checkpoint = save_case(folder / "checkpoint", BY_NAME[name])
    return build_artifact(checkpoint, folder / "artifact", precision="int8", verify=False)


def sites_of(artifact: Artifact) -> list[RoundingSite]:
    return msgspec.json.decode((artifact.path / ENGINE_DIR / OPENVINO_ROUNDINGS).read_bytes(), type=list[RoundingSite])


@needs_kernels
@pytest.mark.parametrize("name", NAMES)
def test_the_kernel_gives_what_the_graph_gives(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    artifact = made(name, tmp_path, monkeypatch)
    assert sites_of(artifact)
    encodings = encodings_of(BY_NAME[name], [1, MAX_TOKENS, 2, 17, 5], artifact.manifest.spec.vocab_size)
    rows = []
    for kernels in (False, True):
        options = {"num_threads": 1, "use_kernels": int(kernels)}
        with closing(load_engine(artifact.engine_dir, artifact.manifest, options)) as engine:
            assert ("bei-kernels-cpu" in engine.info.device) == kernels
            rows.append(embed(engine, encodings))
    cosines = (rows[0] * rows[1]).sum(1) / np.linalg.norm(rows[0], axis=1) / np.linalg.norm(rows[1], axis=1)
    assert cosines.min() > 0.99
    assert not np.array_equal(rows[0], rows[1]), "the kernel rounds from other numbers, so some codes differ"


@needs_kernels
def test_a_list_that_does_not_fit_its_model_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import bei_kernels_cpu
    import openvino

    artifact, listed = made("BertModel", tmp_path, monkeypatch), tmp_path / OPENVINO_ROUNDINGS
    listed.write_bytes(encoded_roundings([msgspec.structs.replace(sites_of(artifact)[0], codes="another")]))
    model = openvino.Core().read_model(artifact.path / ENGINE_DIR / "model.xml")
    with pytest.raises(EngineError, match=r"roundings\.json.*build it again"):
        use_rounding_kernel(openvino, model, listed, bei_kernels_cpu.LIBRARY)
