"""Every model of ``tests.support.other_models`` on every target: the same numbers from four compilers' graphs.

The graph of target cpu, run by OpenVINO, is the one that tests of families hold to the authors' code.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from bei.core import PackedBatch
from bei.engine.cuda.device import TwinDevice
from bei.errors import ConfigError
from bei_build.checkpoint.checkpoint import Checkpoint
from bei_build.onnx_graph.attention import AttentionCore, lowerings
from bei_build.onnx_graph.transformer import write_graph
from bei_build.onnx_graph.writer import GraphTypes
from bei_build.spec.dtypes import DType
from bei_build.torch_graph.model import packed_model, run, tensors_of
from bei_build.torch_graph.package import export_model, weights_of, write_package, write_weights
from bei_build.torch_graph.parameters import join_linear_layers
from tests.bei_build.targets.rtx import compiled, needs_rtx
from tests.bei_build.targets.test_tensorrt_numbers import run_onnxruntime, without_filler
from tests.bei_build.torch_graph.rig import of_the_graph, of_the_module, rows_by_output
from tests.model_matrix import difference
from tests.support.builds import build_artifact
from tests.support.gliclass_models import save_gliclass
from tests.support.gliner_models import save_gliner
from tests.support.other_models import OTHERS, encodings_of

# Outputs of random weights are up to some tens.
RELATIVE = 2e-5
FIRST = ("LFM2.5-Embedding", "jina-embeddings-v5-nano", "jina-reranker-v3.5", "pplx-embed-v1")


def trt_graph(checkpoint: Checkpoint, folder: Path, dtype: DType) -> Path:
    folder.mkdir()
    with checkpoint.weights() as weights:
        return write_graph(
            *(checkpoint.spec, weights.read, folder, GraphTypes(dtype, dtype)),
            AttentionCore.TRT_ATTENTION,
            checkpoint.max_seq_len,
        )


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FIRST else pytest.mark.slow) for name in OTHERS]
)
def test_tensorrts_graph_and_the_module_compute_what_the_graph_for_cpus_does(name: str, tmp_path: Path) -> None:
    checkpoint = OTHERS[name].read(tmp_path)
    spec, encodings = checkpoint.spec, encodings_of(checkpoint.spec)
    with checkpoint.weights() as weights:
        expected = of_the_graph(spec, weights.read, checkpoint.max_seq_len, encodings, tmp_path / "cpu")
        model = packed_model(spec, weights.read, checkpoint.max_seq_len)
    batch = PackedBatch.from_encodings(encodings)
    computed = run_onnxruntime(trt_graph(checkpoint, tmp_path / "trt", DType.FP32), batch)
    for found in (rows_by_output(spec, without_filler(computed, spec, batch), batch), of_the_module(model, encodings)):
        assert found.keys() == expected.keys()
        for output, rows in found.items():
            scale = max(float(np.abs(row).max()) for row in expected[output])
            assert difference(rows, expected[output]) <= RELATIVE * max(1.0, scale), output


@pytest.mark.slow
@needs_rtx
@pytest.mark.parametrize("name", OTHERS)
def test_tensorrt_compiles_every_model(trt: ModuleType, name: str, tmp_path: Path) -> None:
    checkpoint = OTHERS[name].read(tmp_path)
    written = lowerings(checkpoint.spec, AttentionCore.TRT_ATTENTION)
    assert compiled(trt, trt_graph(checkpoint, tmp_path / "trt", DType.BF16), written, checkpoint.max_seq_len)


@pytest.mark.slow
# PyTorch's compiler uses what PyTorch itself has deprecated.
@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning", "ignore:.*LeafSpec:FutureWarning")
@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling for a CPU needs g++")
@pytest.mark.parametrize("name", OTHERS)
def test_a_compiled_package_of_every_model_computes_what_its_module_does(name: str, tmp_path: Path) -> None:
    checkpoint = OTHERS[name].read(tmp_path)
    with checkpoint.weights() as weights:
        model = packed_model(checkpoint.spec, weights.read, checkpoint.max_seq_len)
    join_linear_layers(model)
    program = export_model(model)
    write_package(program, tmp_path / "model.pt2")
    write_weights(weights_of(program), tmp_path / "model.safetensors")
    package = TwinDevice(torch).load(tmp_path / "model.pt2", tmp_path / "model.safetensors")
    batch = PackedBatch.from_encodings(encodings_of(checkpoint.spec))
    expected = run(model, batch)
    found = package.boxed_run(list(tensors_of(model, batch).values()))
    for rows, wanted in zip(found, expected.values(), strict=True):
        scale = max(1.0, float(np.abs(wanted).max()))
        np.testing.assert_allclose(rows[: len(wanted)].numpy(), wanted, rtol=0, atol=RELATIVE * scale)


@pytest.mark.parametrize("target", ["cuda-twin"])
@pytest.mark.parametrize("save", [save_gliner, save_gliclass], ids=["GLiNER", "GLiClass"])
def test_labels_of_requests_are_refused_by_name_elsewhere(save: Any, target: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="engines for cpu"):
        build_artifact(save(tmp_path / "checkpoint"), tmp_path / "artifact", target=target)
