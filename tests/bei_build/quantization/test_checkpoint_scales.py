"""ModelOpt's FP8 checkpoints: read with their scales, or refused by name."""

from __future__ import annotations

import importlib.util
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers
from safetensors.torch import load_file

from bei.core import Limits
from bei.errors import CheckpointError, ConfigError, WeightsError
from bei_build.onnx_graph.attention import AttentionCore
from bei_build.onnx_graph.transformer import write_graph
from bei_build.onnx_graph.writer import GraphTypes
from bei_build.quantization.checkpoint_scales import stored_ranges, stored_row_scales
from bei_build.reference.hf_model import HFReference
from bei_build.spec.dtypes import DType
from bei_build.spec.linear_layers import linear_layers
from bei_build.spec.quantization import LayerQuantization, Quantization
from bei_build.targets.base import Numerics
from bei_build.targets.trtllm import TRTLLMCompiler
from tests.bei_build.quantization.fp8 import FP8, Tensors, quantize, say
from tests.support.builds import build_artifact, embed, random_encodings, running
from tests.support.checkpoints import change_config, read_tensors, save_checkpoint, write_tensors
from tests.support.reading import read, refused, saved
from tests.support.trtllm_checkpoints import qwen3_embedder, reward_model

QUERY = "encoder.layer.0.attention.self.query"
# Plain names, a prefix and gates, joined matrices, some by head, shared layers, tables among the linear ones.
NAMES = (
    "BertModel",
    "Qwen3ForCausalLM",
    "ModernBertModel",
    "Phi3Model",
    "DebertaModel",
    "AlbertModel",
    "T5EncoderModel",
)


def pair(tmp_path: Path, name: str, **settings: Any) -> tuple[Path, Path]:
    """A checkpoint in FP8, and the same with the numbers that it stands for."""
    quantized = saved(tmp_path / "quantized", name)
    shutil.copytree(quantized, tmp_path / "dequantized")
    write_tensors(tmp_path / "dequantized", quantize(quantized, **settings))
    return quantized, tmp_path / "dequantized"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny BERT in FP8."""
    quantize(save_checkpoint(tmp_path / "checkpoint"))
    return tmp_path / "checkpoint"


@pytest.mark.parametrize("per_row", [False, True], ids=["a scale a matrix", "a scale a row"])
@pytest.mark.parametrize("name", NAMES)
def test_matrices_are_read_times_their_scales(name: str, per_row: bool, tmp_path: Path) -> None:
    quantized, dequantized = (read(folder) for folder in pair(tmp_path, name, per_row=per_row))
    with quantized.weights() as actual, dequantized.weights() as expected:
        for weight, _ in quantized.spec.weights():
            np.testing.assert_array_equal(actual.read(weight), expected.read(weight), err_msg=weight)
            assert expected.row_scales(weight) is None
        for layer in linear_layers(quantized.spec):
            for weight in layer.weights:
                scales = actual.row_scales(weight)
                assert scales is not None
                matrix = actual.read(weight)
                assert scales.shape == matrix.shape[:1]
                assert (len(set(scales.tolist())) > 1) >= per_row
                codes = (matrix / scales[:, None]).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
                np.testing.assert_array_equal(codes * scales[:, None], matrix)
        assert stored_row_scales(actual, quantized.spec).keys() == {
            layer.name for layer in linear_layers(quantized.spec)
        }
        assert stored_row_scales(expected, quantized.spec).keys() == set()
        assert stored_ranges(expected, quantized.spec) is None


def scales_of(folder: Path) -> dict[str, float]:
    """The file's input scales by module."""
    return {
        name.removesuffix(".input_scale"): float(tensor)
        for name, tensor in read_tensors(folder).items()
        if name.endswith(".input_scale")
    }


def stored(folder: Path) -> dict[str, float] | None:
    checkpoint = read(folder)
    with checkpoint.weights() as weights:
        return stored_ranges(weights, checkpoint.spec)


