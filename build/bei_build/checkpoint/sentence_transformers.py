"""Files that sentence-transformers writes beside a checkpoint, read without the library.

``modules.json`` and the modules' folders, ``sentence_bert_config.json``, ``config_sentence_transformers.json``, and
ColBERT's ``artifact.metadata``. Formats of sentence-transformers 2 to 6 and of PyLate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from bei.errors import CheckpointError, ConfigError
from bei.tokenizer.prompts import SLOT
from bei_build.checkpoint.colbert import (
    Sides,
    check_no_mask,
    check_no_sides,
    check_token_pooling,
    module_sides,
    original_sides,
    pylate_sides,
)
from bei_build.checkpoint.modules_list import listed_modules
from bei_build.checkpoint.remote_code import GME_MODULE, check_module_types
from bei_build.checkpoint.router import Routing, class_of, select_route
from bei_build.checkpoint.transformer_arguments import check_arguments, check_lengths, tokenizer_args
from bei_build.checkpoint.transformer_output import check_output
from bei_build.files.json_settings import read_object, setting
from bei_build.spec.head_layers import HeadLayer
from bei_build.spec.parts import (
    Activation,
    ActivationSpec,
    DenseSpec,
    NormalizeSpec,
    NormLayerSpec,
    NormSpec,
    Pooling,
)
from bei_build.tokenizer.chat_template import ChatSettings, chat_settings, embeds_turns

_POOLING_NAMES: dict[str, Pooling] = {
    "cls": "cls",
    "max": "max",
    "mean": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "weightedmean": "weighted_mean",
    "lasttoken": "last",
}
# Up to version 5: one boolean per mode; several are concatenated in this order.
_POOLING_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
# torch classes by name only: the files hold no arguments, and the library uses the defaults.
_DENSE_ACTIVATIONS: dict[str, Activation] = {
    "Identity": "identity",
    "Tanh": "tanh",
    "ReLU": "relu",
    "ReLU6": "relu6",
    "LeakyReLU": "leaky_relu",
    "ELU": "elu",
    "GELU": "gelu",
    "SiLU": "silu",
    "Hardswish": "hardswish",
    "Mish": "mish",
    "Sigmoid": "sigmoid",
}
# Modules that are not layers: Dropout acts in training only, MultiVectorMask selects the tokens whose vectors are left
# out of late interaction, HierarchicalTokenPooling reduces a text's vectors or does nothing.
_IDLE_MODULES = ("Dropout", "MultiVectorMask", "HierarchicalTokenPooling")
_SUPPORTED_MODULES = (
    "Transformer -> Pooling -> Dense / LayerNorm / Normalize, the same with WeightedLayerPooling in front of the "
    "Pooling or ending in a Dense that gives scores, "
    "Transformer -> Dense -> Normalize (late interaction), "
    "MLMTransformer -> SpladePooling, Transformer -> LogitScore, SSE, "
    "StaticEmbedding -> Dense / LayerNorm / Normalize, "
    "Transformer alone for sequence-classification, and a Router with a route of these"
)
_TAIL_MODULES = {"Dense", "LayerNorm", "Normalize", "FlexibleQuantizer"}
StaticClass = Literal["StaticEmbedding", "SSE"]
# SSEQ is SSE with a table of 4 bits.
_STATIC_CLASSES: Mapping[str, StaticClass] = {"StaticEmbedding": "StaticEmbedding", "SSE": "SSE", "SSEQ": "SSE"}
_SCORES = "scores"  # the feature that a CrossEncoder reads from its last module
_MATRYOSHKA_KEYS = ("matryoshka_dims", "matryoshka_dimensions")
_TRANSFORMER_CONFIGS = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)


@dataclass(frozen=True)
class SparsePooling:
    """Pooling of vocabulary scores into one row (SPLADE): log(1 + x) of the positive ones, applied ``logarithms``
    times."""

    mode: Literal["max", "sum"]
    logarithms: int = 1


@dataclass(frozen=True)
class SentenceTransformersFiles:
    """Contents of the files; defaults are those of a checkpoint without them.

    ``normalize`` is None where there is no ``modules.json``. ``include_prompt``: the prompt's tokens count in the mean.
    ``tail``: the layers after the pooling, or on each token where there is no ``pooling`` (``per_token``, late
    interaction); ``tail_folders[name]`` holds a layer's weights. ``layer_pooling``: the folder of the module that
    averages the states of layers. ``gives_scores``: the last of the layers gives a reranker's scores, not an embedding.
    ``sparse``: pooling of vocabulary scores (SPLADE), None for other models. ``score_ids``: the token (yes,) whose
    score a reranker gives, or the two (no, yes) that it compares; ``chat``: its pairs are put into the checkpoint's
    chat template; ``activation``: the class that a CrossEncoder applies to its scores. ``markers``: prompts that were
    one token each in ColBERT's training; ``sides``: settings of its two sides. ``is_classifier``:
    transformers' classifier is the only module. ``is_cross_encoder``: activation and prompts are those of a
    CrossEncoder; the library ignores them otherwise. ``transformer_folder`` holds config,
    tokenizer and weights; ``folders`` are all modules' folders. ``static``: the class of a static embedding, the
    first module, where the config may be missing. ``routing``: the texts that the modules read, where a Router selects
    them.
    """

    transformer_folder: Path
    folders: tuple[Path, ...]
    pooling: tuple[Pooling, ...] | None = None
    include_prompt: bool | None = None
    tail: tuple[HeadLayer, ...] = ()
    tail_folders: dict[str, Path] = field(default_factory=dict)
    per_token: bool = False
    layer_pooling: Path | None = None
    gives_scores: bool = False
    sparse: SparsePooling | None = None
    score_ids: tuple[int, ...] | None = None
    chat: ChatSettings | None = None
    activation: str | None = None
    is_classifier: bool = False
    is_cross_encoder: bool = False
    markers: tuple[str, ...] = ()
    static: StaticClass | None = None
    sides: Sides = field(default_factory=dict)
    normalize: bool | None = None
    max_seq_length: int | None = None
    do_lower_case: bool = False
    tokenizer_args: Mapping[str, Any] = field(default_factory=dict)
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    similarity: str | None = None
    truncate_dim: int | None = None
    max_active_dims: int | None = None
    matryoshka_dimensions: tuple[int, ...] | None = None
    routing: Routing | None = None


def read_sentence_transformers(folder: Path, route: str | None = None) -> SentenceTransformersFiles:
    """Read all files; a folder without ``modules.json`` gives the defaults. ``route``: a Router's route, else its
    default.

    Raises CheckpointError, ConfigError.
    """
    settings = _model_settings(folder)
    if not (folder / "modules.json").is_file():
        if route is not None:
            raise ConfigError(
                "--route is for checkpoints with a Router, and this one has no modules.json: leave it out."
            )
        settings = _with_colbert_settings(settings, folder)
        return SentenceTransformersFiles(transformer_folder=folder, folders=(folder,), **settings)
    raw = read_object(folder / "config.json") if (folder / "config.json").is_file() else {}
    given = listed_modules(folder)
    listed, routing = select_route(given, route)
    check_module_types([kind for kind, _ in listed], raw)
    entries = [(class_of(kind), path) for kind, path in listed]
    for _, path in (module for module in entries if module[0] == "HierarchicalTokenPooling"):
        check_token_pooling(path)
    modules = [(kind, path) for kind, path in entries if kind not in _IDLE_MODULES]
    kinds = [kind for kind, _ in modules]
    if not kinds or kinds[0] not in ("Transformer", "MLMTransformer", GME_MODULE, *_STATIC_CLASSES):
        raise _unsupported(kinds)
    task, transformer = _transformer_settings(modules[0][1])
    mask = next((path for kind, path in entries if kind == "MultiVectorMask"), None)
    if mask or not settings.get("sides"):
        settings["sides"] = module_sides(_transformer_config(modules[0][1]), mask)
    settings = _with_colbert_settings(settings, folder)
    form = _form(kinds, task)
    if (read := _HEADS.get(form)) is None:
        raise _unsupported(kinds)
    if form == "per_token":
        _check_unit_length(folder, modules[-1])
    elif mask:
        check_no_mask(mask)
    if transformer.get("chat") and form not in ("classifier", "LogitScore") and not embeds_turns(modules[0][1]):
        raise CheckpointError(
            "The checkpoint puts texts into a chat template (modality_config with message) before it embeds them; bei "
            "does that for rerankers, Qwen2-VL, Qwen3-VL and EmbeddingGemma 2 only."
        )
    found = _transformer_config(modules[0][1])
    check_output(found or folder / "modules.json", read_object(found) if found else {}, form, kinds[0])
    if found and form not in ("per_token", "classifier", "LogitScore"):
        check_no_sides(found)
    tables = [routing.table[1]] if routing and routing.table else []
    return SentenceTransformersFiles(
        transformer_folder=modules[0][1],
        folders=tuple(dict.fromkeys([*(path for _, path in (*given, *listed)), *tables])),
        routing=routing,
        **{**transformer, **settings, **read(modules[1:])},
    )


def _unsupported(kinds: list[str]) -> CheckpointError:
    return CheckpointError(f"modules.json asks for {' -> '.join(kinds)}; bei builds {_SUPPORTED_MODULES}.")


def _form(kinds: list[str], task: str | None) -> str:
    """The kind of head that the modules make, "" for an unknown one. ``task``: the task for which the Transformer is
    loaded."""
    second, behind = kinds[1:2], set(kinds[2:])
    if (static := _STATIC_CLASSES.get(kinds[0])) == "StaticEmbedding":
        return "static" if set(kinds[1:]) <= _TAIL_MODULES else ""
    if static == "SSE":
        return "stable static" if kinds[1:] in ([], ["Normalize"]) else ""
    if kinds[0] == GME_MODULE:
        return kinds[0] if set(kinds[1:]) <= {"Normalize"} else ""
    if kinds[:3] == ["Transformer", "WeightedLayerPooling", "Pooling"] and set(kinds[3:]) <= _TAIL_MODULES:
        return "layers_pooled"
    if kinds[0] == "Transformer" and behind <= _TAIL_MODULES and second in (["Pooling"], ["Dense"]):
        return "pooled" if second == ["Pooling"] else "per_token"
    if kinds == ["Transformer"] and task == "sequence-classification":
        return "classifier"
    return second[0] if len(kinds) == 2 and second[0] in ("SpladePooling", "LogitScore") else ""


def _pooled(modules: list[tuple[str, Path]]) -> dict[str, Any]:
    folder, tail = modules[0][1], modules[1:]
    gives_scores = bool(tail) and _feature_names(tail[-1][1])["output"] == _SCORES
    return {
        "pooling": _pooling(folder),
        "include_prompt": setting(folder / "config.json", read_object(folder / "config.json"), "include_prompt", bool),
        **_tail(tail, "sentence_embedding", _SCORES if gives_scores else None),
        "gives_scores": gives_scores,
    }


def _layers_pooled(modules: list[tuple[str, Path]]) -> dict[str, Any]:
    settings = {**_pooled(modules[1:]), "layer_pooling": modules[0][1]}
    if settings["gives_scores"]:
        raise CheckpointError(
            "modules.json asks for scores of a WeightedLayerPooling; bei builds only embeddings from it."
        )
    return settings


def _static(modules: list[tuple[str, Path]]) -> dict[str, Any]:
    return {"pooling": ("mean",), **_tail(modules, "sentence_embedding"), "static": "StaticEmbedding"}


def _per_token(modules: list[tuple[str, Path]]) -> dict[str, Any]:
    # PyLate lists no Normalize: it normalizes vectors when it encodes.
    return {**_tail(modules, "token_embeddings"), "per_token": True, "normalize": True}


def _check_unit_length(folder: Path, last: tuple[str, Path]) -> None:
    """Raise CheckpointError where sentence-transformers 6 does not normalize the vectors of late interaction, which
    end in the module ``last``: it does so only by a module, PyLate and the original ColBERT always."""
    path = folder / "config_sentence_transformers.json"
    if not path.is_file() or read_object(path).get("model_type") != "MultiVectorEncoder":
        return
    if last[0] != "Normalize" or _feature_names(last[1])["input"] != "token_embeddings":
        raise CheckpointError(
            f"{path} names a MultiVectorEncoder whose vectors no Normalize of token_embeddings ends (modules.json); "
            "bei normalizes the vectors of late interaction: add the module if that is meant. The model needs another "
            "runtime if not."
        )


def _tail(modules: list[tuple[str, Path]], feature: str, last: str | None = None) -> dict[str, Any]:
    """The layers of ``modules``, which read and write ``feature``; the last one writes ``last`` if it is given.

    A final Normalize is left to the runtime.
    """
    normalize = bool(modules) and modules[-1][0] == "Normalize"
    layers = {f"tail.{index}": module for index, module in enumerate(modules[: len(modules) - normalize])}
    for index, (kind, path) in enumerate(modules):
        _check_features(kind, path, feature, last if last and index == len(modules) - 1 else feature)
    return {
        "tail": tuple(_tail_layer(kind, path, name) for name, (kind, path) in layers.items()),
        "tail_folders": {name: path for name, (kind, path) in layers.items() if kind != "Normalize"},
        "normalize": normalize,
    }


def _feature_names(folder: Path) -> dict[str, str | None]:
    """Input and output features in a module's config.json; None where they are missing."""
    path = folder / "config.json"
    if not path.is_file():  # Normalize had none before sentence-transformers 6; others fail when they are read
        return {"input": None, "output": None}
    config = read_object(path)
    return {end: setting(path, config, f"module_{end}_name", str) for end in ("input", "output")}


