"""OpenDecider-nano's checkpoints: opendecider.json and the weights of a head beside those of an encoder.

As opendecider's ``nano.py`` and ``prompt.py`` read them (0.9.0). Its other models are adapters of language models.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from tokenizers import Tokenizer

from bei.artifact.label_layouts import KINDS_OF_QUESTIONS, OptionMarkers
from bei.errors import CheckpointError
from bei_build.checkpoint import laya
from bei_build.checkpoint.laya import count_of, special_token
from bei_build.checkpoint.locate import Location, check_entries
from bei_build.families.opendecider import ARCHITECTURE, ENCODER, MODEL_TYPE
from bei_build.files.json_settings import read_object
from bei_build.files.scratch import ScratchFolder
from bei_build.spec.model_spec import ModelSpec
from bei_build.weights.model_weights import SideModule

FILE = "opendecider.json"
_HEAD = "head.safetensors"
_REWRITTEN = ("config.json", "tokenizer_config.json")
_MOST_TOKENS = 2048  # where the file does not say


def with_opendecider(location: Location) -> Location:
    """``location`` of an OpenDecider-nano laid out as other checkpoints are, in a temporary folder; of other models
    itself. Raises CheckpointError and its subclasses."""
    folder = location.folder
    if not _is_nano(folder):
        if (folder / FILE).is_file() and (folder / _HEAD).is_file():
            raise CheckpointError(
                f"{folder / FILE} is not of the kind 'nano', the only one whose {_HEAD} bei reads: choose such a model."
            )
        return location
    check_entries(folder)
    if not (folder / _HEAD).is_file():
        raise CheckpointError(f"{folder} has {FILE} without {_HEAD}, the scores of options: download it again.")
    encoder = read_object(folder / "config.json")
    if (kind := encoder.get("model_type")) != ENCODER:
        raise CheckpointError(
            f"config.json beside {FILE} has model_type = {kind!r}; bei builds OpenDecider-nano on {ENCODER}: choose "
            "one on that."
        )
    path = folder / FILE
    length = count_of(path, read_object(path), "max_len", _MOST_TOKENS)
    scratch = ScratchFolder("bei-opendecider-")
    for file in folder.iterdir():
        if file.is_file() and file.name not in _REWRITTEN:
            (scratch.path / file.name).symlink_to(file.resolve())
    own = {"model_type": MODEL_TYPE, "architectures": [ARCHITECTURE], "usual_length": length}
    # Special tokens that a text spells are read as its characters.
    tokenizer = {**read_object(folder / "tokenizer_config.json"), "split_special_tokens": True}
    for name, content in zip(_REWRITTEN, ({**encoder, **own}, tokenizer), strict=True):
        (scratch.path / name).write_text(json.dumps(content))
    return replace(location, folder=scratch.path, scratch=scratch)


def head_modules(folder: Path) -> dict[str, SideModule]:
    """The head's layers, by our names; none of other models. A Sequential's, of which number 1 is the activation."""
    stored = {"scorer.dense": "0", "scorer.norm": "2", "scorer.out": "3"} if _is_nano(folder) else {}
    return {name: SideModule(folder / _HEAD, number) for name, number in stored.items()}


def option_markers_of(spec: ModelSpec, tokenizer: Tokenizer, folder: Path) -> OptionMarkers | None:
    """How questions and options are laid out for a model that scores markers, OpenDecider-nano or Laya; None for
    others. Raises CheckpointError."""
    if spec.head("option_logits") is None or not _is_nano(folder):
        return laya.option_markers_of(spec, tokenizer, folder)
    length = count_of(folder / FILE, read_object(folder / FILE), "max_len", _MOST_TOKENS)
    start, separator, marker = (special_token(kind, tokenizer, folder) for kind in ("cls", "sep", "mask"))
    return OptionMarkers(
        start_id=start[0],
        separator_id=separator[0],
        marker_id=marker[0],
        marker_token=marker[1],
        max_option_tokens=length,
        max_question_tokens=length,
        temperatures=dict.fromkeys(KINDS_OF_QUESTIONS, 1.0),
        form="opendecider",
    )


def _is_nano(folder: Path) -> bool:
    return (folder / FILE).is_file() and read_object(folder / FILE).get("kind") == "nano"
