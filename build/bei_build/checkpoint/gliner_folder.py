"""A GLiNER or GLiREL repository without its encoder's tokenizer or config, as most are published: laid out in a
temporary folder with those of the model that it names."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from bei.errors import CheckpointNotFoundError, HubUnreachableError
from bei_build.checkpoint.adapter_folder import is_tokenizer
from bei_build.checkpoint.gliner import FILE as GLINER
from bei_build.checkpoint.gliner import encoder_config, has_tokenizer
from bei_build.checkpoint.glirel import FILE as GLIREL
from bei_build.checkpoint.locate import Location, check_entries, locate
from bei_build.files.json_settings import read_object
from bei_build.files.scratch import ScratchFolder

_SAVE = " Or load the model with the gliner library and save it with save_pretrained, which puts them there."


def with_encoder(location: Location) -> Location:
    """``location`` with the tokenizer and the config of the encoder that its settings name, as the libraries load it;
    ``location`` itself where it has both, and for other models. Raises CheckpointError and its subclasses."""
    folder = location.folder
    if (encoder := encoder_of(folder)) is None:
        return location
    check_entries(folder)
    check_entries(encoder)
    scratch = ScratchFolder("bei-gliner-")
    for path in folder.iterdir():
        (scratch.path / path.name).symlink_to(path.resolve())
    if not has_tokenizer(folder):
        for path in filter(is_tokenizer, encoder.iterdir()):
            if not (linked := scratch.path / path.name).exists():
                linked.symlink_to(path.resolve())
    file = _settings_file(folder)
    assert file is not None, "it has named the encoder"
    settings, config = read_object(file), encoder / "config.json"
    if not settings.get("encoder_config") and config.is_file():
        own = read_object(config)
        own.pop("vocab_size", None)  # before the library's tokens were added
        (scratch.path / file.name).unlink()
        (scratch.path / file.name).write_text(json.dumps({**settings, "encoder_config": own}))
    return replace(location, folder=scratch.path, scratch=scratch)


def encoder_of(folder: Path) -> Path | None:
    """The folder of the encoder that the model in ``folder`` names, where that lacks the encoder's tokenizer, or a
    config that bei does not know by the name; None: it has both, or is another model. Raises CheckpointError and its
    subclasses."""
    path = _settings_file(folder)
    if path is None or (folder / "config.json").is_file():
        return None
    settings = read_object(path)
    name = settings.get("model_name")
    missing = [
        what
        for what, is_there in (("tokenizer", has_tokenizer(folder)), ("config", encoder_config(settings) is not None))
        if not is_there
    ]
    if not missing or not isinstance(name, str) or not name:
        return None
    try:
        return locate(name, with_weights=False).folder
    except (CheckpointNotFoundError, HubUnreachableError) as error:
        raise type(error)(
            f"{path.name} names {name!r} as the encoder, and the checkpoint lacks its {' and '.join(missing)}. {error}"
            f"{_SAVE if path.name == GLINER else ''}"
        ) from error


def _settings_file(folder: Path) -> Path | None:
    """The settings of a GLiNER or GLiREL; None: it is another model."""
    return next((path for name in (GLINER, GLIREL) if (path := folder / name).is_file()), None)