def test_scales_of_inputs_are_merged_where_matrices_are_one_product_and_where_they_read_the_same(
    tmp_path: Path,
) -> None:
    quantize(saved(tmp_path, "Qwen3Model"))
    scales, expected = scales_of(tmp_path), {}
    for index in range(3):
        attention, mlp = f"layers.{index}.self_attn", f"layers.{index}.mlp"
        expected[f"layers.{index}.attention.qkv"] = max(scales[f"{attention}.{part}_proj"] for part in "qkv")
        expected[f"layers.{index}.attention.output"] = scales[f"{attention}.o_proj"]
        inputs = max(scales[f"{mlp}.gate_proj"], scales[f"{mlp}.up_proj"])
        expected |= {f"layers.{index}.mlp.gate": inputs, f"layers.{index}.mlp.up": inputs}
        expected[f"layers.{index}.mlp.down"] = scales[f"{mlp}.down_proj"]
    assert len(set(scales.values())) == len(scales)
    assert stored(tmp_path) == {name: scale * 448 for name, scale in expected.items()}


def test_joined_and_shared_matrices_have_their_tensors_scale(tmp_path: Path) -> None:
    modern, albert = saved(tmp_path / "modern", "ModernBertModel"), saved(tmp_path / "albert", "AlbertModel")
    quantize(modern)
    scales, found = scales_of(modern), stored(modern)
    assert found is not None
    assert found["layers.1.attention.qkv"] == scales["layers.1.attn.Wqkv"] * 448
    assert found["layers.1.mlp.up"] == found["layers.1.mlp.gate"] == scales["layers.1.mlp.Wi"] * 448
    quantize(albert)
    scales, found = scales_of(albert), stored(albert)
    assert found is not None
    groups = [f"encoder.albert_layer_groups.{group}.albert_layers.0.ffn" for group in (0, 0, 1)]
    assert [found[f"layers.{index}.mlp.up"] for index in range(3)] == [scales[group] * 448 for group in groups]