def _check_features(kind: str, folder: Path, read: str, written: str) -> None:
    """Refuse a module whose features differ from ``read`` and ``written``."""
    named = _feature_names(folder)
    other = {
        name
        for end, expected in (("input", read), ("output", written))
        if (name := named[end]) not in (None, expected, "sentence_embedding")
    }
    if other:
        raise CheckpointError(
            f"{folder.name} ({kind}) works on {' and '.join(sorted(map(str, other)))}; supported here: {read}."
        )


def _tail_layer(kind: str, folder: Path, name: str) -> HeadLayer:
    if kind == "Dense":
        return _dense(folder, name)
    if kind == "LayerNorm":
        path = folder / "config.json"
        width = setting(path, read_object(path), "dimension", int)
        if width is None:
            raise CheckpointError(f"{path} lacks dimension. Download the checkpoint again.")
        return NormLayerSpec(name, width, NormSpec(1e-5))  # torch's default, which the module uses
    if kind == "FlexibleQuantizer":  # pplx-embed's own: a tanh, whose values it then rounds to 127 steps or to signs
        return ActivationSpec("tanh")
    return NormalizeSpec()


def _sparse(modules: list[tuple[str, Path]]) -> dict[str, Any]:
    path = modules[0][1] / "config.json"
    config = read_object(path)
    mode = setting(path, config, "pooling_strategy", str) or "max"
    activation = setting(path, config, "activation_function", str) or "relu"
    logarithms = {"relu": 1, "log1p_relu": 2}
    if mode not in ("max", "sum") or activation not in logarithms:
        raise CheckpointError(
            f"{path} asks for {mode} pooling of {activation}; supported: max and sum of relu and log1p_relu."
        )
    return {"sparse": SparsePooling("max" if mode == "max" else "sum", logarithms[activation])}


