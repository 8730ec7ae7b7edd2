"""Tiny models and their graphs: the zoo's checkpoints, and specs with random weights, which need no checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bei_build.checkpoint.checkpoint import Checkpoint
from bei_build.checkpoint.heads import HeadChoice
from bei_build.checkpoint.locate import locate
from bei_build.checkpoint.read import read_checkpoint
from bei_build.families.table import FAMILIES
from bei_build.onnx_graph.attention import AttentionCore
from bei_build.onnx_graph.transformer import write_graph
from bei_build.onnx_graph.writer import GraphTypes
from bei_build.spec.dtypes import DType, FloatArray
from bei_build.spec.model_spec import HeadSpec, ModelSpec
from bei_build.spec.parts import (
    ActivationSpec,
    DenseSpec,
    EmbeddingsSpec,
    EntrySpec,
    ExpertsSpec,
    LatentAttentionSpec,
    NormalizeSpec,
    NormSpec,
    Pooling,
)
from tests.support.zoo import CASES, Case, save_case

HIDDEN, VOCABULARY, MAX_SEQ_LEN = 64, 100, 64
HEADS = {"bert": 2, "roberta": 1, "xlm-roberta": 2, "distilbert": 1}  # heads of width 32 or 64
TYPES = {"roberta": 1, "xlm-roberta": 1}
BY_POSITION: dict[str, dict[str, Any]] = {  # no family of the zoo has ALiBi
    "alibi": {"alibi": True},
    "alibi, causal": {"alibi": True, "causal": True},
    "alibi, window": {"alibi": True, "window": 8},
    "causal, window": {"causal": True, "window": 8},
    "alibi, norms of query and key": {"alibi": True, "qk_norm": NormSpec(1e-12), "qk_norm_joint": True},
}
# Lowering of attention in models whose last tokens of a sequence may not be keys.
PARTIAL_KEYS: dict[str, dict[str, Any]] = {
    "padded": {},
    "causal": {"causal": True},
    "boolean": {"window": 8},
    "additive": {"alibi": True, "window": 8},
    "primitive": {"softcap": 5.0, "window": 8},
}


def tiny_spec(family_name: str = "bert", pooling: tuple[Pooling, ...] = ("mean",), **attention: Any) -> ModelSpec:
    """Two layers, from the family's spec of its HF config; ``attention`` changes their attention."""
    from transformers import AutoConfig

    family = next(family for family in FAMILIES if family.model_type == family_name)
    config = AutoConfig.for_model(
        family.model_type,
        vocab_size=VOCABULARY,
        max_position_embeddings=MAX_SEQ_LEN + 2,  # RoBERTa never uses the first two
        type_vocab_size=TYPES.get(family_name, 2),
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=HEADS[family_name],
        intermediate_size=128,
        hidden_dim=128,  # DistilBERT's word for it
    )
    spec = family.spec_from_config(config, next(iter(family.architectures)))
    layers = tuple(layer.with_attention(**attention) for layer in spec.layers)
    return replace(spec, layers=layers, heads=(HeadSpec("embedding", pooling),))


def latent_spec() -> ModelSpec:
    """A spec with NV-Embed's head, which no model of transformers has."""
    latent = LatentAttentionSpec(
        "latent", HIDDEN, 8, num_heads=2, head_dim=16, intermediate_size=128, norm=NormSpec(1e-5)
    )
    return replace(tiny_spec(), heads=(HeadSpec("embedding", ("mean",), token_layers=(latent,)),), pools_prompt=False)


def static_spec(unpooled_id: int | None) -> ModelSpec:
    """No layers: static embeddings."""
    return ModelSpec("static", "StaticModel", HIDDEN, EmbeddingsSpec(VOCABULARY), layers=(), unpooled_id=unpooled_id)


def random_weights(spec: ModelSpec) -> Callable[[str], FloatArray]:
    rng = np.random.default_rng(0)
    return {name: (0.1 * rng.standard_normal(shape)).astype(np.float32) for name, shape in spec.weights()}.__getitem__


def graph_of(
    spec: ModelSpec, folder: Path, dtype: DType = DType.FP16, core: AttentionCore = AttentionCore.TRT_ATTENTION
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return write_graph(spec, random_weights(spec), folder, GraphTypes(dtype, dtype), core, MAX_SEQ_LEN)


def with_entry(spec: ModelSpec) -> ModelSpec:
    """A norm and rows by token types in front of the second of two layers, as of Laya's head."""
    first, second = spec.layers
    return replace(spec, layers=(first, replace(second, entry=EntrySpec(NormSpec(1e-5), 2))))


def with_window(spec: ModelSpec) -> ModelSpec:
    """A window in the second of two layers, as in models that alternate."""
    first, second = spec.layers
    return replace(spec, layers=(first, second.with_attention(window=8)))


def with_tail(spec: ModelSpec) -> ModelSpec:
    (head,) = spec.heads
    wide, narrow = (
        DenseSpec("tail.0", spec.hidden_size * len(head.pooling), 48, True, "tanh"),
        DenseSpec("tail.1", 48, 32, False, "gelu"),
    )
    return replace(spec, heads=(replace(head, layers=(wide, NormalizeSpec(), narrow)),))


def with_heads_on_tokens(spec: ModelSpec) -> ModelSpec:
    """The outputs of BGE-M3, ColBERT's unit vectors and the sum of SPLADE's logarithms, all from one pass."""
    width = spec.hidden_size
    heads = (
        HeadSpec("embedding", ("cls",)),
        HeadSpec("token_weights", token_layers=(DenseSpec("weights", width, 1, activation="relu"),)),
        HeadSpec("token_embedding", token_layers=(DenseSpec("vectors", width, 16, bias=False), NormalizeSpec())),
        HeadSpec("sparse", ("sum",), (DenseSpec("words", width, VOCABULARY), ActivationSpec("log1p_relu"))),
    )
    return replace(spec, heads=heads)


def with_experts(spec: ModelSpec, *, normalized: bool = False) -> ModelSpec:
    """Experts in the second of two layers, and that layer's attention added twice."""
    dense, layer = spec.layers
    mlp = replace(layer.mlp, bias=False, experts=ExpertsSpec(8, 2, normalized))
    return replace(spec, layers=(dense, replace(layer, mlp=mlp, second_attention_norm=True)))


def case_named(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


def read_case(
    case: Case,
    folder: Path,
    *,
    pooling: Pooling | None = None,
    score_tokens: tuple[str, ...] = (),
    max_seq_len: int | None = None,
    **settings: Any,
) -> Checkpoint:
    """Save the zoo's ``case``, changed by ``settings``, and read it; an embedder with ``pooling`` if that is given."""
    checkpoint = save_case(folder / "checkpoint", replace(case, settings={**case.settings, **settings}))
    choice = HeadChoice(pooling=pooling if case.output == "embedding" else None, score_tokens=score_tokens)
    return read_checkpoint(locate(str(checkpoint)), choice, max_seq_len)


def graph_of_checkpoint(
    checkpoint: Checkpoint,
    folder: Path,
    dtype: DType = DType.FP16,
    core: AttentionCore = AttentionCore.TRT_ATTENTION,
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    types = GraphTypes(dtype, dtype)
    return write_graph(checkpoint.spec, checkpoint.weights().read, folder, types, core, checkpoint.max_seq_len)