@pytest.mark.parametrize("asked", [{"calibration_method": "percentile"}, {"calibrate_with": "modelopt"}], ids=repr)
def test_settings_of_ranges_are_refused_where_the_checkpoint_brings_its_own(
    asked: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    (name,) = asked
    with pytest.raises(ConfigError, match=f"{name} chooses ranges of inputs, .*: leave it out"):
        build_artifact(folder, tmp_path / "a", target="cuda-twin", precision="fp8", **asked)


def test_what_is_excluded_or_has_no_scale_stays_high(tmp_path: Path) -> None:
    excluded = ("*.1.attention.self.value", "pooler*", "encoder.layer.0.output.dense")
    quantize(save_checkpoint(tmp_path), excluded)
    checkpoint = read(tmp_path)
    names = {layer.name for layer in linear_layers(checkpoint.spec)}
    high = {"layers.1.attention.qkv", "layers.0.mlp.down"}
    found = stored(tmp_path)
    assert found is not None
    assert found.keys() == names - high
    with checkpoint.weights() as weights:
        assert stored_row_scales(weights, checkpoint.spec).keys() == names - high
    say(tmp_path, "FP8", ("encoder.layer.1.*",))  # though they are stored in FP8
    found = stored(tmp_path)
    assert found is not None
    assert all(name.startswith("layers.0.") for name in found)


def test_inputs_that_are_scaled_as_they_come_bring_no_quantization(tmp_path: Path) -> None:
    quantize(saved(tmp_path, "Qwen3Model"), inputs=False)
    assert stored(tmp_path) is None
    checkpoint = read(tmp_path)
    with checkpoint.weights() as weights:
        assert len(stored_row_scales(weights, checkpoint.spec)) == 3 * 5


@pytest.mark.parametrize("said", ["both", "inline", "file", "inline, as in 2025"])
def test_the_format_is_found_wherever_it_is_said(said: str, tmp_path: Path) -> None:
    expected = quantize(save_checkpoint(tmp_path), said=said)
    checkpoint = read(tmp_path)
    assert checkpoint.fp8 is not None
    assert not hasattr(checkpoint.config, "quantization_config")
    with checkpoint.weights() as weights:
        actual = weights.read("layers.0.attention.query.weight")
    np.testing.assert_array_equal(actual, expected[f"{QUERY}.weight"].numpy())


@pytest.mark.parametrize("make", [qwen3_embedder, reward_model])
def test_what_target_trtllm_writes_is_read(make: Callable[[Path], Path], tmp_path: Path) -> None:
    original = make(tmp_path / "checkpoint")
    engine = tmp_path / "engine"
    engine.mkdir()
    checkpoint = read(original)
    with checkpoint.weights() as weights:
        TRTLLMCompiler().compile(checkpoint.spec, weights, Numerics("fp8"), Limits(256, 8, 40), engine, lambda _: None)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(original / name, engine)
    change_config(engine, architectures=[checkpoint.spec.architecture])  # the name of TensorRT-LLM's class
    written = load_file(engine / "model.safetensors")
    again = read(engine)
    with again.weights() as weights:
        tensors = dict(weights.stored_tensors())
        assert tensors.keys() == {name for name in written if not name.endswith("_scale")}
        for name, actual in tensors.items():
            expected = written[name].float() * written.get(f"{name}_scale", torch.ones(()))
            np.testing.assert_array_equal(actual, expected.numpy())
        assert len(stored_row_scales(weights, again.spec)) == len(linear_layers(again.spec))
        assert stored_ranges(weights, again.spec) is None  # its inputs are scaled as they come


@pytest.mark.skipif(
    importlib.util.find_spec("modelopt") is None, reason="nvidia-modelopt is not installed: pip install 'bei[fp8]'"
)
@pytest.mark.parametrize("name", ["BertModel", "Qwen3ForCausalLM", "LlamaForCausalLM"])
def test_what_modelopt_exports_is_read(name: str, tmp_path: Path) -> None:
    original = saved(tmp_path / "checkpoint", name)
    linear = export(original, name, tmp_path / "exported")
    shutil.copy(original / "tokenizer.json", tmp_path / "exported")
    checkpoint = read(tmp_path / "exported")
    # Those of embeddings are none, and a language model's last matrix is not among its layers.
    layers = {module: it for module, it in linear.items() if "layer" in module}
    with checkpoint.weights() as weights:
        found = stored_ranges(weights, checkpoint.spec)
        tensors = dict(weights.stored_tensors())
    assert found is not None
    assert found.keys() == {layer.name for layer in linear_layers(checkpoint.spec)}
    assert max(found.values()) == pytest.approx(max(a for a, _ in layers.values()))
    assert min(found.values()) == pytest.approx(min(a for a, _ in layers.values()))
    for module, (_, matrix) in layers.items():
        actual = tensors[f"{module}.weight"]
        scale = np.abs(matrix).max() / 448
        assert (np.abs(actual - matrix) <= np.abs(matrix) / 16 + scale * 2**-10 + 1e-7).all(), module


def export(folder: Path, name: str, out: Path) -> dict[str, tuple[float, npt.NDArray[np.float32]]]:
    """ModelOpt's own export into ``out``; returns the largest input and the matrix of each quantized module."""
    model: Any = getattr(transformers, name).from_pretrained(folder, dtype=torch.bfloat16).eval()

    def run(_: Any) -> None:
        with torch.no_grad():
            for encoding in random_encodings([5, 20, 40], model.config.vocab_size):
                model(input_ids=torch.from_numpy(encoding.input_ids.astype(np.int64))[None])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import modelopt.torch.quantization
        from modelopt.torch.export import export_hf_checkpoint

        matrices = {
            name: module.weight.detach().float().numpy().copy()
            for name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear)
        }
        model = modelopt.torch.quantization.quantize(model, modelopt.torch.quantization.FP8_DEFAULT_CFG, run)
        largest = {
            name: float(module.input_quantizer.amax)
            for name, module in model.named_modules()
            if name in matrices and module.input_quantizer.is_enabled
        }
        export_hf_checkpoint(model, export_dir=out)
    return {name: (amax, matrices[name]) for name, amax in largest.items()}


# The cache of keys and values.


def test_scales_of_a_cache_are_left_aside(tmp_path: Path) -> None:
    expected = quantize(saved(tmp_path, "Qwen3Model"))
    scales = {f"layers.0.self_attn.{name}_proj.{name}_scale": torch.tensor(0.5) for name in "kv"}
    write_tensors(tmp_path, {**read_tensors(tmp_path), **scales})
    say(tmp_path, "FP8", kv_cache_quant_algo="FP8")
    with read(tmp_path).weights() as weights:
        np.testing.assert_array_equal(
            weights.read("layers.0.attention.key.weight"), expected["layers.0.self_attn.k_proj.weight"].numpy()
        )


