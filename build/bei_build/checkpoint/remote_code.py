"""Code in a repository: ``auto_map`` of config.json and module types of modules.json.

bei runs none of it. Code that a family knows is built natively; unknown code is refused, because it may compute other
numbers under the names of a native class (GritLM-7B is a MistralForCausalLM with bidirectional attention).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from bei.errors import CheckpointError, ConfigError
from bei_build.families import qwen2_vl
from bei_build.families.base import Family
from bei_build.spec.model_spec import ModelSpec

Attention = Literal["causal", "bidirectional"]
ATTENTIONS: tuple[Attention, ...] = ("causal", "bidirectional")

_AUTO = "AutoModel"
GME_MODULE = "MultiModalTransformer"  # of gme-Qwen2-VL's repositories
# Modules of repositories' own, which the families of their tensors check: a class in any file, or in one.
_KNOWN_CLASSES = ("SSE", "SSEQ")
_KNOWN_MODULES = ("st_quantize.FlexibleQuantizer",)
_BIDIRECTIONAL = "use_bidirectional_attention"
# Model types whose class obeys ``is_causal`` = false in eager attention, and masks later tokens in SDPA.
_CAUSAL_IN_SDPA = ("nemotron", "stablelm")


def check_remote_code(raw: Mapping[str, Any], family: Family, architecture: str, asked: Attention | None) -> None:
    """Refuse code in ``auto_map`` that would compute the model, unless ``family`` claims it.

    A family claims code by the names of its classes, or by the config.json key that states what such code can change.
    ``asked`` is the attention that the user gives for it. Raises CheckpointError.
    """
    unknown = [place for place in _places(raw, architecture) if not _is_claimed(place, raw, family)]
    if unknown and asked is None:
        raise CheckpointError(
            f"config.json's auto_map gives {architecture} code of its own ({unknown[0]}) that bei does not know, and "
            "which may read texts otherwise than transformers' class of that name. If all it changes is which tokens "
            "see each other, say which (the model's card or its code tell): --attention causal, or --attention "
            "bidirectional. Otherwise bei cannot build this checkpoint."
        )


def has_own_code(raw: Mapping[str, Any], architecture: str) -> bool:
    """True if ``auto_map`` has code that would compute the model."""
    return bool(_places(raw, architecture))


def with_attention(raw: Mapping[str, Any], asked: Attention | None, config_class: type) -> Mapping[str, Any]:
    """``raw`` with ``asked`` in the keys that express it, for transformers' ``config_class`` or in ``raw`` itself."""
    if asked is None:
        return raw
    said: dict[str, Any] = {"is_causal": asked == "causal"}
    if hasattr(config_class, _BIDIRECTIONAL) or _BIDIRECTIONAL in raw:
        said[_BIDIRECTIONAL] = asked == "bidirectional"
    return {**raw, **said}


def check_unread_attention(
    raw: Mapping[str, Any], family: Family, architecture: str, asked: Attention | None, config_class: type
) -> None:
    """Refuse a key for bidirectional attention that transformers' class ignores, always or sometimes, unless the
    repository's own code reads it or the user states the attention. Raises CheckpointError."""
    is_said = asked is not None or has_own_code(raw, architecture) or "Bidirectional" in architecture
    if is_said or not family.attention_keys:
        return
    if raw.get("is_causal") is None and raw.get(_BIDIRECTIONAL) and not hasattr(config_class, _BIDIRECTIONAL):
        unread = f"{_BIDIRECTIONAL}, which transformers' {architecture} does not read"
    elif raw.get("is_causal") is False and family.model_type in _CAUSAL_IN_SDPA:
        unread = f"is_causal = False, which transformers' {architecture} obeys in eager attention only"
    else:
        return
    raise CheckpointError(
        f"config.json has {unread}: without it, that class masks later tokens. Choose one: --attention "
        "bidirectional, or --attention causal."
    )


def attention_of(spec: ModelSpec) -> Attention:
    """The attention of a model with layers: causal if no token sees a later one in any of them, or bidirectional."""
    return "causal" if all(attention.causal for attention in spec.attentions) else "bidirectional"


def check_attention(spec: ModelSpec, asked: Attention | None, config: Any, max_seq_len: int) -> None:
    """Refuse an ``asked`` attention that the model cannot have, or that is ambiguous for it.

    Code of decoders made bidirectional treats windows in its own way: GritLM's drops them, transformers widens them by
    a token. For texts no longer than a window both are the same. Raises ConfigError.
    """
    if asked is not None and (not spec.layers or attention_of(spec) != asked):
        raise ConfigError(f"{spec.architecture} has no {asked} attention: leave --attention out.")
    windows = [attention.window for attention in spec.attentions if attention.window is not None]
    said = "--attention" if asked else "config.json (is_causal)"
    if getattr(config, "is_causal", None) is False and windows and max_seq_len > (longest := min(windows) + 1):
        raise ConfigError(
            f"{spec.architecture} has windows of {longest} tokens, and {said} does not say whether its own code "
            "keeps them. Texts of at most that many tokens give the same vectors either way: set --max-seq-len "
            f"{longest}."
        )


def check_module_types(types: list[str], config: Mapping[str, Any]) -> None:
    """Refuse modules of modules.json that belong to no supported library. Raises CheckpointError.

    jina-embeddings-v3 and -v5 have a Transformer class of their own, which selects one of the adapters that ``config``
    lists; the build does the same. gme's reads images. pplx-embed's quantizer and RikkaBotan's static embeddings are
    known by their names.
    """
    has_adapters = config.get("lora_adaptations") or config.get("task_names")
    claimed: tuple[str, ...] = ("custom_st.Transformer",) if has_adapters else ()
    if qwen2_vl.is_gme(config):
        claimed += (f"custom_st.{GME_MODULE}",)
    libraries = ("sentence_transformers", "pylate")
    own = [kind for kind in types if "." in kind and kind.split(".", 1)[0] not in libraries and kind not in claimed]
    if own := [kind for kind in own if kind not in _KNOWN_MODULES and _class_of(kind) not in _KNOWN_CLASSES]:
        raise CheckpointError(
            f"modules.json asks for {own[0]}, which is code of the repository's own, not of sentence-transformers or "
            "PyLate: bei cannot build this checkpoint."
        )


def _places(raw: Mapping[str, Any], architecture: str) -> list[str]:
    """The entries of ``auto_map`` for the class itself, for its base model, and for its kind of task."""
    auto_map = raw.get("auto_map")
    entries = auto_map.items() if isinstance(auto_map, dict) else ()
    return [
        str(place)
        for auto, place in entries
        if (auto.startswith(_AUTO) and architecture.endswith(auto.removeprefix(_AUTO)))
        or _class_of(str(place)) == architecture
    ]


def _class_of(place: str) -> str:
    """The class name in "owner/repository--module.Class"."""
    return place.rsplit(".", 1)[-1]


def _is_claimed(place: str, raw: Mapping[str, Any], family: Family) -> bool:
    is_said = any(isinstance(raw.get(key), bool) for key in family.attention_keys)
    return is_said or _class_of(place).startswith(family.remote_classes)
