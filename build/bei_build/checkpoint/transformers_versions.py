"""Differences between transformers 4 and the installed version in reading a config.json.

The build follows the installed version, and notes where the other would read it differently. The list was found by
loading a checkpoint of every family, and 170 variants of its config.json, in 4.57.6 and 5.24.0.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from bei.errors import CheckpointError
from bei_build.checkpoint.remote_code import Attention, has_own_code
from bei_build.files.json_settings import read_object
from bei_build.spec.parts import DenseSpec

if TYPE_CHECKING:
    from bei_build.checkpoint.checkpoint import Checkpoint

_Raw: TypeAlias = Mapping[str, Any]

# Key of theta in transformers 4, and its default, by type of layer ("": all); for models where these are not
# "rope_theta" and the default of today's class.
_FORMER_THETAS: Mapping[str, Mapping[str, tuple[str, float]]] = {
    "cohere": {"": ("rope_theta", 10_000.0)},
    "olmo3": dict.fromkeys(("full_attention", "sliding_attention"), ("rope_theta", 10_000.0)),
    "gemma3_text": {
        "full_attention": ("rope_theta", 1_000_000.0),
        "sliding_attention": ("rope_local_base_freq", 10_000.0),
    },
    "modernbert": {
        "full_attention": ("global_rope_theta", 160_000.0),
        "sliding_attention": ("local_rope_theta", 10_000.0),
    },
    "modernbert-decoder": dict.fromkeys(("full_attention", "sliding_attention"), ("global_rope_theta", 160_000.0)),
}
# Model types without a class in transformers 4.
_NEW_TYPES = ("eurobert", "gte", "jina_embeddings_v3", "nomic_bert")
_FORMER_LOCAL_ATTENTION = 128  # ModernBERT's decoder


# Types whose classes only transformers 5 has.
_ONLY_IN_5 = ("embedding_gemma2_text",)


# Keys of config.json that name other files, and what the library reads there.
_OTHER_FILES = {
    "transformers_weights": "weights",
    "configuration_files": "settings for some of its versions",
}
_USUAL_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")


def check_other_files(path: Path, raw: _Raw) -> None:
    """Refuse a config.json at ``path`` in whose place, or in the usual weights' place, transformers reads other files.
    Raises CheckpointError."""
    for key, content in _OTHER_FILES.items():
        if raw.get(key) and raw[key] not in _USUAL_WEIGHTS:
            raise CheckpointError(
                f"{path} has {key}: transformers takes {content} from {raw[key]!r:.80}, and bei reads config.json and "
                "the usual files of weights alone. Give that file the usual name, and take the key out."
            )


def check_versions(raw: _Raw) -> None:
    """Refuse keys of config.json that one version of transformers obeys in any family and another ignores. Raises
    CheckpointError."""
    if raw.get("pruned_heads"):
        raise CheckpointError(
            "config.json has pruned_heads: transformers 4 leaves these heads out, 5 ignores the key, and bei builds "
            "layers that have all their heads. Take the checkpoint from before pruning, or the key out of config.json "
            "if the tensors have all heads."
        )
    if raw.get("per_layer_config") and raw.get("model_type") not in _ONLY_IN_5:
        raise CheckpointError(
            "config.json has per_layer_config, settings of single layers, which transformers 4 ignores and 5 obeys: "
            "bei does not build such models."
        )


def version_notes(checkpoint: Checkpoint, attention: Attention | None = None) -> Iterator[str]:
    """A sentence for each difference: the value that was used, and how to get the other.

    There are no notes if transformers 5 or later saved the config, if 4 had no such model or the code is remote, or
    about an ``attention`` that the user has named.
    """
    path = checkpoint.folder / "config.json"
    raw = read_object(path) if path.is_file() else {}
    if attention is not None:
        raw.pop("is_causal", None)
    saved_by = re.match(r"\d{1,3}", str(raw.get("transformers_version", "")))
    is_former = raw.get("model_type") == checkpoint.family.model_type not in _NEW_TYPES
    if is_former and (saved_by is None or int(saved_by[0]) < 5):
        for rule in _RULES:
            yield from rule(raw, checkpoint)


def _note(what: str, now: object, former: object, remedy: str) -> str:
    return f"{what}: this build takes {now}, as transformers 5 does; transformers 4 took {former}. For that {remedy}"


def _thetas(raw: _Raw, checkpoint: Checkpoint) -> Iterator[str]:
    """The base of rotations: its defaults, and its value where config.json gives two."""
    config, parameters = checkpoint.config, _rope_parameters(checkpoint)
    if parameters is None:
        return
    former = _FORMER_THETAS.get(raw["model_type"], {"": ("rope_theta", config.default_theta)})
    is_nested = "" not in former
    if is_nested and not parameters.keys() >= former.keys():  # one rotation for all layers: new in 5
        return
    now = {kind: (parameters[kind] if is_nested else parameters)["rope_theta"] for kind in former}
    then = {kind: raw.get(key, default) for kind, (key, default) in former.items()}
    changed = {kind: then[kind] for kind in former if now[kind] != then[kind]}
    scaling = raw.get("rope_scaling") or {}
    for kind, theta in changed.items():
        place = "rope_scaling" if "rope_theta" in scaling else "rope_parameters" if raw.get("rope_parameters") else ""
        if place == "rope_scaling" and is_nested:
            remedy = 'take "rope_theta" out of rope_scaling'
        elif is_nested:
            entries = {kind: {**parameters[kind], "rope_theta": then[kind]} for kind in former}
            remedy = f'set "rope_parameters": {json.dumps(entries)}'
        else:
            remedy = f'set "rope_theta": {theta}{f" in {place}" if place else ""}'
        yield _note(f"rope_theta{f' of {kind}' if kind else ''}", now[kind], theta, remedy)


def _rope_types(raw: _Raw, checkpoint: Checkpoint) -> Iterator[str]:
    """The scaling of rotations that is used."""
    parameters, scaling = _rope_parameters(checkpoint), raw.get("rope_scaling") or {}
    if parameters is None or raw["model_type"] == "phi3":  # both versions rename its types
        return
    now = parameters.get("full_attention", parameters)["rope_type"]
    if raw["model_type"] == "nemotron":  # its class in transformers 4 had no scaling
        if now != "default":
            yield _note("rope_scaling", now, "none", 'set "rope_scaling": null')
    elif now == "default" and scaling.get("type", now) != now and "rope_type" not in scaling:
        former = "obeyed" if raw["model_type"].startswith("modernbert") else "refused"
        yield (
            f'rope_scaling has "type" and no "rope_type": this build does not scale, as transformers 5 does not; '
            f'transformers 4 {former} it. For {scaling["type"]!r} name the key "rope_type"'
        )


def _rope_parameters(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """Rotary parameters that the config's class derives from config.json; None for models without rotations."""
    is_read = hasattr(type(checkpoint.config), "rope_parameters")
    turns = any(attention.rope for attention in checkpoint.spec.attentions)
    return checkpoint.config.rope_parameters if is_read and turns else None