def test_a_checkpoint_of_which_only_the_cache_is_quantized_is_read_as_it_is(tmp_path: Path) -> None:
    expected = read_tensors(saved(tmp_path, "Qwen3Model"))
    write_tensors(tmp_path, {**expected, "layers.0.self_attn.k_proj.k_scale": torch.tensor(0.5)})
    say(tmp_path, None, kv_cache_quant_algo="FP8")
    assert stored(tmp_path) is None
    with read(tmp_path).weights() as weights:
        np.testing.assert_array_equal(
            weights.read("layers.0.attention.key.weight"), expected["layers.0.self_attn.k_proj.weight"].numpy()
        )


# Artifacts built from it.


@pytest.mark.parametrize("name", ["BertModel", "Qwen3ForCausalLM", "ModernBertModel", "T5EncoderModel"])
def test_the_reference_computes_with_the_numbers_that_are_meant(name: str, tmp_path: Path) -> None:
    rows = []
    for folder in pair(tmp_path, name):
        checkpoint = read(folder)
        with checkpoint.weights() as weights:
            reference = HFReference(checkpoint, weights)
            encodings = random_encodings([5, 12], checkpoint.spec.embeddings.vocab_size)
            rows.append((reference.name, np.stack(reference.run(encodings, ["embedding"])["embedding"])))
    (quantized, actual), (dequantized, expected) = rows
    np.testing.assert_array_equal(actual, expected)
    assert quantized == f"{dequantized}, its FP8 weights times their scales"


@pytest.mark.parametrize("name", ["BertModel", "Qwen3Model"])
def test_the_graph_has_the_matrices_as_they_are_stored(name: str, tmp_path: Path) -> None:
    """The same codes, although the score scale is folded into the rows of queries: it is in their scales."""
    import onnx

    quantized, _ = pair(tmp_path, name, per_row=True)
    checkpoint = read(quantized)
    with checkpoint.weights() as weights:
        given = stored_row_scales(weights, checkpoint.spec)
        layers = {name: LayerQuantization(3.0, row_scales=scales) for name, scales in given.items()}
        types = GraphTypes(DType.BF16, DType.BF16, Quantization("fp8", layers))
        path = write_graph(checkpoint.spec, weights.read, tmp_path, types, AttentionCore.TRT_ATTENTION, 40)
        for layer in linear_layers(checkpoint.spec):
            matrix, scales = layer.matrix(weights.read), np.concatenate(list(given[layer.name].values()))
            expected = (matrix / scales[:, None]).astype(ml_dtypes.float8_e4m3fn)
            stored = next(
                tensor for tensor in onnx.load(path).graph.initializer if tensor.name == f"{layer.name}.weight.fp8"
            )
            actual = np.frombuffer(stored.raw_data, ml_dtypes.float8_e4m3fn).reshape(expected.shape)
            np.testing.assert_array_equal(actual.astype(np.float32), expected.astype(np.float32), err_msg=layer.name)


@pytest.mark.parametrize("reference", ["auto", "engine"])
def test_an_engine_is_built_and_certified(reference: str, tmp_path: Path) -> None:
    quantized, dequantized = pair(tmp_path, "BertModel", excluded=("pooler*",))
    artifact = build_artifact(quantized, tmp_path / "artifact", reference=reference)
    certificate = artifact.certificate
    assert certificate.passed
    assert ("FP8 weights" in certificate.reference) == (reference == "auto")
    assert (certificate.kind == "self-consistency") == (reference == "engine")
    encodings = random_encodings([3, 9], artifact.manifest.spec.vocab_size)
    same = build_artifact(dequantized, tmp_path / "same", verify=False)
    with running(artifact) as engine, running(same) as expected:
        np.testing.assert_array_equal(embed(engine, encodings), embed(expected, encodings))


# Refusals.


OTHERS = (
    *(
        "NVFP4_AWQ",
        "NVFP4_SVD",
        "W4A16_AWQ",
        "W4A8_AWQ",
        "W4A8_NVFP4_FP8",
        "FP8_PB_WO",
        "FP8_PB_REAL",
    ),
    *("INT8_SQ", "W8A8_SQ_PER_CHANNEL", "W8A16", "MIXED_PRECISION"),
)


