"""Target ``trtllm``, experimental: a checkpoint that TensorRT-LLM's PyTorch backend loads in its encode-only mode.

TensorRT-LLM brings the kernels and its own classes of models, which are few. A model is accepted only if bei's spec of
it equals, field by field, the spec of the class with that name; anything else is refused by name. config.json is
written from the spec, so it holds nothing that bei has not read.

Building needs neither TensorRT-LLM nor a GPU. Neither has been run with the result: it rests on TensorRT-LLM's
documents and sources (docs/decisions.md), and tests load it into a stand-in.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bei.artifact.certificate.thresholds import PRECISIONS_OF_TARGETS
from bei.artifact.manifest import EngineRequirements
from bei.core import Limits
from bei.engine.nvidia import current_gpu, load_cuda
from bei.errors import BeiError, CompileError, UnsupportedArchitectureError
from bei.version import __version__
from bei_build.families import bert, qwen
from bei_build.families.base import Family
from bei_build.families.rope import plain_rope
from bei_build.spec.model_spec import HeadSpec, ModelSpec
from bei_build.spec.parts import AttentionSpec, DenseSpec, EmbeddingsSpec, LayerSpec, MLPSpec, NormSpec, RopeSpec
from bei_build.spec.precision import check_precision
from bei_build.targets.base import Numerics, Say
from bei_build.targets.trtllm_checkpoint import Tensor, write_checkpoint
from bei_build.weights.model_weights import ModelWeights

# The oldest version whose documents have everything used here: LLM.encode, encoder CUDA graphs, embeddings.
VERSIONS = ">=1.3.0rc27"

_PRECISIONS = PRECISIONS_OF_TARGETS["trtllm"]
_NUMBERS = re.compile(r"\d+")
_TYPE_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp8": "bfloat16"}
_STORED = {"bf16": "BF16", "fp16": "F16", "fp8": "BF16"}

# Matrices of one layer that TensorRT-LLM joins; in FP8 they share one scale.
_JOINED = (("attention.query", "attention.key", "attention.value"), ("mlp.gate", "mlp.up"))
_QUANTIZED = (*_JOINED[0], *_JOINED[1], "attention.output", "mlp.down")
# Modules that stay 16-bit, as ModelOpt's patterns. A classifier's modules are not among its defaults.
_UNQUANTIZED = ("lm_head", "model.embed_tokens", "score*", "pooler*", "classifier*")

# Fields of a spec without effect on the mathematics here: names, and the token left out of means (no mean is used).
_NAMES_ONLY = ("ModelSpec.family", "ModelSpec.architecture", "ModelSpec.unpooled_id", "ModelSpec.longest")


@dataclass(frozen=True)
class ModelClass:
    """A class of TensorRT-LLM, by its ``name`` there.

    ``model`` gives the spec that it computes, with another spec's sizes; ``config`` its config.json. ``unit_vectors``:
    its vectors have unit length.
    """

    name: str
    family: Family
    precisions: tuple[str, ...]
    model: Callable[[ModelSpec], ModelSpec]
    config: Callable[[ModelSpec, Limits], dict[str, Any]]
    unit_vectors: bool = False


class TRTLLMCompiler:
    """Writes checkpoints for TensorRT-LLM. Experimental: TensorRT-LLM itself has loaded none of them."""

    precisions: tuple[str, ...] = _PRECISIONS
    calibrated: tuple[str, ...] = ()  # TensorRT-LLM quantizes inputs dynamically
    shows_layers = False  # the result is a checkpoint
    matrix_bits = 8
    longest_by_default = 8192

    def resolve_precision(self, precision: str) -> str:
        """``auto`` is bf16. ``fp8`` is for decoders, ``fp16`` for BERT, whose code computes in no other type."""
        if precision == "auto":
            return "bf16"
        check_precision("trtllm", precision, _PRECISIONS)
        return precision

    def default_limits(self, max_seq_len: int) -> Limits:
        """Large batches, which a GPU needs to be busy. Not measured."""
        return Limits(max_num_tokens=max(16384, max_seq_len), max_batch_size=256, max_seq_len=max_seq_len)

    def check_able(self) -> None:
        """Nothing is required: only files are written."""

    def cannot_run(self) -> str | None:
        """The missing part: TensorRT-LLM, or the GPU."""
        if importlib.util.find_spec("tensorrt_llm") is None:
            return "TensorRT-LLM is not installed here"
        try:
            current_gpu(load_cuda("Running engines of target trtllm", "trtllm"))
        except BeiError as error:
            return f"this machine has no NVIDIA GPU that CUDA can use ({str(error).rstrip('.')})"
        return None

    def machine(self) -> list[str]:
        """Empty: the checkpoint does not depend on the machine."""
        return []

    def compile(
        self, spec: ModelSpec, weights: ModelWeights, numerics: Numerics, limits: Limits, folder: Path, say: Say
    ) -> EngineRequirements:
        """Write config.json and safetensors into ``folder``, and for fp8 hf_quant_config.json.

        Raises UnsupportedArchitectureError for a model that no class of TensorRT-LLM computes, CompileError.
        """
        if spec.adapters:
            raise CompileError(
                "TensorRT-LLM's classes compute no adapters beside the weights: merge one with --adapter, or build for "
                "another target."
            )
        model_class, precision = class_of(spec), numerics.precision
        if precision not in model_class.precisions:
            others = " or ".join(model_class.precisions)
            raise CompileError(
                f"TensorRT-LLM's {model_class.name} computes in {others}, not in {precision}{_mismatch(model_class)}: "
                f"build with --precision {others}."
            )
        config = {**model_class.config(spec, limits), "torch_dtype": _TYPE_NAMES[precision]}
        tensors = [_tensor(model_class, name, shape, precision) for name, shape in spec.weights()]
        producer = {"name": "bei", "version": __version__}
        say(f"{len(tensors)} tensors for {model_class.name}")
        try:
            write_checkpoint(folder, config, tensors, weights.read, _STORED[precision], _UNQUANTIZED, producer)
        except ValueError as error:
            raise CompileError(f"The checkpoint cannot be written in {precision}: {error}.") from error
        return EngineRequirements(
            compiler="TensorRT-LLM (experimental)",
            compiler_version=VERSIONS,
            device="an NVIDIA GPU",
            capabilities=[],
            unit_vectors=model_class.unit_vectors,
        )


def class_of(spec: ModelSpec) -> ModelClass:
    """The class of TensorRT-LLM that computes ``spec``. Raises UnsupportedArchitectureError."""
    model_class = CLASSES.get((spec.family, spec.architecture))
    if model_class is None:
        known = ", ".join(f"{architecture} ({it.name})" for (_, architecture), it in CLASSES.items())
        raise UnsupportedArchitectureError(
            f"TensorRT-LLM has no class that bei knows to compute {spec.architecture} of model_type {spec.family!r} as "
            f"its own does. It has one for: {known}. Build with --target cpu or tensorrt."
        )
    difference = _difference(spec, model_class.model(spec))
    if difference:
        raise UnsupportedArchitectureError(
            f"TensorRT-LLM's {model_class.name} computes something else than this checkpoint: {difference}. "
            "Build with --target cpu or tensorrt."
        )
    return model_class


def _mismatch(model_class: ModelClass) -> str:
    return " (it casts to float16 whatever is stored, and has no FP8)" if model_class.family is bert.FAMILY else ""


def _difference(ours: Any, theirs: Any, path: str = "") -> str | None:
    """The first difference of two specs, in words."""
    if _are_parts(ours) and _are_parts(theirs) and len(ours) == len(theirs):
        parts = (_difference(a, b, f"{path}[{index}]") for index, (a, b) in enumerate(zip(ours, theirs, strict=True)))
        return next(filter(None, parts), None)
    if dataclasses.is_dataclass(ours) and type(ours) is type(theirs):
        kind = type(ours).__name__
        names = [field.name for field in dataclasses.fields(ours) if f"{kind}.{field.name}" not in _NAMES_ONLY]
        found = (_difference(getattr(ours, n), getattr(theirs, n), f"{path}.{n}" if path else n) for n in names)
        return next(filter(None, found), None)
    if ours == theirs:
        return None
    if isinstance(ours, tuple) and any(isinstance(part, float) for part in ours):
        return f"numbers of {path} differ"
    return f"{path} is {_describe(ours)} in the checkpoint, and {_describe(theirs)} in that class"


def _are_parts(value: Any) -> bool:
    return isinstance(value, tuple) and all(dataclasses.is_dataclass(part) for part in value)


def _describe(value: Any) -> str:
    """A spec's value for people; long ones are described."""
    if isinstance(value, tuple):
        return ", ".join(_describe(part) for part in value) or "none"
    if isinstance(value, HeadSpec):
        return value.output
    if isinstance(value, DenseSpec):
        return f"a linear layer {value.in_features} to {value.out_features} ({value.name})"
    return type(value).__name__ if dataclasses.is_dataclass(value) else str(value)


