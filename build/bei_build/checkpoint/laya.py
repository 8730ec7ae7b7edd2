"""Laya's checkpoints: rl_agent_config.json and the weights, beside folders of the encoder's config and its tokenizer.

Figures and defaults are those of laya's ``common.py`` and ``agent.py``.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from bei.artifact.label_layouts import KINDS_OF_QUESTIONS, OptionMarkers
from bei.artifact.reading_faults import MOST_TOKENS
from bei.errors import CheckpointError
from bei_build.checkpoint.locate import Location, check_entries
from bei_build.families.laya import ARCHITECTURE, ENCODER, MODEL_TYPE
from bei_build.files.json_settings import read_object
from bei_build.files.scratch import ScratchFolder
from bei_build.spec.model_spec import ModelSpec
from bei_build.tokenizer.library_tokenizer import token_of

FILE = "rl_agent_config.json"
_OPTION_TOKENS = 48  # read of one option
_LEAST_TEMPERATURE, _MOST_TEMPERATURE = 0.5, 5.0
_SIZES = ("2", "3-5", "6-10", "11+")


def with_laya(location: Location) -> Location:
    """``location`` of a Laya laid out as other checkpoints are, in a temporary folder; of other models itself. Raises
    CheckpointError."""
    folder = location.folder
    if not (folder / FILE).is_file():
        return location
    settings, encoder = read_object(folder / FILE), _encoder(folder)
    if (layout := settings.get("option_layout", "sequential")) != "sequential":
        raise CheckpointError(
            f"{folder / FILE} has option_layout = {layout!r}, in which options do not see each other; bei reads them "
            "one behind the other: choose a checkpoint of the layout sequential."
        )
    scratch = ScratchFolder("bei-laya-")
    for source in (folder / "tokenizer", folder):
        check_entries(source)
        for path in source.iterdir():
            linked = scratch.path / path.name
            if path.is_file() and path.name != "config.json" and not linked.exists():
                linked.symlink_to(path.resolve())
    own = {
        "model_type": MODEL_TYPE,
        "architectures": [ARCHITECTURE],
        "head_layers": settings.get("head_layers", 2),
        "usual_length": count_of(folder / FILE, settings, "max_len", 512),
    }
    (scratch.path / "config.json").write_text(json.dumps({**encoder, **own}))
    return replace(location, folder=scratch.path, scratch=scratch)


def option_markers_of(spec: ModelSpec, tokenizer: Tokenizer, folder: Path) -> OptionMarkers | None:
    """How questions and options are laid out for a model that scores markers; None for others. Raises
    CheckpointError."""
    if spec.head("option_logits") is None:
        return None
    path = folder / FILE
    settings = read_object(path)
    start, separator, marker = (special_token(kind, tokenizer, folder) for kind in ("cls", "sep", "mask"))
    return OptionMarkers(
        start_id=start[0],
        separator_id=separator[0],
        marker_id=marker[0],
        marker_token=marker[1],
        max_option_tokens=_OPTION_TOKENS,
        max_question_tokens=count_of(path, settings, "head_max_len", 192),
        temperatures=_temperatures(path, settings),
    )


def special_token(kind: str, tokenizer: Tokenizer, folder: Path) -> tuple[int, str]:
    """Its id and how it is spelled."""
    token = token_of(folder, kind)
    index = None if token is None else tokenizer.token_to_id(token)
    if token is None or index is None:
        raise CheckpointError(
            f"The tokenizer has no {kind}_token, which the model reads: put tokenizer_config.json of its encoder "
            "beside tokenizer.json."
        )
    return int(index), token


def _encoder(folder: Path) -> dict[str, Any]:
    """The encoder's config, beside the tokenizer."""
    path = folder / "encoder" / "config.json"
    if not path.is_file() or not (folder / "tokenizer").is_dir():
        raise CheckpointError(
            f"{folder} has {FILE} without encoder/config.json or without the folder tokenizer, which Laya saves beside "
            "it. Download the checkpoint again; of a repository with several, pass the folder of one."
        )
    encoder = read_object(path)
    if (kind := encoder.get("model_type")) != ENCODER:
        raise CheckpointError(f"{path} has model_type = {kind!r}; bei builds Laya on {ENCODER}: choose one on that.")
    return encoder


def count_of(path: Path, settings: dict[str, Any], key: str, default: int) -> int:
    """The tokens under ``key`` in the ``settings`` of ``path``. Raises CheckpointError."""
    value = settings.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST_TOKENS:
        raise CheckpointError(f"{path} has {key} = {value!r}: it must be a number of tokens, 1 or more.")
    return value


def _temperatures(path: Path, settings: dict[str, Any]) -> dict[str, float]:
    """By the kind of question, and where it has them by the number of options too; between the bounds of its code."""
    count = len(KINDS_OF_QUESTIONS)
    of_kinds, of_sizes = settings.get("temperature", [1.0] * count), settings.get("temperature_by_options", {})
    if not isinstance(of_kinds, list) or len(of_kinds) != count or not isinstance(of_sizes, dict):
        raise CheckpointError(
            f"{path} has no list of {count} numbers as temperature, or no object as temperature_by_options: correct "
            "them, or download the checkpoint again."
        )
    names = [f"{kind}:{size}" for kind in KINDS_OF_QUESTIONS for size in _SIZES]
    found = dict(zip(KINDS_OF_QUESTIONS, of_kinds, strict=True)) | {
        name: of_sizes[name] for name in names if name in of_sizes
    }
    for name, value in found.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise CheckpointError(f"{path} has the temperature {value!r} of {name}: it must be a number.")
    return {name: min(max(float(value), _LEAST_TEMPERATURE), _MOST_TEMPERATURE) for name, value in found.items()}