def _windows(raw: _Raw, checkpoint: Checkpoint) -> Iterator[str]:
    """ModernBERT's decoder: 4 saved half of local_attention under a name that it did not read."""
    if raw["model_type"] != "modernbert-decoder":
        return
    now, former = checkpoint.config.sliding_window, (raw.get("local_attention") or _FORMER_LOCAL_ATTENTION) // 2
    if now != former:
        yield _note("sliding_window", now, former, f'set "sliding_window": {former}')


def _activations(raw: _Raw, checkpoint: Checkpoint) -> Iterator[str]:
    """Gemma: the function that the first checkpoints call gelu."""
    if raw["model_type"] == "gemma" and raw.get("hidden_act") == "gelu":
        remedy = 'set "hidden_act": "gelu_python"'
        yield _note("hidden_act 'gelu'", "the tanh form", "(4.57; earlier ones did not) the exact one", remedy)


def _masks(raw: _Raw, checkpoint: Checkpoint) -> Iterator[str]:
    """Language models: no native class of 4 obeyed ``is_causal``."""
    said = raw.get("is_causal") is False and checkpoint.family.is_decoder
    if said and not has_own_code(raw, checkpoint.spec.architecture):
        yield _note("is_causal = false", "no causal mask", "one", "build with --attention causal")


def _ties(raw: _Raw, checkpoint: Checkpoint) -> Iterator[str]:
    """A stored matrix of token scores although the embeddings are tied: 4 replaced it by the embeddings."""
    layers = [layer for head in checkpoint.spec.heads for layer in (*head.token_layers, *head.layers)]
    names = [f"{layer.name}.weight" for layer in layers if isinstance(layer, DenseSpec)]
    tied = [name for name in names if isinstance(checkpoint.family.weights.get(name), tuple)]
    if not tied or not getattr(checkpoint.config, "tie_word_embeddings", True):
        return
    with checkpoint.weights() as weights:
        if any(weights.is_untied(name) for name in tied):
            former, remedy = "the embeddings', to which config.json ties it", "save the checkpoint anew with it"
            yield _note("the matrix of token scores", "the stored one", former, remedy)


_RULES: tuple[Callable[[_Raw, Checkpoint], Iterator[str]], ...] = (
    _thetas,
    _rope_types,
    _windows,
    _activations,
    _masks,
    _ties,
)
