"""JinaBERT v2 (Günther et al. 2023, arXiv:2310.19923): BERT with ALiBi (arXiv:2108.12409) and a gated MLP.

Its class came with the authors' own code, under BERT's model type; transformers has none.
"""

from __future__ import annotations

from typing import Any

from bei.errors import CheckpointError
from bei_build.families.base import Family, embedder, require
from bei_build.families.bert import WEIGHTS
from bei_build.spec import Activation, AttentionSpec, EmbeddingsSpec, LayerSpec, MLPSpec, ModelSpec, NormSpec

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


FAMILY = Family(
    model_type="bert",
    # The published embedders name the class with the language model's head, which their files do not hold.
    architectures={"JinaBertModel": embedder, "JinaBertForMaskedLM": embedder},
    prefix="bert.",
    weights={
        **{name: stored for name, stored in WEIGHTS.items() if ".mlp" not in name and name != "classifier"},
        "layers.{i}.mlp.gate": "encoder.layer.{i}.mlp.gated_layers",
        "layers.{i}.mlp.up": "encoder.layer.{i}.mlp.gated_layers",
        "layers.{i}.mlp.down": "encoder.layer.{i}.mlp.wo",
        "layers.{i}.mlp_norm": "encoder.layer.{i}.mlp.layernorm",
    },
    unused=("pooler.", "cls.", "embeddings.position_ids"),
    spec_from_config=_spec_from_config,
    in_transformers=False,
)
