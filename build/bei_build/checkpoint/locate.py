"""Finding a checkpoint: a local folder, an installed Python package that carries a model, or a hub repository.

The repository and the name of a model that an installed package carries mean that package: no hub is asked.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

from bei.artifact.model_names import near_names, packaged_model
from bei.errors import CheckpointError, CheckpointNotFoundError, ConfigError, HubUnreachableError
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
    """Location of a checkpoint. ``kind`` is path, package or hub; ``model`` the folder's, package's or repository's
    name."""

    folder: Path
    model: str
    kind: str
    revision: str | None = None

    @property
    def name(self) -> str:
        """The name of what is built of it, unless the user gives one."""
        same = None if self.kind == "path" else packaged_model(self.model)
        return same.name if same else self.model


def locate(model: str, revision: str | None = None) -> Location:
    """Find ``model``: an existing folder, else an installed package, else a hub repository.

    Raises CheckpointNotFoundError, HubUnreachableError; ConfigError for a ``revision`` of a model that is not on the
    hub.
    """
    path = home_expanded(model)
    if path.is_dir():
        _check_no_revision(revision, f"{model} is a folder")
        return Location(path.resolve(), path.resolve().name, "path")
    if path.exists() or model.startswith((".", "/", "~")):
        raise CheckpointNotFoundError(
            f"{model} is not a folder. Pass a checkpoint's folder, the name of an installed package, or a hub id."
        )
    same = packaged_model(model)
    package = same.package if same and (revision is None or model != same.repository) else model
    if (folder := _package_folder(package)) is not None:
        _check_no_revision(revision, f"{model} is an installed package")
        return Location(folder, package, "package")
    return _from_hub(same.repository if same else model, revision)


def _check_no_revision(revision: str | None, what: str) -> None:
    if revision is not None:
        raise ConfigError(f"revision {revision} works with repositories on the hub only, and {what}: leave it out.")


def check_entries(folder: Path) -> None:
    """Raise CheckpointError for an entry with a checkpoint file's name that is a pipe, a device, or a broken link:
    reading it could block for ever, or the checkpoint be read without that file; and for one that may not be read,
    which libraries take for a damaged one."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if not path.name.endswith(_READ) or path.is_dir():
            continue
        try:
            check_regular(path)
        except UnfitError as error:
            raise CheckpointError(f"{path} cannot be read: {error}. Download the checkpoint again.") from error
        if not os.access(path, os.R_OK):
            raise CheckpointError(f"{path} may not be read by this process's user: change its permissions.")


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

    try:
        folder = Path(snapshot_download(model, revision=revision, allow_patterns=_HUB_PATTERNS))
        if any(not list(part.glob("*.safetensors")) for part in _folders_with_weights(folder)):
            folder = Path(snapshot_download(model, revision=revision, allow_patterns=[*_HUB_PATTERNS, *_HUB_FALLBACK]))
    except Exception as error:  # of the HTTP library too, which is another one in each version of huggingface_hub
        raise _refusal(model, revision, error) from error
    return Location(folder, model, "hub", folder.name)  # a snapshot's folder has the name of its commit


def _refusal(model: str, revision: str | None, error: Exception) -> CheckpointNotFoundError:
    """What the hub has answered, or that it has not."""
    from huggingface_hub import errors

    here = f"{model!r} is neither a folder here nor an installed package"
    if isinstance(error, errors.HFValidationError):
        return CheckpointNotFoundError(f"{here}, nor an id that the hub could have (owner/name).{_ways(model)}")
    if isinstance(error, errors.GatedRepoError):
        return CheckpointNotFoundError(
            f"The hub gives {model!r} only to those who have accepted its terms: accept them on its page, and set "
            "HF_TOKEN."
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return CheckpointNotFoundError(
            f"{here}, and the hub has no repository of this name: check the spelling (owner/name), or set HF_TOKEN if "
            f"it is private.{_ways(model)}"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return CheckpointNotFoundError(f"The hub has no revision {revision!r} of {model}: check its spelling.")
    reason, status = _reason(error)
    if status in (401, 403):
        return CheckpointNotFoundError(
            f"{here}, and the hub refuses it ({status}): check the spelling (owner/name), and whether HF_TOKEN is "
            f"valid and may read it.{_ways(model)}"
        )
    return HubUnreachableError(
        f"{here}, and the hub could not be asked ({reason}): check the network (HF_ENDPOINT names a mirror), "
        f"or pass the path of a downloaded checkpoint.{_ways(model)}"
    )


def _reason(error: Exception) -> tuple[str, int | None]:
    """The error at the beginning of the chain, which says more than that of the library's cache, and the status that
    the hub answered with."""
    from huggingface_hub import errors

    while error.__cause__ is not None and not isinstance(error, errors.HfHubHTTPError):
        if not isinstance(error.__cause__, Exception):
            break
        error = error.__cause__
    status = getattr(getattr(error, "response", None), "status_code", None)
    return (f"it answered {status}" if status else f"{type(error).__name__}: {error}".strip(": ")), status


def _ways(model: str) -> str:
    """The package that carries ``model``, or names that may have been meant."""
    if same := packaged_model(model):
        return f" Without the hub: {same.install}."
    near = near_names(model, ())
    return f" Did you mean {' or '.join(near)}?" if near else ""
