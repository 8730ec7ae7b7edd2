"""Settings of transformers' classes, small; ratios, biases, rotations and windows are those of the repositories."""

from __future__ import annotations

from typing import Any

from tests.hub_matrix import tokenizers
from tests.support.checkpoints import MAX_TOKENS

Settings = dict[str, Any]

ENCODER: Settings = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": MAX_TOKENS,
}
# RoBERTa counts positions from 2.
ROBERTA: Settings = {**ENCODER, "max_position_embeddings": MAX_TOKENS + 2, "pad_token_id": 1, "type_vocab_size": 1}
MPNET: Settings = {**ENCODER, "max_position_embeddings": MAX_TOKENS + 2}
DISTILBERT: Settings = {
    "dim": 32,
    "n_layers": 2,
    "n_heads": 4,
    "hidden_dim": 64,
    "max_position_embeddings": MAX_TOKENS,
}
ELECTRA: Settings = {**ENCODER, "embedding_size": 32}
ALBERT: Settings = {**ENCODER, "embedding_size": 16}
DEBERTA: Settings = {
    **ENCODER,
    "relative_attention": True,
    "position_buckets": 16,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "pos_att_type": ["p2c", "c2p"],
    "max_relative_positions": -1,
    "position_biased_input": False,
    "type_vocab_size": 0,
    "pooler_hidden_size": 32,
    "pooler_hidden_act": "gelu",
}
# No buckets, a projection of positions of its own.
DEBERTA_V1: Settings = {
    **ENCODER,
    "relative_attention": True,
    "pos_att_type": ["c2p", "p2c"],
    "max_relative_positions": -1,
    "position_biased_input": False,
    "type_vocab_size": 0,
    "pooler_hidden_size": 32,
    "pooler_hidden_act": "gelu",
}
T5: Settings = {
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
}
T5_V1_1: Settings = {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
BART: Settings = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": MAX_TOKENS,
    "pad_token_id": 1,
    "eos_token_id": 2,
}
MODERN: Settings = {
    **ENCODER,
    "num_hidden_layers": 4,
    "local_attention": 16,
    "global_attn_every_n_layers": 3,
    "pad_token_id": 1,
    **dict.fromkeys(("bos_token_id", "cls_token_id"), 0),
    **dict.fromkeys(("eos_token_id", "sep_token_id"), 2),
}

_DECODER: Settings = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "max_position_embeddings": MAX_TOKENS,
    "pad_token_id": 1,
    "tie_word_embeddings": False,
}


def decoder(heads: int = 4, kv_heads: int = 1, **more: Any) -> Settings:
    """A decoder with ``heads`` for queries and ``kv_heads`` for keys and values."""
    width = more.pop("hidden_size", 8 * heads)
    return {**_DECODER, "hidden_size": width, "num_attention_heads": heads, "num_key_value_heads": kv_heads, **more}


def rope(kind: str = "default", theta: float = 10000.0, **parameters: Any) -> Settings:
    """``rope_parameters`` as transformers 5 has them."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **parameters}}


LLAMA3_ROPE = rope(
    "llama3",
    500000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=MAX_TOKENS // 2,
)
LLAMA3: Settings = decoder(4, 1, **LLAMA3_ROPE)
MISTRAL: Settings = decoder(4, 1, **rope())
LFM2: Settings = decoder(
    4, 2, **rope(theta=1000000.0), layer_types=["conv", "full_attention"], block_multiple_of=8, tie_word_embeddings=True
)
MINISTRAL3: Settings = decoder(
    4,
    1,
    **rope(
        "yarn",
        1000000.0,
        factor=16.0,
        original_max_position_embeddings=MAX_TOKENS,
        mscale=1.0,
        mscale_all_dim=1.0,
        llama_4_scaling_beta=0.1,
    ),
)
QWEN2_6: Settings = decoder(6, 1, **rope(theta=1000000.0))
QWEN2_7: Settings = decoder(7, 1, **rope(theta=1000000.0))
# Heads of twice their share of the width.
QWEN3_06: Settings = decoder(4, 2, head_dim=16, tie_word_embeddings=True, **rope(theta=1000000.0))
QWEN3_4: Settings = decoder(4, 1, head_dim=12, tie_word_embeddings=True, **rope(theta=1000000.0))
QWEN3_8: Settings = decoder(4, 1, head_dim=8, **rope(theta=1000000.0))
GEMMA1: Settings = decoder(4, 1, head_dim=16, tie_word_embeddings=True, **rope())
GEMMA2: Settings = decoder(
    4,
    2,
    head_dim=16,
    query_pre_attn_scalar=16,
    attn_logit_softcapping=50.0,
    final_logit_softcapping=30.0,
    sliding_window=MAX_TOKENS,
    tie_word_embeddings=True,
    **rope(),
)
GEMMA3: Settings = decoder(
    4,
    1,
    num_hidden_layers=3,
    head_dim=12,
    query_pre_attn_scalar=12,
    sliding_window=16,
    sliding_window_pattern=3,
    tie_word_embeddings=True,
)
EMBEDDINGGEMMA: Settings = {
    **GEMMA3,
    "hidden_size": 48,
    "num_attention_heads": 3,
    "head_dim": 20,
    "use_bidirectional_attention": True,
}
MOE: Settings = decoder(4, 2, num_experts=4, num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
JINA_V3: Settings = {**ROBERTA, "max_position_embeddings": MAX_TOKENS, **rope(theta=20000.0)}


def gte(theta: float, factor: float, num_types: int) -> Settings:
    """GTE's settings with the remote code's NTK scaling: its base is multiplied, its frequencies are divided."""
    head_dim = ENCODER["hidden_size"] // ENCODER["num_attention_heads"]
    scaled = rope("linear", theta * factor, factor=factor ** (2 / head_dim))
    return {**ENCODER, "type_vocab_size": num_types, **scaled}


GPT2: Settings = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 48}
NEO: Settings = {
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 48,
    "attention_types": [[["global", "local"], 1]],
    "window_size": 16,
}
LUKE: Settings = {**ROBERTA, "entity_vocab_size": 8, "entity_emb_size": 16}
XLNET: Settings = {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64}
MOBILE: Settings = {
    **ENCODER,
    "hidden_size": 64,
    "embedding_size": 32,
    "intra_bottleneck_size": 32,
    "true_hidden_size": 32,
}
_TOWER: Settings = {name: value for name, value in ENCODER.items() if name != "max_position_embeddings"}
CLIP: Settings = {
    "text_config": {**ENCODER, "vocab_size": tokenizers.clip().get_vocab_size(), "eos_token_id": 2},
    "vision_config": {**_TOWER, "image_size": 8, "patch_size": 4},
    "projection_dim": 24,
}
