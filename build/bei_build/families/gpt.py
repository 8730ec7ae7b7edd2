"""GPT-Neo (EleutherAI 2021) and GPT-J (EleutherAI 2021), the base of SGPT (arXiv:2202.08904).

LayerNorm and plain MLPs. GPT-Neo has learned positions, layers with a window, and unscaled scores; in GPT-J
neighbouring components of heads rotate together, and attention and MLP both read one norm.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bei_build.families.base import Family, HeadsOf, activation_named, require, token_classifier
from bei_build.families.decoder import NO_TOKEN_LABELS, architectures, is_causal
from bei_build.spec.model_spec import ModelSpec
from bei_build.spec.parts import AttentionSpec, EmbeddingsSpec, LayerSpec, MLPSpec, NormSpec, RopeSpec

_WEIGHTS: dict[str, str | tuple[str, ...]] = {
    "embeddings.word": "wte",
    "layers.{i}.attention_norm": "h.{i}.ln_1",
    "final_norm": "ln_f",
    "score": "score",
}
_NEO_WEIGHTS: dict[str, str | tuple[str, ...]] = {
    **_WEIGHTS,
    "embeddings.position": "wpe",
    "layers.{i}.attention.query": "h.{i}.attn.attention.q_proj",
    "layers.{i}.attention.key": "h.{i}.attn.attention.k_proj",
    "layers.{i}.attention.value": "h.{i}.attn.attention.v_proj",
    "layers.{i}.attention.output": "h.{i}.attn.attention.out_proj",
    "layers.{i}.mlp_norm": "h.{i}.ln_2",
    "layers.{i}.mlp.up": "h.{i}.mlp.c_fc",
    "layers.{i}.mlp.down": "h.{i}.mlp.c_proj",
    "classifier": "classifier",
    "lm_head.weight": ("lm_head.weight", "wte.weight"),
}
# Scores of tokens have biases here, which reading rows of the matrix would leave out.
_J_WEIGHTS: dict[str, str | tuple[str, ...]] = {
    **_WEIGHTS,
    "layers.{i}.attention.query": "h.{i}.attn.q_proj",
    "layers.{i}.attention.key": "h.{i}.attn.k_proj",
    "layers.{i}.attention.value": "h.{i}.attn.v_proj",
    "layers.{i}.attention.output": "h.{i}.attn.out_proj",
    "layers.{i}.mlp.up": "h.{i}.mlp.fc_in",
    "layers.{i}.mlp.down": "h.{i}.mlp.fc_out",
}


def _neo_spec(config: Any, architecture: str) -> ModelSpec:
    require(config, "is_causal", True, None)  # transformers' class masks later tokens regardless of it
    heads, hidden, norm = config.num_attention_heads, config.hidden_size, NormSpec(config.layer_norm_epsilon)
    mlp = MLPSpec(config.intermediate_size or 4 * hidden, activation_named(config.activation_function))

    def layer(kind: str) -> LayerSpec:
        window = config.window_size - 1 if kind == "local" else None  # transformers counts the token itself
        attention = AttentionSpec(heads, hidden // heads, heads, scale=1.0, bias=False, causal=True, window=window)
        return LayerSpec(attention, mlp, norm, "pre")

    return ModelSpec(
        family=config.model_type,
        architecture=architecture,
        hidden_size=hidden,
        embeddings=EmbeddingsSpec(config.vocab_size, max_positions=config.max_position_embeddings),
        layers=tuple(layer(kind) for kind in config.attention_layers),
        final_norm=norm,
    )


def _j_spec(config: Any, architecture: str) -> ModelSpec:
    heads, hidden, norm = config.num_attention_heads, config.hidden_size, NormSpec(config.layer_norm_epsilon)
    head_dim = hidden // heads
    attention = AttentionSpec(
        heads,
        head_dim,
        heads,
        scale=head_dim**-0.5,
        bias=False,
        output_bias=False,
        causal=is_causal(config, architecture),
        rope=RopeSpec(_frequencies(config.rotary_dim), interleaved=True),
    )
    mlp = MLPSpec(config.n_inner or 4 * hidden, activation_named(config.activation_function))
    return ModelSpec(
        family=config.model_type,
        architecture=architecture,
        hidden_size=hidden,
        embeddings=EmbeddingsSpec(config.vocab_size),
        layers=(LayerSpec(attention, mlp, norm, "pre", parallel=True),) * config.num_hidden_layers,
        final_norm=norm,
    )


def _frequencies(rotary_dim: int) -> tuple[float, ...]:
    exponents = np.arange(0, rotary_dim, 2, dtype=np.float32) / np.float32(rotary_dim)
    return tuple((1.0 / np.float32(10000.0) ** exponents).astype(np.float32).tolist())


_NEO_HEADS: dict[str, HeadsOf] = {
    **architectures("GPTNeo", NO_TOKEN_LABELS),
    "GPTNeoForTokenClassification": token_classifier(),
}


NEO_FAMILY = Family(
    model_type="gpt_neo",
    architectures=_NEO_HEADS,
    prefix="transformer.",
    weights=_NEO_WEIGHTS,
    unused=("lm_head.", "score."),
    spec_from_config=_neo_spec,
)
J_FAMILY = Family(
    model_type="gptj",
    architectures=architectures("GPTJ", NO_TOKEN_LABELS),
    prefix="transformer.",
    weights=_J_WEIGHTS,
    unused=("lm_head.", "score."),
    spec_from_config=_j_spec,
    attention_keys=("is_causal",),
)