def _tensor(model_class: ModelClass, name: str, shape: tuple[int, ...], precision: str) -> Tensor:
    found = re.fullmatch(r"(layers\.\d+)\.(.+)\.weight", name)
    group = None
    if precision == "fp8" and found and found[2] in _QUANTIZED:
        joined = next((parts for parts in _JOINED if found[2] in parts), (found[2],))
        group = tuple(f"{found[1]}.{part}.weight" for part in joined)
    return Tensor(name, _stored_name(model_class.family, name), shape, group)


def _stored_name(family: Family, name: str) -> str:
    """The name of ``name`` in transformers' class for the task, and in TensorRT-LLM's."""
    module, kind = name.rsplit(".", 1)
    index = _NUMBERS.search(module) if module.startswith("layers.") else None
    stored = family.weights[module.replace(index[0], "{i}", 1) if index else module]
    assert isinstance(stored, str)  # only heads that are refused have alternatives
    prefix = "" if module == "classifier" or module.startswith("reward.") else family.prefix
    return f"{prefix}{stored.replace('{i}', index[0] if index else '')}.{kind}"


def _bert(spec: ModelSpec) -> ModelSpec:
    """Post-norm layers, bidirectional attention, the exact GELU; first token, linear layer, tanh, linear layer."""
    norm, num_heads = NormSpec(_first(spec).norm.eps), spec.attentions[0].num_heads
    head_dim = spec.hidden_size // num_heads
    attention = AttentionSpec(num_heads, head_dim, num_kv_heads=num_heads, scale=head_dim**-0.5)
    embeddings = EmbeddingsSpec(
        spec.embeddings.vocab_size,
        max_positions=spec.embeddings.max_positions,
        type_vocab_size=max(1, spec.embeddings.type_vocab_size),
        norm=norm,
    )
    layer = LayerSpec(attention, MLPSpec(_first(spec).mlp.intermediate_size, "gelu"), norm)
    width = spec.hidden_size
    dense = DenseSpec("pooler", width, width, activation="tanh")
    head = HeadSpec("logits", ("cls",), layers=(dense, DenseSpec("classifier", width, _num_labels(spec))))
    return _model(spec, embeddings, layer, None, head)