@pytest.mark.parametrize("said", ["inline", "file"])
@pytest.mark.parametrize("algorithm", OTHERS)
def test_another_format_is_refused_by_name(algorithm: str, said: str, folder: Path) -> None:
    (folder / "hf_quant_config.json").unlink()
    change_config(folder, quantization_config=None)
    say(folder, algorithm, said=said)
    refused(
        folder, CheckpointError, rf"quantized by ModelOpt \({algorithm}\): of its formats bei reads FP8 .* original"
    )


def test_two_formats_are_refused(folder: Path) -> None:
    say(folder, "NVFP4", said="file")
    refused(folder, CheckpointError, r"name two formats \(FP8, NVFP4\): .* Download it again")


def test_modules_that_are_no_list_are_refused(folder: Path) -> None:
    change_config(folder, quantization_config={"quant_method": "modelopt", "quant_algo": "FP8", "ignore": "lm_head"})
    refused(folder, CheckpointError, r"quantization has ignore = 'lm_head': it must be a list")


def changed(**tensors: torch.Tensor) -> Callable[[Tensors], Tensors]:
    """Changes to the tensors of the first layer's query, by the endings of their names."""
    return lambda before: {**before, **{f"{QUERY}.{end}": tensor for end, tensor in tensors.items()}}


REFUSED: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "blocks": (
        changed(weight_scale=torch.ones(2, 2)),
        rf"{QUERY}\.weight has shape \[32, 32\], its scales have \[2, 2\]",
    ),
    "scales a column": (changed(weight_scale=torch.ones(1, 32)), r"its scales have \[1, 32\].* one a row"),
    "scales of channels of inputs": (changed(input_scale=torch.ones(32)), r"its inputs' \[32\]: .* one for inputs"),
    "no scale": (
        lambda tensors: {name: tensor for name, tensor in tensors.items() if name != f"{QUERY}.weight_scale"},
        rf"Tensor {QUERY}\.weight is F8_E4M3, and {QUERY}\.weight_scale is missing\. Download",
    ),
    "integers": (
        changed(weight=torch.ones(32, 32, dtype=torch.int8)),
        rf"{QUERY}\.weight is I8 and has a scale: .*F8_E4M3",
    ),
    "another float": (changed(weight=torch.ones(32, 32, dtype=torch.float8_e5m2)), r"is F8_E5M2 and has a scale"),
    "two scales": (
        changed(weight_scale_2=torch.ones(())),
        rf"{QUERY}\.weight_scale_2 belongs to a quantized checkpoint",
    ),
    "a smoothed input": (changed(pre_quant_scale=torch.ones(32)), rf"{QUERY}\.pre_quant_scale belongs to a quantized"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_scales_that_cannot_be_applied_are_refused_by_name(what: str, folder: Path) -> None:
    change, message = REFUSED[what]
    write_tensors(folder, change(read_tensors(folder)))
    refused(folder, WeightsError, message)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("kind", ["weight_scale", "input_scale"])
def test_a_scale_that_is_not_above_zero_is_refused(kind: str, value: float, folder: Path) -> None:
    write_tensors(folder, changed(**{kind: torch.tensor(value)})(read_tensors(folder)))
    checkpoint = read(folder)
    with checkpoint.weights() as weights:
        reads: dict[str, Callable[[], object]] = {
            "weight_scale": lambda: weights.read("layers.0.attention.query.weight"),
            "input_scale": lambda: stored_ranges(weights, checkpoint.spec),
        }
        with pytest.raises(WeightsError, match=rf"{QUERY}\.{kind} has scales that are not above 0"):
            reads[kind]()


def test_a_pickle_in_fp8_is_refused(folder: Path) -> None:
    torch.save(read_tensors(folder), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    refused(folder, WeightsError, "has weights in FP8 that are not safetensors: convert them")


def test_fp8_that_no_config_speaks_of_is_refused(folder: Path) -> None:
    (folder / "hf_quant_config.json").unlink()
    change_config(folder, quantization_config=None)
    refused(folder, WeightsError, r"_scale \(and \d+ more\) belongs to a quantized checkpoint")
    assert any(tensor.dtype == FP8 for tensor in read_tensors(folder).values())
