"""Quantized graphs against the HF model rounded by torch, and their compilation by TensorRT-RTX."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from bei.core import Encoding, Float32Array, Limits, PackedBatch
from bei_build.checkpoint.checkpoint import Checkpoint
from bei_build.onnx_graph.attention import AttentionCore, lowerings
from bei_build.onnx_graph.transformer import write_graph
from bei_build.onnx_graph.writer import GraphTypes
from bei_build.quantization.emulation import emulated_engine
from bei_build.spec.dtypes import DType
from bei_build.spec.linear_layers import linear_layers
from bei_build.spec.model_spec import ModelSpec
from bei_build.spec.quantization import LARGEST, Format, LayerQuantization, Quantization
from tests.bei_build.targets.rtx import compiled, needs_rtx
from tests.bei_build.targets.tiny import case_named, random_weights, read_case, tiny_spec, with_experts
from tests.support.zoo import Case, by_tier, encodings_of

LENGTHS = [1, 5, 33, 17, 2, 26]

# One model a form of attention, one with experts: FP16 and BF16 are compiled for all families in the first tier.
IN_FIRST_TIER = ("BertModel", "ModernBertModel", "Qwen3Model", "DebertaV2Model", "NomicBertModel", "BartModel")

# The HF modules whose products are one linear layer of the graph.
MODULES = {
    "BertModel": {
        "layers.{i}.attention.qkv": [f"encoder.layer.{{i}}.attention.self.{it}" for it in ("query", "key", "value")],
        "layers.{i}.attention.output": ["encoder.layer.{i}.attention.output.dense"],
        "layers.{i}.mlp.up": ["encoder.layer.{i}.intermediate.dense"],
        "layers.{i}.mlp.down": ["encoder.layer.{i}.output.dense"],
    },
    "LlamaModel": {
        "layers.{i}.attention.qkv": [f"layers.{{i}}.self_attn.{it}_proj" for it in "qkv"],
        "layers.{i}.attention.output": ["layers.{i}.self_attn.o_proj"],
        "layers.{i}.mlp.up": ["layers.{i}.mlp.up_proj"],
        "layers.{i}.mlp.gate": ["layers.{i}.mlp.gate_proj"],
        "layers.{i}.mlp.down": ["layers.{i}.mlp.down_proj"],
    },
}


def quantization_of(
    spec: ModelSpec, number_format: Format, amax: float = 3.0, *, smooth: bool = False, per_token: bool = False
) -> Quantization:
    """Scales of plausible size, for all layers; with ``smooth``, factors too; with ``per_token``, each token's own."""
    widths = {name: shape[-1] for name, shape in spec.weights()}

    def layer_of(name: str, width: int) -> LayerQuantization:
        factors = tuple(np.linspace(0.5, 2.0, width).round(3).tolist()) if smooth else None
        return LayerQuantization(1.0 if per_token else amax, factors, per_token=per_token)

    layers = {}
    for layer in linear_layers(spec):
        transposed = dict(spec.weights())[layer.weights[0]]
        width = transposed[0] // layer.expert[1] if layer.transposed and layer.expert else widths[layer.weights[0]]
        layers[layer.name] = layer_of(layer.name, width)
    return Quantization(number_format, layers)


def torch_round(values: torch.Tensor, scale: torch.Tensor | float, number_format: Format) -> torch.Tensor:
    codes = (values / scale).clamp(-LARGEST[number_format], LARGEST[number_format])
    codes = codes.round() if number_format == "int8" else codes.to(torch.float8_e4m3fn).float()
    return codes * scale


def hf_states(
    checkpoint: Checkpoint, name: str, encodings: list[Encoding], quantization: Quantization | None
) -> list[Float32Array]:
    """The mean of the last states of transformers' own model, its linear modules rounded by torch."""
    from transformers import AutoModel

    model = AutoModel.from_pretrained(checkpoint.folder, dtype=torch.float32, attn_implementation="eager").eval()
    for layer, it in (quantization.layers if quantization else {}).items():
        index = layer.split(".")[1]
        for module_name in MODULES[name][layer.replace(f"layers.{index}.", "layers.{i}.", 1)]:
            module = model.get_submodule(module_name.replace("{i}", index))
            assert quantization is not None
            number_format, factors = quantization.format, torch.tensor(it.smoothing or [1.0])
            weight = module.weight.data * factors
            scale = weight.abs().amax(1, keepdim=True) / LARGEST[number_format]
            module.weight.data = torch_round(weight, scale, number_format)
            step = it.input_amax / LARGEST[number_format]

            def round_input(
                _: object,
                args: tuple[torch.Tensor],
                f: torch.Tensor = factors,
                s: float = step,
                each: bool = it.per_token,
            ) -> torch.Tensor:
                rows = args[0] / f
                return torch_round(rows, s * rows.abs().amax(-1, keepdim=True) if each else s, quantization.format)

            module.register_forward_pre_hook(round_input)
    rows = []
    with torch.inference_mode():
        for encoding in encodings:
            ids = torch.from_numpy(encoding.input_ids.astype(np.int64))[None]
            types = {}
            if encoding.token_type_ids is not None and checkpoint.spec.embeddings.type_vocab_size > 1:
                types["token_type_ids"] = torch.from_numpy(encoding.token_type_ids.astype(np.int64))[None]
            rows.append(model(input_ids=ids, **types).last_hidden_state[0].mean(0).numpy())
    return rows


