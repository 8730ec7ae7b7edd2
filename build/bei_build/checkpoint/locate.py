"""Finding a checkpoint: a local folder, an installed Python package that carries a model, or a hub repository."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

from bei.errors import CheckpointError, CheckpointNotFoundError, ConfigError
from bei.utils.libraries import importing
from bei.utils.untrusted_files import UnfitError, check_regular, home_expanded

_HUB_PATTERNS = ["*.json", "*.txt", "*.model", "*.safetensors", "*.safetensors.index.json", "*_linear.pt"]
_HUB_PATTERNS += ["artifact.metadata", "*.jinja"]
# Endings of the names of all files that may be read.
_READ = (".json", ".txt", ".model", ".metadata", ".jinja", ".safetensors", ".bin", ".pt")
# Variables that set huggingface_hub's cache folder; the default is below the home directory.
_HUB_FOLDERS = {"HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME"}
_HUB_FALLBACK = ["pytorch_model*.bin", "pytorch_model.bin.index.json", "*/pytorch_model.bin"]


@dataclass(frozen=True)
class Location:
    """Location of a checkpoint. ``kind`` is path, package or hub."""

    folder: Path
    model: str
    kind: str
    revision: str | None = None


def locate(model: str, revision: str | None = None) -> Location:
    """Find ``model``: an existing folder, else an installed package, else a hub repository.

    Raises CheckpointNotFoundError; ConfigError for a ``revision`` of a model that is not on the hub.
    """
    path = home_expanded(model)
    if path.is_dir():
        _check_no_revision(revision, f"{model} is a folder")
        return Location(path.resolve(), path.resolve().name, "path")
    if path.exists() or model.startswith((".", "/", "~")):
        raise CheckpointNotFoundError(
            f"{model} is not a folder. Pass a checkpoint's folder, the name of an installed package, or a hub id."
        )
    if (folder := _package_folder(model)) is not None:
        _check_no_revision(revision, f"{model} is an installed package")
        return Location(folder, model, "package")
    return _from_hub(model, revision)


def _check_no_revision(revision: str | None, what: str) -> None:
    if revision is not None:
        raise ConfigError(f"revision {revision} works with repositories on the hub only, and {what}: leave it out.")


def check_entries(folder: Path) -> None:
    """Raise CheckpointError for an entry with a checkpoint file's name that is a pipe, a device, or a broken link:
    reading it could block for ever, or the checkpoint be read without that file."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if not path.name.endswith(_READ) or path.is_dir():
            continue
        try:
            check_regular(path)
        except UnfitError as error:
            raise CheckpointError(f"{path} cannot be read: {error}. Download the checkpoint again.") from error


def _package_folder(model: str) -> Path | None:
    """The folder with a ``config.json`` inside the installed package ``model``, found without importing it."""
    name = model.replace("-", "_")
    if not name.isidentifier():
        return None
    found = importlib.util.find_spec(name)
    if found is None or not found.submodule_search_locations:
        return None
    roots = [Path(location) for location in found.submodule_search_locations]
    for root in roots:
        marks = sorted(root.rglob("modules.json")) or sorted(root.rglob("config.json"))
        if marks:
            return marks[0].parent
    raise CheckpointNotFoundError(
        f"The installed package {model!r} carries no checkpoint (no config.json in it). "
        "Pass a checkpoint's folder or a hub id (owner/name)."
    )


def _folders_with_weights(folder: Path) -> list[Path]:
    """The root of a downloaded repository, and its module folders that have weights."""
    return [folder, *(path.parent for kind in ("Dense", "LayerNorm") for path in folder.glob(f"*_{kind}/config.json"))]


def _from_hub(model: str, revision: str | None) -> Location:
    if os.path.expanduser("~") == "~" and not _HUB_FOLDERS & os.environ.keys():
        raise CheckpointNotFoundError(
            f"{model!r} is no folder here, and there is no home directory to keep what the hub gives: set HOME or "
            "HF_HOME, or pass the path of a downloaded checkpoint."
        )
    with importing("huggingface_hub", "cpu", "Asking the hub for a checkpoint"):
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(model, revision=revision, allow_patterns=_HUB_PATTERNS))
        if any(not list(part.glob("*.safetensors")) for part in _folders_with_weights(folder)):
            folder = Path(snapshot_download(model, revision=revision, allow_patterns=[*_HUB_PATTERNS, *_HUB_FALLBACK]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise CheckpointNotFoundError(
            f"{model!r} is neither a folder here nor an installed package, and the hub did not give it "
            f"({type(error).__name__}). Check the name, or the network, or pass the path of a downloaded checkpoint."
        ) from error
    return Location(folder, model, "hub", folder.name)  # a snapshot's folder has the name of its commit