def _token_scores(modules: list[tuple[str, Path]]) -> dict[str, Any]:
    path = modules[0][1] / "config.json"
    config = read_object(path)
    no, yes = (setting(path, config, f"{kind}_token_id", int) for kind in ("false", "true"))
    if yes is None:
        raise CheckpointError(f"{path} lacks true_token_id, the token whose score counts. Download it again.")
    if (read := setting(path, config, "module_input_name", str)) not in (None, "causal_logits"):
        raise CheckpointError(f"{path} scores {read!r}; supported: causal_logits.")
    return {"score_ids": (yes,) if no is None else (no, yes)}


_HEADS: dict[str, Callable[[list[tuple[str, Path]]], dict[str, Any]]] = {
    "pooled": _pooled,
    "layers_pooled": _layers_pooled,
    "static": _static,
    "stable static": lambda modules: {"normalize": bool(modules), "static": "SSE"},
    "per_token": _per_token,
    GME_MODULE: lambda modules: {"normalize": True},  # it takes the last token's state, at unit length
    "classifier": lambda modules: {"is_classifier": True},
    "SpladePooling": _sparse,
    "LogitScore": _token_scores,
}


def _pooling(folder: Path) -> tuple[Pooling, ...]:
    config = read_object(folder / "config.json")
    modes = config.get("pooling_mode") or [name for flag, name in _POOLING_FLAGS.items() if config.get(flag)] or "mean"
    modes = modes if isinstance(modes, list) else [modes]
    unknown = [mode for mode in modes if not isinstance(mode, str) or mode not in _POOLING_NAMES]
    if unknown:
        raise CheckpointError(f"{folder.name} asks for pooling {unknown[0]!r}. Supported: {', '.join(_POOLING_NAMES)}.")
    return tuple(_POOLING_NAMES[mode] for mode in modes)


