"""EuroBERT (Boizard et al. 2025, arXiv:2503.05500): Llama's layers with bidirectional attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bei.errors import CheckpointError
from bei_build.families.base import Family, embedder, token_classifier
from bei_build.families.decoder import WEIGHTS, decoder_spec
from bei_build.spec.model_spec import HeadSpec, ModelSpec
from bei_build.spec.parts import ActivationSpec, DenseSpec, Pooling

# Of its class, and ours.
_POOLINGS: Mapping[str, Pooling] = {"bos": "cls", "mean": "mean"}


def _spec_from_config(config: Any, architecture: str) -> ModelSpec:
    bias = config.attention_bias
    return decoder_spec(config, architecture, bias=bias, output_bias=bias, mlp_bias=config.mlp_bias, causal=False)


def _classifier(config: Any) -> tuple[HeadSpec, ...]:
    """Two linear layers on the pooled state, or on every token before their mean (``late``)."""
    width = config.hidden_size
    layers = (DenseSpec("dense", width, width, activation="gelu"), DenseSpec("classifier", width, config.num_labels))
    pooling = config.classifier_pooling
    if pooling == "late":
        return (HeadSpec("logits", ("mean",), token_layers=layers),)
    if pooling not in _POOLINGS:
        raise CheckpointError(
            f"config.json has classifier_pooling = {pooling!r}; EuroBERT's class has {', '.join(_POOLINGS)} and late: "
            "correct it."
        )
    return (HeadSpec("logits", (_POOLINGS[pooling],), layers=layers),)


def _masked_lm(config: Any) -> tuple[HeadSpec, ...]:
    """Like ``base.masked_lm``, for scores from a single linear layer."""
    layer = DenseSpec("mlm.decoder", config.hidden_size, config.vocab_size, bias=config.mlp_bias)
    return (HeadSpec("sparse", ("max",), token_layers=(layer,), layers=(ActivationSpec("log1p_relu"),)),)


FAMILY = Family(
    model_type="eurobert",
    architectures={
        "EuroBertModel": embedder,
        "EuroBertForMaskedLM": _masked_lm,
        "EuroBertForSequenceClassification": _classifier,
        "EuroBertForTokenClassification": token_classifier(),
    },
    prefix="model.",
    weights={
        **WEIGHTS,
        "dense": "dense",
        "classifier": "classifier",
        "mlm.decoder.weight": ("lm_head.weight", "embed_tokens.weight"),
        "mlm.decoder.bias": "lm_head.bias",
    },
    unused=("lm_head.",),
    spec_from_config=_spec_from_config,
    remote_classes=("EuroBert",),  # its original remote code, which became transformers' class
)
