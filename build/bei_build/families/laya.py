"""Laya (NandhaKishorM/laya), decisions by a ModernBERT: behind its last norm a row for the kind of question is added to
each token, then come layers of torch's TransformerEncoder, and an MLP that scores each token as an option's marker.

Its config is that of the encoder with the layers of Laya's head under ``head_layers`` (``checkpoint.laya``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bei.artifact.label_layouts import KINDS_OF_QUESTIONS
from bei.errors import CheckpointError
from bei_build.families import modernbert
from bei_build.families.base import Family
from bei_build.spec.model_spec import HeadSpec, ModelSpec
from bei_build.spec.parts import AttentionSpec, DenseSpec, EntrySpec, LayerSpec, MLPSpec, NormLayerSpec, NormSpec

MODEL_TYPE = "laya"
ARCHITECTURE = "DecisionModel"
ENCODER = modernbert.FAMILY.model_type
_HEAD_DIM = 64
_MOST_LAYERS = 256
_NORM = NormSpec(1e-5)  # torch's default
_USUAL_LAYERS = (22, 2)  # of ModernBERT's base model and of Laya's head, for the table of families


def _scores(config: Any) -> tuple[HeadSpec, ...]:
    width = config.hidden_size
    layers = (
        NormLayerSpec("scorer.norm", width, _NORM),
        DenseSpec("scorer.dense", width, width, activation="gelu"),
        DenseSpec("scorer.out", width, 1),
    )
    return (HeadSpec("option_logits", token_layers=layers),)


def _spec_from_config(config: Any, architecture: str) -> ModelSpec:
    spec, width = modernbert.FAMILY.spec_from_config(config, architecture), config.hidden_size
    num_heads = max(1, width // _HEAD_DIM)
    if width % num_heads:
        raise CheckpointError(
            f"encoder/config.json has hidden_size = {width}, which Laya's {num_heads} heads cannot share: download the "
            "checkpoint again."
        )
    assert spec.final_norm is not None  # ModernBERT has one
    dim = width // num_heads
    layer = LayerSpec(AttentionSpec(num_heads, dim, num_heads, dim**-0.5), MLPSpec(4 * width, "relu"), _NORM, "pre")
    first = replace(layer, entry=EntrySpec(spec.final_norm, len(KINDS_OF_QUESTIONS)))
    others = (layer,) * (config.head_layers - 1)
    return replace(spec, layers=(*spec.layers, first, *others), final_norm=None)


def _weights(num_layers: int, head_layers: int) -> dict[str, str]:
    """The names of tensors; layers of the head are counted from 0 there, and behind the encoder's here."""
    encoder = modernbert.FAMILY.weights
    names = {ours: str(stored) for ours, stored in encoder.items() if ours.startswith(("embeddings.", "layers."))}
    names |= {f"layers.{num_layers}.entry.norm": "final_norm", f"layers.{num_layers}.entry.types": "type_emb"}
    for index in range(head_layers):
        ours, theirs = f"layers.{num_layers + index}", f"head.layers.{index}"
        for kind in ("weight", "bias"):
            for role in ("query", "key", "value"):
                names[f"{ours}.attention.{role}.{kind}"] = f"{theirs}.self_attn.in_proj_{kind}"
        parts = {"attention.output": "self_attn.out_proj", "mlp.up": "linear1", "mlp.down": "linear2"}
        parts |= {"attention_norm": "norm1", "mlp_norm": "norm2"}
        names |= {f"{ours}.{part}": f"{theirs}.{stored}" for part, stored in parts.items()}
    return names | {"scorer.norm": "scorer.0", "scorer.dense": "scorer.1", "scorer.out": "scorer.3"}


def _variant(raw: Mapping[str, Any]) -> Family | None:
    if "head_layers" not in raw:
        return None
    counts = raw.get("num_hidden_layers", _USUAL_LAYERS[0]), raw["head_layers"]
    if not all(isinstance(count, int) and 1 <= count <= _MOST_LAYERS for count in counts):
        raise CheckpointError(
            f"The checkpoint has {counts[0]!r} layers and {counts[1]!r} head_layers; bei builds Laya with 1 to "
            f"{_MOST_LAYERS} of each."
        )
    return _family(*counts)


def _family(num_layers: int, head_layers: int) -> Family:
    return Family(
        model_type=ENCODER,
        aliases=(MODEL_TYPE,),
        architectures={ARCHITECTURE: _scores},
        prefix="encoder.",
        weights=_weights(num_layers, head_layers),
        unused=("act_head.", "temperature"),  # a second output, which no route gives; and what its code does not read
        reference_class=None,  # transformers has no such head
        variant=_variant,
        spec_from_config=_spec_from_config,
    )


FAMILY = _family(*_USUAL_LAYERS)
