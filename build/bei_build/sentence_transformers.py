"""The files sentence-transformers writes beside a checkpoint, read without the library.

``modules.json`` (Transformer, Pooling, then Dense and Normalize in any number), ``sentence_bert_config.json``,
``config_sentence_transformers.json``. Formats of sentence-transformers 2 to 6.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from bei.errors import CheckpointError
from bei_build.spec import Activation, DenseSpec, HeadLayer, NormalizeSpec, NormLayerSpec, NormSpec, Pooling

_POOLING_NAMES: dict[str, Pooling] = {
    "cls": "cls",
    "max": "max",
    "mean": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "weightedmean": "weighted_mean",
    "lasttoken": "last",
}
# Up to version 5 one boolean per mode; several are concatenated in this order.
_POOLING_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_DENSE_ACTIVATIONS: dict[str, Activation] = {
    "Identity": "identity",
    "Tanh": "tanh",
    "ReLU": "relu",
    "GELU": "gelu",
    "SiLU": "silu",
}
_MATRYOSHKA_KEYS = ("matryoshka_dims", "matryoshka_dimensions")
_TRANSFORMER_CONFIGS = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)

_T = TypeVar("_T")


@dataclass(frozen=True)
class SentenceTransformersFiles:
    """What the files say; defaults are those of a checkpoint without them.

    ``normalize`` is None where there is no ``modules.json``. ``tail`` are the layers behind the pooling, on each token
    where there is no ``pooling`` (``per_token``, late interaction); ``tail_folders[name]`` holds a layer's weights.
    ``sparse`` is how scores of the vocabulary are pooled (SPLADE), None for other models.
    ``transformer_folder`` holds config, tokenizer and weights; ``folders`` are all modules' folders.
    """

    transformer_folder: Path
    folders: tuple[Path, ...]
    pooling: tuple[Pooling, ...] | None = None
    tail: tuple[HeadLayer, ...] = ()
    tail_folders: dict[str, Path] = field(default_factory=dict)
    per_token: bool = False
    sparse: Literal["max", "sum"] | None = None
    normalize: bool | None = None
    max_seq_length: int | None = None
    do_lower_case: bool = False
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    similarity: str | None = None
    matryoshka_dimensions: tuple[int, ...] | None = None


def read_json(path: Path) -> Any:
    """Parse a JSON file of a checkpoint; CheckpointError if it is not JSON."""
    try:
        return json.loads(path.read_bytes())
    except (ValueError, OSError, RecursionError) as error:
        raise CheckpointError(f"{path} is not readable JSON ({error}). Download the checkpoint again.") from error


def read_object(path: Path) -> dict[str, Any]:
    """Parse a JSON file that holds settings by name; CheckpointError if it does not."""
    content = read_json(path)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} does not hold a JSON object. Download the checkpoint again.")
    return content


def read_sentence_transformers(folder: Path) -> SentenceTransformersFiles:
    """Read all files; a folder without ``modules.json`` gives the defaults. Raises CheckpointError."""
    prompts = _prompts(folder)
    if not (folder / "modules.json").is_file():
        return SentenceTransformersFiles(transformer_folder=folder, folders=(folder,), **prompts)
    modules = [(entry["type"].rsplit(".", 1)[-1], folder / entry["path"]) for entry in _modules(folder)]
    kinds = [kind for kind, _ in modules]
    if kinds[:2] == ["MLMTransformer", "SpladePooling"] or kinds[:2] == ["Transformer", "SpladePooling"]:
        return SentenceTransformersFiles(
            transformer_folder=modules[0][1],
            folders=tuple(path for _, path in modules),
            sparse=_splade_pooling(modules[1][1]),
            **_transformer_settings(modules[0][1]),
            **prompts,
        )
    per_token = kinds[:2] == ["Transformer", "Dense"] and "Pooling" not in kinds
    behind = modules[1:] if per_token else modules[2:]
    if kinds[0] != "Transformer" or not (per_token or kinds[1:2] == ["Pooling"]) or _unknown(behind):
        raise CheckpointError(
            f"modules.json asks for {' -> '.join(kinds)}; bei builds Transformer -> Pooling -> Dense / LayerNorm / "
            "Normalize, Transformer -> Dense (late interaction) and MLMTransformer -> SpladePooling."
        )
    normalize = kinds[-1] == "Normalize"
    behind = behind[:-1] if normalize else behind
    tail = tuple(_tail_layer(kind, path, f"tail.{index}") for index, (kind, path) in enumerate(behind))
    return SentenceTransformersFiles(
        transformer_folder=modules[0][1],
        folders=tuple(path for _, path in modules),
        pooling=None if per_token else _pooling(modules[1][1]),
        tail=tail,
        tail_folders={f"tail.{index}": path for index, (kind, path) in enumerate(behind) if kind != "Normalize"},
        per_token=per_token,
        normalize=normalize or per_token,
        **_transformer_settings(modules[0][1]),
        **prompts,
    )


def _unknown(modules: list[tuple[str, Path]]) -> set[str]:
    return {kind for kind, _ in modules} - {"Dense", "LayerNorm", "Normalize"}


def _tail_layer(kind: str, folder: Path, name: str) -> HeadLayer:
    if kind == "Dense":
        return _dense(folder, name)
    if kind == "LayerNorm":
        path = folder / "config.json"
        width = _setting(path, read_object(path), "dimension", int)
        if width is None:
            raise CheckpointError(f"{path} lacks dimension. Download the checkpoint again.")
        return NormLayerSpec(name, width, NormSpec(1e-5))  # torch's default, which the module uses
    return NormalizeSpec()


def _splade_pooling(folder: Path) -> Literal["max", "sum"]:
    path = folder / "config.json"
    config = read_object(path)
    strategy, activation = config.get("pooling_strategy", "max"), config.get("activation_function", "relu")
    if strategy not in ("max", "sum") or activation != "relu":
        raise CheckpointError(f"{path} asks for {strategy} pooling of {activation}; supported: max and sum of relu.")
    return "max" if strategy == "max" else "sum"


def _modules(folder: Path) -> list[dict[str, str]]:
    entries = read_json(folder / "modules.json")
    kinds = {"type": str, "path": str, "idx": int}
    if not isinstance(entries, list) or not all(
        isinstance(entry, dict) and all(isinstance(entry.get(key, 0), kind) for key, kind in kinds.items())
        for entry in entries
    ):
        raise CheckpointError(f"{folder / 'modules.json'} is not a list of modules. Download the checkpoint again.")
    return sorted(entries, key=lambda entry: entry.get("idx", 0))


def _pooling(folder: Path) -> tuple[Pooling, ...]:
    config = read_object(folder / "config.json")
    modes = config.get("pooling_mode") or [name for flag, name in _POOLING_FLAGS.items() if config.get(flag)] or "mean"
    modes = modes if isinstance(modes, list) else [modes]
    unknown = [mode for mode in modes if not isinstance(mode, str) or mode not in _POOLING_NAMES]
    if unknown:
        raise CheckpointError(f"{folder.name} asks for pooling {unknown[0]!r}. Supported: {', '.join(_POOLING_NAMES)}.")
    if config.get("include_prompt") is False:
        raise CheckpointError(f"{folder.name} leaves prompts out of the pooling (include_prompt): not supported.")
    return tuple(_POOLING_NAMES[mode] for mode in modes)


def _dense(folder: Path, name: str) -> DenseSpec:
    path = folder / "config.json"
    config = read_object(path)
    activation = str(config.get("activation_function", "torch.nn.modules.activation.Tanh")).rsplit(".", 1)[-1]
    if activation not in _DENSE_ACTIVATIONS or config.get("use_residual"):
        raise CheckpointError(
            f"{folder.name} (Dense) has activation {activation} and use_residual {config.get('use_residual', False)}; "
            f"supported: {', '.join(_DENSE_ACTIVATIONS)}, without residual."
        )
    in_features, out_features = (_setting(path, config, key, int) for key in ("in_features", "out_features"))
    if in_features is None or out_features is None:
        raise CheckpointError(f"{path} lacks in_features or out_features. Download the checkpoint again.")
    bias = _setting(path, config, "bias", bool)
    return DenseSpec(name, in_features, out_features, True if bias is None else bias, _DENSE_ACTIVATIONS[activation])


def _transformer_settings(folder: Path) -> dict[str, Any]:
    for name in _TRANSFORMER_CONFIGS:
        if (folder / name).is_file():
            path = folder / name
            config = read_object(path)
            return {
                "max_seq_length": _setting(path, config, "max_seq_length", int),
                "do_lower_case": bool(_setting(path, config, "do_lower_case", bool)),
            }
    return {}


def _prompts(folder: Path) -> dict[str, Any]:
    path = folder / "config_sentence_transformers.json"
    if not path.is_file():
        return {}
    config = read_object(path)
    dimensions = next((_setting(path, config, key, list) for key in _MATRYOSHKA_KEYS if config.get(key)), None)
    prompts = _setting(path, config, "prompts", dict) or {}
    default = _setting(path, config, "default_prompt_name", str)
    if not all(isinstance(prompt, str) for prompt in prompts.values()):
        raise CheckpointError(f"{path} has prompts that are not texts: correct them, or download the checkpoint again.")
    if default is not None and default not in prompts:
        raise CheckpointError(f"{path} names the default prompt {default!r}, but its prompts are {list(prompts)}.")
    if not all(type(dimension) is int and dimension > 0 for dimension in dimensions or ()):
        raise CheckpointError(f"{path} has Matryoshka dimensions {dimensions}: they must be positive integers.")
    return {
        "prompts": prompts,
        "default_prompt_name": default,
        "similarity": _setting(path, config, "similarity_fn_name", str),
        "matryoshka_dimensions": tuple(dimensions) if dimensions else None,
    }


def _setting(path: Path, config: dict[str, Any], key: str, kind: type[_T]) -> _T | None:
    """``config[key]``, None where it is absent or null. Raises CheckpointError where it is not a ``kind``."""
    value = config.get(key)
    if value is not None and type(value) is not kind:
        raise CheckpointError(f"{path} has {key} = {value!r}: correct it to a value of type {kind.__name__}.")
    return value
