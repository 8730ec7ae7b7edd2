"""What vision transformers have in common (Dosovitskiy et al. 2020, arXiv:2010.11929)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from bei.errors import CheckpointError
from bei_build.families.base import Family, activation_named, require
from bei_build.spec.model_spec import HeadSpec, ModelSpec
from bei_build.spec.parts import AttentionSpec, EmbeddingsSpec, LayerSpec, MLPSpec, NormSpec, RopeSpec
from bei_build.spec.patches import PatchesSpec


@dataclass(frozen=True)
class VisionFamily:
    """The image tower of a family. ``output``: of ``family.reference_class``, the vectors of images, [B, width], or
    the states of their tokens, [B, T, width], of which the first is the vector. ``resizes_positions``: the class fits
    its positions to the size of the images that it gets. ``is_read_by_decoder``: an image has no vector of its own: the
    family of texts reads the tower's states among its tokens, and ``output`` is that of the whole class.
    ``usual_blocks``: the fewest and the most blocks of patches of an image where the processor's files do not say how
    many pixels it has, nor sentence-transformers' how the processor is called; None: those of the processor's class.
    ``has_own_blocks``: these are those of the model's own code, whatever the processor's files say. ``has_processor``:
    transformers has a class that writes what stands around an image, and can be made. ``counts_as_text``: the decoder
    counts an image's tokens as those of a text, unlike its class in transformers. ``by_config``: the family in this
    one's place for a config.json. ``whole``: config.json as ``family.reference_class`` reads it, where the family of
    texts reads a part.
    """

    family: Family
    output: str
    resizes_positions: bool = False
    is_read_by_decoder: bool = False
    usual_blocks: tuple[int, int] | None = None
    has_own_blocks: bool = False
    has_processor: bool = True
    counts_as_text: bool = False
    by_config: Callable[[VisionFamily, Mapping[str, Any]], VisionFamily] | None = None
    whole: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None

    def read_by(self, raw: Mapping[str, Any]) -> VisionFamily:
        """The image tower that config.json ``raw`` describes."""
        variant = self.family.variant and self.family.variant(raw)
        found = self if variant is None else replace(self, family=variant)
        return found.by_config(found, raw) if found.by_config else found


def patches_of(
    config: Any, *, bias: bool, class_token: bool, flat: Literal["", "pixels", "channels"] = ""
) -> PatchesSpec:
    """The patches of ``config``; the image processor's settings give their normalization later."""
    require(config, "num_channels", 3)
    size, whole = config.patch_size, config.image_size
    if not isinstance(size, int) or not isinstance(whole, int):
        raise CheckpointError(f"config.json has image_size = {whole!r}: bei reads square images only, as one number.")
    if whole % size:
        raise CheckpointError(
            f"config.json has image_size = {whole}, which is no multiple of patch_size = {size}: the model's own code "
            "would cut off the rest. Such models are not supported."
        )
    return PatchesSpec(size, bias, class_token, scales=(1.0, 1.0, 1.0), shifts=(0.0, 0.0, 0.0), flat=flat)


def attention_of(
    config: Any,
    *,
    bias: bool = True,
    key_bias: bool = True,
    output_bias: bool = True,
    rope: RopeSpec | None = None,
) -> AttentionSpec:
    """The attention of ``config``'s layers."""
    count: int = config.num_attention_heads
    head_dim = config.hidden_size // count
    return AttentionSpec(
        count, head_dim, count, head_dim**-0.5, bias=bias, key_bias=key_bias, output_bias=output_bias, rope=rope
    )


def encoder_layers(
    config: Any, attention: AttentionSpec | None = None, mlp: MLPSpec | None = None
) -> tuple[LayerSpec, ...]:
    """The layers of a vision transformer, with CLIP's and SigLIP's attention and MLP where none is given."""
    layer = LayerSpec(
        attention or attention_of(config),
        mlp or MLPSpec(config.intermediate_size, activation_named(config.hidden_act)),
        NormSpec(config.layer_norm_eps),
        placement="pre",
    )
    count: int = config.num_hidden_layers
    return (layer,) * count


def class_token_model(
    config: Any, family: str, architecture: str, patches: PatchesSpec, max_positions: int, layers: tuple[LayerSpec, ...]
) -> ModelSpec:
    """A model whose vector is the class token's last state behind a norm, without a projection."""
    return ModelSpec(
        family=family,
        architecture=architecture,
        hidden_size=config.hidden_size,
        embeddings=EmbeddingsSpec(0, max_positions, patches=patches),
        layers=layers,
        final_norm=NormSpec(config.layer_norm_eps),
        heads=(HeadSpec("embedding", ("cls",)),),
    )


def vision_part(raw: Mapping[str, Any], *shared: str) -> Mapping[str, Any]:
    """``vision_config`` of a whole model's config.json, with the keys ``shared`` of the whole; that of an image tower
    alone is unchanged. Raises CheckpointError."""
    if str(raw.get("model_type", "")).endswith("_vision_model"):
        return raw
    vision = raw.get("vision_config")
    if not isinstance(vision, dict):
        raise CheckpointError("config.json has no vision_config: download the checkpoint again.")
    return {**vision, **{key: raw[key] for key in shared if key in raw}, "architectures": raw["architectures"]}