def _dense(folder: Path, name: str) -> DenseSpec:
    path = folder / "config.json"
    config = read_object(path)
    function = setting(path, config, "activation_function", str) or "torch.nn.modules.activation.Tanh"
    if (activation := _DENSE_ACTIVATIONS.get(torch_class(function))) is None:
        raise CheckpointError(
            f"{folder.name} (Dense) has activation_function {function!r}; supported are torch's "
            f"{', '.join(_DENSE_ACTIVATIONS)}."
        )
    in_features, out_features = (setting(path, config, key, int) for key in ("in_features", "out_features"))
    if in_features is None or out_features is None:
        raise CheckpointError(f"{path} lacks in_features or out_features. Download the checkpoint again.")
    if in_features < 1 or out_features < 1:
        raise CheckpointError(
            f"{path} has in_features {in_features} and out_features {out_features}: each must be at least 1."
        )
    bias = setting(path, config, "bias", bool)
    residual = bool(setting(path, config, "use_residual", bool))
    return DenseSpec(name, in_features, out_features, bias is not False, activation, residual=residual)


def torch_class(path: str) -> str:
    """The name of the torch class at import path ``path``, "" for one outside torch: sentence-transformers runs such a
    class only with remote code allowed, and uses its default instead."""
    return path.rsplit(".", 1)[-1] if path.startswith("torch.") else ""