def _bert_config(spec: ModelSpec, limits: Limits) -> dict[str, Any]:
    return {
        **_sizes(spec),
        "architectures": ["BertForSequenceClassification"],
        "model_type": "bert",
        "hidden_act": "gelu",
        "layer_norm_eps": _first(spec).norm.eps,
        "max_position_embeddings": spec.embeddings.max_positions,
        "num_labels": _num_labels(spec),
        "type_vocab_size": spec.embeddings.type_vocab_size,
    }


def _qwen3(spec: ModelSpec) -> ModelSpec:
    """The last token's state. Heads may have any width; query, key, value and output all have biases, or none has."""
    attention = replace(
        _causal(spec, spec.attentions[0].head_dim),
        bias=spec.attentions[0].bias,
        output_bias=spec.attentions[0].bias,
        qk_norm=_rms(spec),
    )
    return _decoder(spec, attention, HeadSpec("embedding", ("last",)))


def _qwen3_config(spec: ModelSpec, limits: Limits) -> dict[str, Any]:
    attention = spec.attentions[0]
    return {
        **_decoder_config(spec, limits),
        "architectures": ["Qwen3ForTextEmbedding"],
        "model_type": "qwen3",
        "attention_bias": attention.bias,
        "head_dim": attention.head_dim,
        "tie_word_embeddings": True,  # no file has a matrix for the language model's scores
    }


