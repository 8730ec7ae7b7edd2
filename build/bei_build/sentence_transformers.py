"""The files sentence-transformers writes beside a checkpoint, read without the library.

``modules.json`` (Transformer, Pooling, then Dense and Normalize in any number), ``sentence_bert_config.json``,
``config_sentence_transformers.json``. Formats of sentence-transformers 2 to 6.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bei.errors import CheckpointError
from bei_build.spec import Activation, DenseSpec, NormalizeSpec, Pooling, TailLayer

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
_TRANSFORMER_CONFIGS = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)


@dataclass(frozen=True)
class SentenceTransformersFiles:
    """What the files say; defaults are those of a checkpoint without them.

    ``normalize`` is None where there is no ``modules.json``. ``tail_folders[i]`` holds the weights of ``tail[i]``.
    ``transformer_folder`` holds config, tokenizer and weights.
    """

    transformer_folder: Path
    pooling: tuple[Pooling, ...] | None = None
    tail: tuple[TailLayer, ...] = ()
    tail_folders: tuple[Path, ...] = ()
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
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path} is not readable JSON ({error}). Download the checkpoint again.") from error


def read_sentence_transformers(folder: Path) -> SentenceTransformersFiles:
    """Read all files; a folder without ``modules.json`` gives the defaults. Raises CheckpointError."""
    prompts = _prompts(folder)
    if not (folder / "modules.json").is_file():
        return SentenceTransformersFiles(transformer_folder=folder, **prompts)
    modules = [(entry["type"].rsplit(".", 1)[-1], folder / entry["path"]) for entry in _modules(folder)]
    kinds = [kind for kind, _ in modules]
    if kinds[:2] != ["Transformer", "Pooling"] or set(kinds[2:]) - {"Dense", "Normalize"}:
        raise CheckpointError(
            f"modules.json asks for {' -> '.join(kinds)}; bei builds Transformer -> Pooling -> Dense / Normalize."
        )
    normalize = kinds[-1] == "Normalize"
    tail_modules = modules[2:-1] if normalize else modules[2:]
    return SentenceTransformersFiles(
        transformer_folder=modules[0][1],
        pooling=_pooling(modules[1][1]),
        tail=tuple(_dense(path) if kind == "Dense" else NormalizeSpec() for kind, path in tail_modules),
        tail_folders=tuple(path for _, path in tail_modules),
        normalize=normalize,
        **_transformer_settings(modules[0][1]),
        **prompts,
    )


def _modules(folder: Path) -> list[dict[str, str]]:
    entries = read_json(folder / "modules.json")
    if not isinstance(entries, list) or not all(isinstance(e, dict) and {"type", "path"} <= e.keys() for e in entries):
        raise CheckpointError(f"{folder / 'modules.json'} is not a list of modules. Download the checkpoint again.")
    return sorted(entries, key=lambda entry: entry.get("idx", 0))


def _pooling(folder: Path) -> tuple[Pooling, ...]:
    config = read_json(folder / "config.json")
    modes = config.get("pooling_mode") or [name for flag, name in _POOLING_FLAGS.items() if config.get(flag)] or "mean"
    modes = [modes] if isinstance(modes, str) else modes
    unknown = [mode for mode in modes if mode not in _POOLING_NAMES]
    if unknown:
        raise CheckpointError(f"{folder.name} asks for pooling {unknown[0]!r}. Supported: {', '.join(_POOLING_NAMES)}.")
    if config.get("include_prompt") is False:
        raise CheckpointError(f"{folder.name} leaves prompts out of the pooling (include_prompt): not supported.")
    return tuple(_POOLING_NAMES[mode] for mode in modes)


def _dense(folder: Path) -> DenseSpec:
    config = read_json(folder / "config.json")
    activation = config.get("activation_function", "torch.nn.modules.activation.Tanh").rsplit(".", 1)[-1]
    if activation not in _DENSE_ACTIVATIONS or config.get("use_residual"):
        raise CheckpointError(
            f"{folder.name} (Dense) has activation {activation} and use_residual {config.get('use_residual', False)}; "
            f"supported: {', '.join(_DENSE_ACTIVATIONS)}, without residual."
        )
    return DenseSpec(
        config["in_features"], config["out_features"], config.get("bias", True), _DENSE_ACTIVATIONS[activation]
    )


def _transformer_settings(folder: Path) -> dict[str, Any]:
    for name in _TRANSFORMER_CONFIGS:
        if (folder / name).is_file():
            config = read_json(folder / name)
            return {
                "max_seq_length": config.get("max_seq_length"),
                "do_lower_case": bool(config.get("do_lower_case", False)),
            }
    return {}


def _prompts(folder: Path) -> dict[str, Any]:
    path = folder / "config_sentence_transformers.json"
    if not path.is_file():
        return {}
    config = read_json(path)
    dimensions = config.get("matryoshka_dims") or config.get("matryoshka_dimensions")
    return {
        "prompts": config.get("prompts") or {},
        "default_prompt_name": config.get("default_prompt_name"),
        "similarity": config.get("similarity_fn_name"),
        "matryoshka_dimensions": tuple(dimensions) if dimensions else None,
    }