def _transformer_config(folder: Path) -> Path | None:
    return next((folder / name for name in _TRANSFORMER_CONFIGS if (folder / name).is_file()), None)


def _transformer_settings(folder: Path) -> tuple[str | None, dict[str, Any]]:
    """The Transformer's task, and its settings."""
    path = _transformer_config(folder)
    if path is None:
        return None, {}
    config = read_object(path)
    check_arguments(path, config)
    check_lengths(path, config)
    return setting(path, config, "transformer_task", str), {
        "max_seq_length": setting(path, config, "max_seq_length", int),
        "do_lower_case": bool(setting(path, config, "do_lower_case", bool)),
        "tokenizer_args": tokenizer_args(path, config),
        "chat": chat_settings(path, config),
    }


def _model_settings(folder: Path) -> dict[str, Any]:
    """Settings of config_sentence_transformers.json."""
    path = folder / "config_sentence_transformers.json"
    if not path.is_file():
        return {}
    config = read_object(path)
    is_cross_encoder = (
        setting(path, config, "model_type", str) == "CrossEncoder" and (folder / "modules.json").is_file()
    )
    dimensions = next((setting(path, config, key, list) for key in _MATRYOSHKA_KEYS if config.get(key)), None)
    prompts = setting(path, config, "prompts", dict) or {}
    default = setting(path, config, "default_prompt_name", str)
    if not all(isinstance(prompt, str) for prompt in prompts.values()):
        raise CheckpointError(f"{path} has prompts that are not texts: correct them, or download the checkpoint again.")
    if (slotted := next((name for name, prompt in prompts.items() if SLOT in prompt), None)) is not None:
        raise CheckpointError(
            f"{path} has {SLOT} in the prompt {slotted!r}, which sentence-transformers reads as it stands and bei as "
            "the place of the text: take it out there, and write what is meant under prompts in a file for --config."
        )
    # PyLate puts a marker before the text, and before the prompt if there is one.
    named = {name: setting(path, config, f"{name}_prefix", str) for name in ("query", "document")}
    markers = {name: marker for name, marker in named.items() if marker}
    prompts.update({name: marker + prompts.get(name, "").removeprefix(marker) for name, marker in markers.items()})
    if default is not None and default not in prompts:
        raise CheckpointError(f"{path} names the default prompt {default!r}, but its prompts are {list(prompts)}.")
    if not all(type(dimension) is int and dimension > 0 for dimension in dimensions or ()):
        raise CheckpointError(f"{path} has Matryoshka dimensions {dimensions}: they must be positive integers.")
    return {
        "prompts": prompts,
        "default_prompt_name": default,
        "similarity": setting(path, config, "similarity_fn_name", str),
        "truncate_dim": setting(path, config, "truncate_dim", int),
        "max_active_dims": setting(path, config, "max_active_dims", int),
        "matryoshka_dimensions": tuple(dimensions) if dimensions else None,
        "activation": setting(path, config, "activation_fn", str) if is_cross_encoder else None,
        "is_cross_encoder": is_cross_encoder,
        "markers": tuple(markers.values()),
        "sides": pylate_sides(path, config),
    }


def _with_colbert_settings(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    """``settings`` and, where they lack the two sides, those of the original ColBERT's artifact.metadata: its lengths,
    and its markers, tokens of the vocabulary that it puts after [CLS], before prompts."""
    path = folder / "artifact.metadata"
    if settings.get("sides") or not path.is_file():
        return settings
    config = read_object(path)
    named = {"query": "query_token_id", "document": "doc_token_id"}  # tokens in spite of their names
    asked = {name: setting(path, config, key, str) for name, key in named.items()}
    markers = {name: f"{marker} " for name, marker in asked.items() if marker}
    prompts = dict(settings.get("prompts", {}))
    prompts.update(
        {name: marker + prompts.get(name, "").removeprefix(marker.strip()).lstrip() for name, marker in markers.items()}
    )
    return {**settings, "prompts": prompts, "markers": tuple(markers.values()), "sides": original_sides(path, config)}
