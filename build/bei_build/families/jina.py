"""JinaBERT v2 (Günther et al. 2023, arXiv:2310.19923): BERT with ALiBi (arXiv:2108.12409) and a gated MLP.

Its classes are the authors' own code, under BERT's model type; transformers has none. Two models have the same names:
jinaai/jina-bert-implementation, and for jina-embeddings-v2-base-code jinaai/jina-bert-v2-qk-post-norm, which also
normalizes queries and keys and adds the layer's input to the attention's twice (read from text-embeddings-inference's
jina_code.rs, which implements it).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bei.errors import CheckpointError
from bei_build.families.base import Family, classifier, embedder, require
from bei_build.families.bert import WEIGHTS
from bei_build.spec.model_spec import ModelSpec
from bei_build.spec.parts import Activation, AttentionSpec, EmbeddingsSpec, LayerSpec, MLPSpec, NormSpec

_FEED_FORWARDS: dict[str, Activation] = {"geglu": "gelu", "reglu": "relu"}


def _spec_from_config(config: Any, architecture: str) -> ModelSpec:
    require(config, "position_embedding_type", "alibi")
    require(config, "is_decoder", False)
    kind = getattr(config, "feed_forward_type", None)
    if kind not in _FEED_FORWARDS:
        raise CheckpointError(
            f"config.json has feed_forward_type {kind!r}; bei's JinaBERT supports only {' or '.join(_FEED_FORWARDS)}."
        )
    norm = NormSpec(config.layer_norm_eps)
    num_heads, head_dim = config.num_attention_heads, config.hidden_size // config.num_attention_heads
    layer = LayerSpec(
        attention=AttentionSpec(num_heads, head_dim, num_kv_heads=num_heads, scale=head_dim**-0.5, alibi=True),
        mlp=MLPSpec(config.intermediate_size, _FEED_FORWARDS[kind], gated=True, bias=False),
        norm=norm,
    )
    return ModelSpec(
        family="jina_bert",
        architecture=architecture,
        hidden_size=config.hidden_size,
        embeddings=EmbeddingsSpec(config.vocab_size, type_vocab_size=config.type_vocab_size, norm=norm),
        layers=(layer,) * config.num_hidden_layers,
    )


def _code_spec_from_config(config: Any, architecture: str) -> ModelSpec:
    spec = _spec_from_config(config, architecture)
    norm = NormSpec(config.layer_norm_eps)
    layers = tuple(
        replace(layer.with_attention(qk_norm=norm, qk_norm_joint=True), second_attention_norm=True)
        for layer in spec.layers
    )
    return replace(spec, layers=layers)


def _variant(config: Mapping[str, Any]) -> Family | None:
    """The family for ``config``: the two models differ in tensors, but their configs only in the location of the
    code."""
    auto_map = config.get("auto_map")
    places = auto_map.values() if isinstance(auto_map, dict) else ()
    return CODE_FAMILY if any(_CODE in str(place) for place in (config.get("_name_or_path"), *places)) else None


_CODE = "jina-bert-v2-qk-post-norm"
_WEIGHTS = {name: stored for name, stored in WEIGHTS.items() if ".mlp" not in name} | {"pooler": "pooler.dense"}

FAMILY = Family(
    model_type="bert",
    architectures={
        "JinaBertModel": embedder,
        # The published embedders name the class with the language model's head, which their files do not hold.
        "JinaBertForMaskedLM": embedder,
        "JinaBertForSequenceClassification": classifier("pooler", "classifier", activation="tanh"),
    },
    prefix="bert.",
    weights={
        **_WEIGHTS,
        "layers.{i}.mlp.gate": "encoder.layer.{i}.mlp.gated_layers",
        "layers.{i}.mlp.up": "encoder.layer.{i}.mlp.gated_layers",
        "layers.{i}.mlp.down": "encoder.layer.{i}.mlp.wo",
        "layers.{i}.mlp_norm": "encoder.layer.{i}.mlp.layernorm",
    },
    unused=("pooler.", "cls.", "embeddings.position_ids"),
    spec_from_config=_spec_from_config,
    reference_class=None,
    remote_classes=("JinaBert",),
    variant=_variant,
)

CODE_FAMILY = replace(
    FAMILY,
    weights={
        **_WEIGHTS,
        "layers.{i}.attention.query_norm": "encoder.layer.{i}.attention.self.layer_norm_q",
        "layers.{i}.attention.key_norm": "encoder.layer.{i}.attention.self.layer_norm_k",
        "layers.{i}.second_attention_norm": "encoder.layer.{i}.layer_norm_1",
        "layers.{i}.mlp.up": "encoder.layer.{i}.mlp.up_gated_layer",
        "layers.{i}.mlp.gate": "encoder.layer.{i}.mlp.up_gated_layer",
        "layers.{i}.mlp.down": "encoder.layer.{i}.mlp.down_layer",
        "layers.{i}.mlp_norm": "encoder.layer.{i}.layer_norm_2",
    },
    spec_from_config=_code_spec_from_config,
)
