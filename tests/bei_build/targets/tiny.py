"""Tiny models of every family, with random weights, and their graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from bei_build.families import FAMILIES
from bei_build.graph.attention import AttentionCore
from bei_build.graph.transformer import write_graph
from bei_build.graph.writer import DType, FloatArray, GraphTypes
from bei_build.spec import DenseSpec, ModelSpec, NormalizeSpec, Pooling

HIDDEN, VOCABULARY, MAX_SEQ_LEN = 64, 100, 64
HEADS = {"bert": 2, "roberta": 1, "xlm-roberta": 2, "distilbert": 1}  # of 32 or 64
TYPES = {"roberta": 1, "xlm-roberta": 1}


def tiny_spec(family_name: str = "bert", pooling: tuple[Pooling, ...] = ("mean",)) -> ModelSpec:
    """Two layers, from the family's own reading of its HF config."""
    from transformers import AutoConfig

    family = next(family for family in FAMILIES if family.name == family_name)
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
    return replace(family.spec_from_config(config, family.architectures[0]), pooling=pooling)


def random_weights(spec: ModelSpec) -> Callable[[str], FloatArray]:
    rng = np.random.default_rng(0)
    return {name: (0.1 * rng.standard_normal(shape)).astype(np.float32) for name, shape in spec.weights()}.__getitem__


def graph_of(
    spec: ModelSpec, folder: Path, dtype: DType = DType.FP16, core: AttentionCore = AttentionCore.TRT_ATTENTION
) -> Path:
    folder.mkdir(exist_ok=True)
    return write_graph(spec, random_weights(spec), folder, GraphTypes(dtype, dtype), core)


def with_tail(spec: ModelSpec) -> ModelSpec:
    width = HIDDEN * len(spec.pooling)
    return replace(spec, tail=(DenseSpec(width, 48, True, "tanh"), NormalizeSpec(), DenseSpec(48, 32, False, "gelu")))
