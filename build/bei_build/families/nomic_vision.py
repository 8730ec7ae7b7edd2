"""nomic-embed-vision (Nussbaum et al. 2024, arXiv:2406.18587): a vision transformer in the vector space of
nomic-embed-text, with EVA-02's rotations by row and column and its norm inside the MLP (arXiv:2303.11331).

Read from the repository's own code (nomic-ai/nomic-bert-2048, modeling_hf_nomic_bert.py): a learned row attends to all
states; what goes through its MLP is added to the first state, and the sum is the vector.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bei.errors import CheckpointError
from bei_build.families.base import Family, require
from bei_build.families.vision import VisionFamily, patches_of
from bei_build.spec.model_spec import HeadSpec, ModelSpec
from bei_build.spec.parts import (
    Activation,
    AttentionPoolSpec,
    AttentionSpec,
    EmbeddingsSpec,
    LayerSpec,
    MLPSpec,
    NormSpec,
    RopeSpec,
)
from bei_build.spec.stored_forms import StoredForms

# Settings of the code that no published model uses: the supported values, the code's default first.
_SWITCHES: Mapping[str, tuple[object, ...]] = {
    "causal": (False,),
    "global_pool": (None, "token"),
    "learned_pos_embedding": (False, True),  # both read the same table for images of the model's size
    "mask_token": (False,),
    "mlp_fc1_bias": (True,),
    "mlp_fc2_bias": (True,),
    "no_cls_token": (False,),
    "no_embed_class": (False,),
    "num_heads_kv": (None,),
    "parallel_block": (False,),
    "patch_embed_bias": (True,),
    "prenorm": (True,),
    "qkv_proj_bias": (True,),
    "register_tokens": (0,),
    "rotary_emb_fraction": (0,),
    "sinusoidal_pos_embedding": (False,),
    "use_pos_embed": (True,),
    "use_rms_norm": (False,),
}
_GATES: Mapping[str, Activation] = {"swiglu": "silu", "geglu": "gelu"}
_MULTIPLE = 256  # of the inner width of gated MLPs
_BASE = 10_000.0
_INNER_EPS = 1e-5  # torch's default


def _from_remote(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**raw, "image_size": raw.get("img_size")}


def _rotations(config: Any, head_dim: int, side: int) -> RopeSpec | None:
    if not getattr(config, "use_rotary_pos_emb", False):
        return None
    reference = getattr(config, "ref_feat_shape", None) or side
    height, width = reference if isinstance(reference, list | tuple) else (reference, reference)
    bands = tuple(_BASE ** -(band / (head_dim // 4)) for band in range(head_dim // 4))
    return RopeSpec((*bands, *bands), interleaved=True, grid=(side, side), grid_scale=(height / side, width / side))


def _spec(config: Any, architecture: str) -> ModelSpec:
    for key, values in _SWITCHES.items():
        require(config, key, *values)
    if config.activation_function not in _GATES:
        raise CheckpointError(
            f"config.json has activation_function {config.activation_function!r}; bei's {config.model_type} family "
            f"supports only {', '.join(_GATES)}."
        )
    patches = patches_of(config, bias=True, class_token=True, flat="channels")
    width, num_heads = config.n_embd, config.n_head
    head_dim, side = width // num_heads, config.image_size // config.patch_size
    norm, activation = NormSpec(config.layer_norm_epsilon), _GATES[config.activation_function]
    inner = -(-config.n_inner // _MULTIPLE) * _MULTIPLE
    attention = AttentionSpec(
        num_heads, head_dim, num_heads, scale=head_dim**-0.5, rope=_rotations(config, head_dim, side)
    )
    inner_norm = NormSpec(_INNER_EPS) if getattr(config, "norm_mlp", False) else None
    mlp = MLPSpec(inner, activation, gated=True, inner_norm=inner_norm)
    pool = AttentionPoolSpec("attention_pool", width, num_heads, inner, activation, norm, gated=True, adds_first=True)
    return ModelSpec(
        family="nomic_vision",
        architecture=architecture,
        hidden_size=width,
        embeddings=EmbeddingsSpec(0, 1 + side**2, patches=patches),
        layers=(LayerSpec(attention, mlp, norm, placement="pre"),) * config.n_layer,
        heads=(HeadSpec("embedding", ("attention",), attention_pool=pool),),
    )


VISION = VisionFamily(
    Family(
        model_type="nomic_vision",
        architectures={"NomicVisionModel": lambda config: ()},
        prefix="model.",
        weights={
            "embeddings.patch": "embeddings.proj",
            "embeddings.patch.class_row": "embeddings.cls_token",
            "embeddings.position.weight": "embeddings.pos_embed",
            "layers.{i}.attention.query": "layers.{i}.attn.Wqkv",
            "layers.{i}.attention.key": "layers.{i}.attn.Wqkv",
            "layers.{i}.attention.value": "layers.{i}.attn.Wqkv",
            "layers.{i}.attention.output": "layers.{i}.attn.out_proj",
            "layers.{i}.attention_norm": "layers.{i}.norm1",
            "layers.{i}.mlp.up": "layers.{i}.mlp.fc11",
            "layers.{i}.mlp.gate": "layers.{i}.mlp.fc12",
            "layers.{i}.mlp.norm": "layers.{i}.mlp.norm",
            "layers.{i}.mlp.down": "layers.{i}.mlp.fc2",
            "layers.{i}.mlp_norm": "layers.{i}.norm2",
            "attention_pool.probe": "selector.attn.latent",
            "attention_pool.input": "selector.attn.Wqkv",
            "attention_pool.output": "selector.attn.out_proj",
            "attention_pool.norm": "selector.norm1",
            "attention_pool.mlp.up": "selector.mlp.fc11",
            "attention_pool.mlp.gate": "selector.mlp.fc12",
            "attention_pool.mlp.down": "selector.mlp.fc2",
        },
        unused=(),
        spec_from_config=_spec,
        translate=_from_remote,
        remote_classes=("NomicVision",),
        reference_class=None,
        stored_forms=StoredForms(
            {"embeddings.cls_token": 1, "embeddings.pos_embed": 2},
            joined={"selector.attn.Wqkv": ("selector.attn.Wq", "selector.attn.Wkv")},
        ),
    ),
    output="last_hidden_state",
)