@pytest.mark.parametrize(
    "form", [{}, {"smooth": True}, {"smooth": True, "per_token": True}], ids=lambda form: "-".join(form) or "plain"
)
@pytest.mark.parametrize("number_format", ["fp8", "int8"])
@pytest.mark.parametrize("name", MODULES)
def test_the_graph_computes_what_the_rounded_hf_model_computes(
    tmp_path: Path, name: str, number_format: Format, form: dict[str, bool]
) -> None:
    """ONNX Runtime emulates it, which also tests the emulation. The control: the unrounded model is at least four times
    farther away (a value between two numbers may go to either)."""
    case = case_named(name)
    checkpoint = read_case(case, tmp_path, pooling="mean")
    encodings = encodings_of(case, LENGTHS, checkpoint.spec.embeddings.vocab_size)
    quantization = quantization_of(checkpoint.spec, number_format, **form)
    limits = Limits(256, 16, checkpoint.max_seq_len)
    with emulated_engine(checkpoint.spec, checkpoint.weights().read, quantization, limits, tmp_path) as engine:
        actual = np.stack(list(engine.run(PackedBatch.from_encodings(encodings))["embedding"]))
    expected, exact = (np.stack(hf_states(checkpoint, name, encodings, it)) for it in (quantization, None))
    away = np.abs(exact - expected).mean()
    assert away > 1e-4
    assert np.abs(actual - expected).mean() < 0.25 * away


def rtx_graph(checkpoint: Checkpoint, folder: Path, quantization: Quantization) -> Path:
    types = GraphTypes(DType.BF16, DType.BF16, quantization)
    core = AttentionCore.TRT_ATTENTION
    return write_graph(checkpoint.spec, checkpoint.weights().read, folder, types, core, checkpoint.max_seq_len)


@needs_rtx
@pytest.mark.parametrize("case", by_tier(*map(case_named, IN_FIRST_TIER)))
def test_every_model_and_head_compiles_in_fp8(trt: ModuleType, tmp_path: Path, case: Case) -> None:
    """``compiled`` fails for a line of severity ERROR in the log."""
    checkpoint = read_case(case, tmp_path)
    quantization = quantization_of(checkpoint.spec, "fp8")
    path = rtx_graph(checkpoint, tmp_path, quantization)
    assert compiled(trt, path, lowerings(checkpoint.spec, AttentionCore.TRT_ATTENTION), checkpoint.max_seq_len)


@needs_rtx
def test_smoothed_layers_and_rounded_outputs_compile(trt: ModuleType, tmp_path: Path) -> None:
    checkpoint = read_case(case_named("LlamaModel"), tmp_path)
    smooth = quantization_of(checkpoint.spec, "fp8", smooth=True)
    layers = {
        name: LayerQuantization(it.input_amax, it.smoothing, 5.0 if name.endswith("qkv") else None)
        for name, it in smooth.layers.items()
    }
    path = rtx_graph(checkpoint, tmp_path, Quantization("fp8", layers))
    assert compiled(trt, path, lowerings(checkpoint.spec, AttentionCore.TRT_ATTENTION), checkpoint.max_seq_len)


def test_layers_that_are_not_named_stay_as_they_are(tmp_path: Path) -> None:
    import onnx

    spec = with_experts(tiny_spec())
    only = linear_layers(spec)[0].name
    quantization = Quantization("fp8", {only: LayerQuantization(3.0)})
    types = GraphTypes(DType.FP32, DType.FP32, quantization)
    path = write_graph(spec, random_weights(spec), tmp_path, types, AttentionCore.TRT_ATTENTION, 40)
    nodes = onnx.load(path, load_external_data=False).graph.node
    assert sum(node.op_type == "QuantizeLinear" for node in nodes) == 1
    assert [node.name for node in nodes if node.op_type == "DequantizeLinear" and "weight" in node.name] == [
        f"{only}.weight.dequantized"
    ]


def test_layers_that_share_an_input_share_its_rounded_form(tmp_path: Path) -> None:
    import onnx

    checkpoint = read_case(case_named("LlamaModel"), tmp_path)
    path = rtx_graph(checkpoint, tmp_path, quantization_of(checkpoint.spec, "fp8"))
    nodes = onnx.load(path, load_external_data=False).graph.node
    layers = linear_layers(checkpoint.spec)
    assert (
        sum(node.op_type == "QuantizeLinear" for node in nodes) == len({layer.group for layer in layers}) < len(layers)
    )
