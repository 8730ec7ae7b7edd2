"""ESM-1b and ESM-2, language models of proteins (Rives et al. 2021; Lin et al. 2023): pre-norm RoBERTa.

Positions are learned or rotary. Training dropped tokens by masking them: embeddings of mask tokens are zeros, and the
others are scaled up accordingly.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from bei_build.families import bert
from bei_build.families.base import Family, padding_id, require
from bei_build.families.rope import plain_rope
from bei_build.spec.model_spec import ModelSpec
from bei_build.spec.parts import MaskDropoutSpec

# Fixed in transformers: training chose 15 % of the tokens and masked 80 % of those.
_MASKED_SHARE = 0.15 * 0.8


def _spec_from_config(config: Any, architecture: str) -> ModelSpec:
    require(config, "position_embedding_type", "absolute", "rotary")
    require(config, "is_folding_model", False, None)
    is_rotary = config.position_embedding_type == "rotary"
    uncounted_id = None if is_rotary else padding_id(config)
    spec = bert.absolute_spec(config, architecture, uncounted_id, activation="gelu")  # the class ignores config.json's
    spec = bert.pre_norm(spec, embeddings_norm=bool(config.emb_layer_norm_before))
    # A config without mask token drops none.
    dropped = MaskDropoutSpec(config.mask_token_id, _MASKED_SHARE) if config.token_dropout else None
    embeddings = replace(spec.embeddings, mask_dropout=dropped)
    (layer, *_) = spec.layers
    if is_rotary:
        embeddings = replace(embeddings, max_positions=0)
        layer = layer.with_attention(rope=plain_rope(config.rope_theta, spec.attentions[0].head_dim))
    return replace(spec, embeddings=embeddings, layers=(layer,) * len(spec.layers))


def _frequencies(spec: ModelSpec, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """The frequencies stored beside rotary positions, [head_dim / 2]; with learned ones they are unused."""
    rope = spec.attentions[0].rope
    return np.array(rope.inv_freq if rope else (), np.float32)


FAMILY = Family(
    model_type="esm",
    architectures=bert.roberta_architectures("Esm"),
    prefix="esm.",
    weights={
        **bert.WEIGHTS,
        "embeddings.norm": "embeddings.layer_norm",
        "layers.{i}.attention_norm": "encoder.layer.{i}.attention.LayerNorm",
        "layers.{i}.mlp_norm": "encoder.layer.{i}.LayerNorm",
        "final_norm": "encoder.emb_layer_norm_after",
        **bert.ROBERTA_HEAD_WEIGHTS,
        "mlm.decoder.bias": "lm_head.bias",
    },
    unused=("pooler.", "lm_head.", "contact_head.", "embeddings.position_"),
    spec_from_config=_spec_from_config,
    # Checkpoints before transformers 5 have one in each layer.
    computed={"rotary_embeddings.inv_freq": _frequencies},
)
