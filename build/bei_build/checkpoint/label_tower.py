"""The encoder of labels of a GLiNER with two: laid out as a checkpoint of its own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from bei.errors import CheckpointError, CheckpointNotFoundError, HubUnreachableError
from bei_build.checkpoint.adapter_folder import is_tokenizer
from bei_build.checkpoint.checkpoint import Checkpoint
from bei_build.checkpoint.gliner import FILE
from bei_build.checkpoint.heads import HeadChoice
from bei_build.checkpoint.locate import check_entries, locate
from bei_build.checkpoint.read import read_checkpoint
from bei_build.families.base import embedder
from bei_build.families.gliner import LABELS_PROJECTION, TWO_ENCODERS, of_labels, width_of
from bei_build.families.table import FAMILIES
from bei_build.files.json_settings import read_object
from bei_build.files.scratch import ScratchFolder
from bei_build.spec.parts import DenseSpec
from bei_build.tokenizer.library_tokenizer import TokenizerChoice
from bei_build.weights.tensor_store import weight_files

_TOKENIZER = "labels_tokenizer"  # the folder in which the library saves it
_CONFIG = "labels_encoder_config"
_LONGEST = 512  # tokens of a label, of encoders that read more


def read_label_tower(
    checkpoint: Checkpoint, tokenizer_choice: TokenizerChoice = "auto", max_seq_len: int | None = None
) -> Checkpoint | None:
    """The encoder of labels beside that of texts, ``checkpoint``; None: it has none. A label has ``max_seq_len`` tokens
    at most.

    Config and tokenizer are those in the checkpoint's folder, as the library saves them, else those of the model that
    ``labels_encoder`` names. Raises CheckpointError and its subclasses.
    """
    if checkpoint.spec.architecture not in TWO_ENCODERS:
        return None
    settings, folder = checkpoint.config.gliner, checkpoint.folder
    config, tokenizer = settings.get(_CONFIG), folder / _TOKENIZER
    if (source := labels_encoder_of(folder, settings)) is not None:
        config = config or read_object(source / "config.json")
        tokenizer = tokenizer if _is_tokenizer(tokenizer) else source
    scratch = ScratchFolder("bei-labels-")
    _lay_out(scratch.path, config, tokenizer, folder)
    location = replace(checkpoint.location, folder=scratch.path, scratch=scratch, gguf=None)
    found = read_checkpoint(location, HeadChoice("embed", "mean"), tokenizer_choice=tokenizer_choice)
    head, width = found.spec.heads[0], width_of(settings)
    if found.spec.hidden_size != width:
        head = replace(head, layers=(DenseSpec(LABELS_PROJECTION, found.spec.hidden_size, width),))
    return replace(
        found,
        family=of_labels(found.family),
        spec=replace(found.spec, heads=(head,)),
        max_seq_len=min(found.max_seq_len, max_seq_len or _LONGEST, _LONGEST),
    )


def labels_encoder_of(folder: Path, settings: Mapping[str, Any]) -> Path | None:
    """The folder of the encoder of labels that ``settings`` of the model in ``folder`` name, where the model's own
    lacks the encoder's config or tokenizer; None: it has both, or reads labels otherwise. Raises CheckpointError and
    its subclasses."""
    if not settings.get("labels_encoder") or (settings.get(_CONFIG) and _is_tokenizer(folder / _TOKENIZER)):
        return None
    return _located(settings["labels_encoder"])


def _is_tokenizer(folder: Path) -> bool:
    return (folder / "tokenizer_config.json").is_file()


def _located(name: object) -> Path:
    try:
        return locate(str(name), with_weights=False).folder
    except (CheckpointNotFoundError, HubUnreachableError) as error:
        raise type(error)(
            f"{FILE} names {name!r} as the encoder of labels, whose tokenizer is not in the checkpoint. {error} Or "
            "load the model with the gliner library and save it with save_pretrained, which puts it there."
        ) from error


def _lay_out(folder: Path, config: object, tokenizer: Path, model: Path) -> None:
    """Into ``folder``: a config.json, and links to the files of ``tokenizer`` and the weights of ``model``."""
    if not isinstance(config, Mapping):
        raise CheckpointError(f"{FILE} has {_CONFIG} = {str(config)[:80]!r}, which is no config.")
    check_entries(tokenizer)
    (folder / "config.json").write_text(json.dumps({**config, "architectures": [_base_class(config)]}))
    for path in filter(is_tokenizer, tokenizer.iterdir()):
        (folder / path.name).symlink_to(path.resolve())
    for path in (*weight_files(model), *model.glob("*.index.json")):
        (folder / path.name).symlink_to(path.resolve())


def _base_class(config: Mapping[str, Any]) -> str:
    """The class of the encoder alone. Raises CheckpointError."""
    kind = config.get("model_type")
    families = [family for family in FAMILIES if family.model_type == kind]
    if found := next(
        (name for family in families for name, of in family.architectures.items() if of is embedder), None
    ):
        return found
    raise CheckpointError(f"{FILE} has an encoder of labels of model_type {kind!r}, which bei does not build.")