def _qwen2_reward(spec: ModelSpec) -> ModelSpec:
    """Two linear layers on the last token's state, one score."""
    width = spec.hidden_size
    attention = replace(_causal(spec, width // spec.attentions[0].num_heads), bias=True, output_bias=False)
    layers = (DenseSpec("reward.0", width, width, activation="relu"), DenseSpec("reward.2", width, 1))
    return _decoder(spec, attention, HeadSpec("logits", ("last",), layers=layers))


def _qwen2_reward_config(spec: ModelSpec, limits: Limits) -> dict[str, Any]:
    return {
        **_decoder_config(spec, limits),
        "architectures": ["Qwen2ForRewardModel"],
        "model_type": "qwen2",
        "num_labels": 1,
        "pad_token_id": None,
        "tie_word_embeddings": True,
    }


def _decoder_config(spec: ModelSpec, limits: Limits) -> dict[str, Any]:
    first = _first(spec)
    assert spec.attentions[0].rope is not None  # the class has one
    return {
        **_sizes(spec),
        "hidden_act": "silu",
        "max_position_embeddings": limits.max_seq_len,  # the engine's limit
        "num_key_value_heads": spec.attentions[0].num_kv_heads,
        "rms_norm_eps": first.norm.eps,
        # Not today's rope_parameters: versions of transformers that do not know it would use their own default
        # rotation.
        "rope_theta": _theta(spec.attentions[0].rope),
        "use_cache": False,
        "use_sliding_window": False,
    }


def _sizes(spec: ModelSpec) -> dict[str, Any]:
    first = _first(spec)
    return {
        "hidden_size": spec.hidden_size,
        "intermediate_size": first.mlp.intermediate_size,
        "num_attention_heads": spec.attentions[0].num_heads,
        "num_hidden_layers": len(spec.layers),
        "vocab_size": spec.embeddings.vocab_size,
    }


def _decoder(spec: ModelSpec, attention: AttentionSpec, head: HeadSpec) -> ModelSpec:
    mlp = MLPSpec(_first(spec).mlp.intermediate_size, "silu", gated=True, bias=False, down_bias=False)
    layer = LayerSpec(attention, mlp, _rms(spec), "pre")
    return _model(spec, EmbeddingsSpec(spec.embeddings.vocab_size), layer, _rms(spec), head)


def _causal(spec: ModelSpec, head_dim: int) -> AttentionSpec:
    own = spec.attentions[0]
    return AttentionSpec(
        own.num_heads,
        head_dim,
        num_kv_heads=own.num_kv_heads,
        scale=head_dim**-0.5,
        causal=True,
        rope=_plain(own.rope, head_dim),
    )


def _model(
    spec: ModelSpec, embeddings: EmbeddingsSpec, layer: LayerSpec, final_norm: NormSpec | None, head: HeadSpec
) -> ModelSpec:
    return ModelSpec(
        family=spec.family,
        architecture=spec.architecture,
        hidden_size=spec.hidden_size,
        embeddings=embeddings,
        layers=(layer,) * len(spec.layers),
        final_norm=final_norm,
        heads=(head,),
    )


def _first(spec: ModelSpec) -> LayerSpec:
    return spec.layers[0]


def _rms(spec: ModelSpec) -> NormSpec:
    return NormSpec(_first(spec).norm.eps, kind="rms", bias=False)


def _num_labels(spec: ModelSpec) -> int:
    return next(iter(spec.dimensions.values()))


def _theta(rope: RopeSpec) -> float:
    """The base of plain frequencies base ** (-2i / dim), as an integer where it is one up to float32's rounding."""
    last = 2 * (len(rope.inv_freq) - 1) / rope.rotary_dim  # exponent of the lowest frequency
    theta = float(rope.inv_freq[-1]) ** (-1 / last) if last else 10000.0
    return float(round(theta)) if abs(theta - round(theta)) < 1e-5 * theta else theta


def _plain(rope: RopeSpec | None, head_dim: int) -> RopeSpec:
    """A rotation of whole heads without scaling: ``rope`` itself if it is one. TensorRT-LLM computes scaled rotations
    by formulas of its own."""
    plain = plain_rope(_theta(rope) if rope else 10000.0, head_dim)
    if rope and len(rope.inv_freq) == len(plain.inv_freq) and np.allclose(rope.inv_freq, plain.inv_freq, 1e-5, 0):
        return replace(plain, inv_freq=rope.inv_freq)
    return plain


_QWEN3 = ModelClass("Qwen3ForTextEmbedding", qwen.QWEN3_FAMILY, ("bf16", "fp8"), _qwen3, _qwen3_config, True)

# By the checkpoint's model type and architecture. TensorRT-LLM's Qwen2ForProcessRewardModel scores every token; no
# family of bei reads its checkpoints.
CLASSES: dict[tuple[str, str], ModelClass] = {
    ("qwen3", "Qwen3ForCausalLM"): _QWEN3,
    ("qwen3", "Qwen3Model"): _QWEN3,
    ("bert", "BertForSequenceClassification"): ModelClass(
        "BertForSequenceClassification", bert.FAMILY, ("fp16",), _bert, _bert_config
    ),
    ("qwen2", "Qwen2ForRewardModel"): ModelClass(
        "Qwen2ForRewardModel", qwen.QWEN2_FAMILY, ("bf16", "fp8"), _qwen2_reward, _qwen2_reward_config
    ),
}
