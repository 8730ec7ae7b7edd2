"""A repository that holds a LoRA adapter and no model: laid out with its base model in a temporary folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from bei.errors import CheckpointError, CheckpointNotFoundError, HubUnreachableError
from bei_build.checkpoint.locate import READ_SUFFIXES, Location, check_entries, locate
from bei_build.files.json_settings import read_object
from bei_build.files.scratch import ScratchFolder
from bei_build.weights.lora import Adapter
from bei_build.weights.peft_adapter import CONFIG, read_adapter
from bei_build.weights.tensor_store import check_weights

_MODULES = "modules.json"
# Beginnings of the names of sentence-transformers' settings: sentence_bert_config.json, sentence_roberta_config.json,
# ..., config_sentence_transformers.json.
_OF_MODULES = ("sentence_", "config_sentence_transformers")
# Files of a processor of images, which are taken from one of the two folders.
_PROCESSOR = ("preprocessor_config.json", "processor_config.json")
# Files of a tokenizer, likewise.
_TOKENIZER = ("tokenizer", "vocab", "merges", "special_tokens_map", "added_tokens", "spiece", "sentencepiece", "spm")


def with_base(location: Location) -> tuple[Location, Adapter | None]:
    """``location`` with the files of its base model, and its adapter, which is to be merged; ``location`` itself where
    it holds no adapter.

    As PEFT and transformers load it: the base's config and weights; the adapter's own tokenizer, processor and modules
    where it has them, else the base's. Raises CheckpointError and its subclasses.
    """
    folder = location.folder
    if not (folder / CONFIG).is_file():
        return location, None
    check_entries(folder)
    if any(folder.glob("model*.safetensors")) or any(folder.glob("pytorch_model*.bin")):
        raise CheckpointError(
            f"{folder} holds an adapter beside the weights of a model, and does not say whether they have it already. "
            "Build the base model with --lora NAME=PATH of the adapter, or take one of the two out."
        )
    adapter = read_adapter(folder)
    base = base_of(folder)
    scratch = ScratchFolder("bei-adapter-")
    _link(base, scratch.path, lambda path: not _is_replaced(path, folder))
    has_tokenizer = _has_tokenizer(folder)
    _link(
        folder,
        scratch.path,
        lambda path: (has_tokenizer and is_tokenizer(path)) or path.name in _PROCESSOR or _is_of_modules(path, folder),
    )
    return replace(location, folder=scratch.path, scratch=scratch), Adapter(location.name, (), adapter)


def base_of(folder: Path) -> Path:
    """The folder of the base model that the adapter in ``folder`` names. Raises CheckpointError and its subclasses."""
    settings = read_object(folder / CONFIG)
    name, revision = settings.get("base_model_name_or_path"), settings.get("revision")
    build = f"build that model with --lora NAME={folder}"
    if not isinstance(name, str) or not name:
        raise CheckpointError(f"{folder} holds an adapter, and {CONFIG} does not say of which model: {build}.")
    try:
        base = locate(name, revision if isinstance(revision, str) and revision else None)
    except (CheckpointNotFoundError, HubUnreachableError) as error:
        raise type(error)(f"{folder} holds an adapter of {name}. {error} If it is elsewhere, {build}.") from error
    if (base.folder / CONFIG).is_file():
        raise CheckpointError(
            f"{folder} holds an adapter of {name}, which holds one itself: merge one with PEFT first."
        )
    if base.gguf is not None or not (base.folder / "config.json").is_file():
        raise CheckpointError(
            f"{folder} holds an adapter of {name}, which is no folder with config.json and weights: {build}."
        )
    check_weights(base.folder)
    return base.folder


def _is_replaced(path: Path, adapter: Path) -> bool:
    """True if the base's ``path`` is one of those that ``adapter`` has itself."""
    if (adapter / _MODULES).is_file() and (path.is_dir() or _is_of_modules(path, path.parent)):
        return True
    if path.name in _PROCESSOR:
        return any((adapter / name).is_file() for name in _PROCESSOR)
    return _has_tokenizer(adapter) and is_tokenizer(path)


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))


def is_tokenizer(path: Path) -> bool:
    """True for a file of a tokenizer, by its name."""
    return path.is_file() and path.name.startswith(_TOKENIZER) and path.suffix in READ_SUFFIXES


def _is_of_modules(path: Path, folder: Path) -> bool:
    """True for sentence-transformers' files, and for the folders of its modules."""
    if path.is_dir():
        return (folder / _MODULES).is_file()
    return path.name == _MODULES or path.name.startswith(_OF_MODULES)


def _link(source: Path, folder: Path, is_wanted: Callable[[Path], bool]) -> None:
    """Link the entries of ``source`` that are wanted: files, and folders of modules with their files."""
    for path in filter(is_wanted, sorted(source.iterdir())):
        if path.is_file():
            (folder / path.name).symlink_to(path.resolve())
            continue
        (folder / path.name).mkdir()
        for file in (one for one in path.iterdir() if one.is_file()):
            (folder / path.name / file.name).symlink_to(file.resolve())
