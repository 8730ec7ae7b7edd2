"""Finding a checkpoint: a local folder, an installed Python package that carries a model, or a hub repository.

The repository and the name of a model that an installed package carries mean that package: no hub is asked.
"""

from __future__ import annotations

import glob
import importlib.util
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bei.artifact.model_names import near_names, packaged_model
from bei.errors import CheckpointError, CheckpointNotFoundError, ConfigError, HubUnreachableError
from bei.utils.full_disk import full_disk
from bei.utils.libraries import importing
from bei.utils.untrusted_files import UnfitError, check_regular, home_expanded
from bei_build.files.scratch import ScratchFolder

_HUB_SETTINGS = ["*.json", "*.txt", "*.model"]
_HUB_PATTERNS = ["*.json", "*.txt", "*.model", "*.safetensors", "*.safetensors.index.json", "*_linear.pt"]
_HUB_PATTERNS += ["artifact.metadata", "*.jinja", "embedding.q4_k_m.bin"]
# Configs, tokenizers and chat templates; weights are found by ``weight_files``.
READ_SUFFIXES = (".json", ".txt", ".model", ".metadata", ".jinja")
# Endings of the names of all files that may be read.
_READ = (*READ_SUFFIXES, ".safetensors", ".bin", ".pt", ".gguf", ".onnx")
# Weights that are read rather than a GGUF file beside them.
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
# Variables that set huggingface_hub's cache folder; the default is below the home directory.
_HUB_FOLDERS = {"HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME"}
_ONNX = ("model.onnx", "onnx/model.onnx")
# What git leaves in the place of a large file where its extension LFS is not installed: three lines.
_LFS_START, _MOST_LFS_BYTES = b"version https://git-lfs.github.com/spec/", 1024
_HUB_FALLBACK = ["pytorch_model*.bin", "pytorch_model.bin.index.json", "*/pytorch_model.bin"]


@dataclass(frozen=True)
class Location:
    """Location of a checkpoint. ``kind`` is path, package or hub; ``model`` the folder's, package's or repository's
    name. ``gguf``: the file that holds its weights, where it is one of GGUF; ``scratch``: the temporary folder that
    such a one is laid out in."""

    folder: Path
    model: str
    kind: str
    revision: str | None = None
    gguf: Path | None = None
    scratch: ScratchFolder | None = field(default=None, compare=False, repr=False)

    @property
    def name(self) -> str:
        """The name of what is built of it, unless the user gives one."""
        same = None if self.kind == "path" else packaged_model(self.model)
        return same.name if same else self.model


def locate(model: str, revision: str | None = None, *, with_weights: bool = True) -> Location:
    """Find ``model``: an existing folder, else an installed package, else a hub repository, of which no weights are
    downloaded unless ``with_weights``.

    Raises CheckpointNotFoundError, HubUnreachableError; ConfigError for a ``revision`` of a model that is not on the
    hub.
    """
    path = home_expanded(model)
    if path.is_dir():
        _check_no_revision(revision, f"{model} is a folder")
        return Location(path.resolve(), path.resolve().name, "path", gguf=_only_gguf(path.resolve()))
    if path.is_file() and path.suffix == ".gguf":
        _check_no_revision(revision, f"{model} is a file")
        return Location(path.parent.resolve(), path.stem, "path", gguf=path.parent.resolve() / path.name)
    if path.exists() or model.startswith((".", "/", "~")):
        if path.suffix in (".yaml", ".yml") and path.is_file():
            raise CheckpointNotFoundError(f"{model} is a file of settings, not a checkpoint: pass it with --config.")
        raise CheckpointNotFoundError(
            f"{model} {'is not a folder' if path.exists() else 'does not exist'}. Pass a checkpoint's folder, a GGUF "
            "file, the name of an installed package, or a hub id; to serve it, the folder of an artifact does too."
        )
    same = packaged_model(model)
    package = same.package if same and (revision is None or model != same.repository) else model
    if (folder := _package_folder(package)) is not None:
        _check_no_revision(revision, f"{model} is an installed package")
        return Location(folder, package, "package", gguf=_only_gguf(folder))
    repository, _, file = (same.repository if same else model).partition(":")
    return _from_hub(repository, revision, file, with_weights=with_weights)


def _only_gguf(folder: Path) -> Path | None:
    """The GGUF file of ``folder``, None where it has other weights, or none. Raises CheckpointNotFoundError for
    several."""
    files = sorted(folder.glob("*.gguf"))
    if not files or any((folder / name).exists() for name in _WEIGHTS):
        return None
    if len(files) > 1:
        raise CheckpointNotFoundError(
            f"{folder} has {len(files)} GGUF files, and no other weights ({_listed(file.name for file in files)}): "
            "pass the path of the one to build."
        )
    return files[0]


def _listed(names: Iterable[str]) -> str:
    """At most ten of ``names``."""
    known = [*names]
    return ", ".join(known[:10]) + (f" and {len(known) - 10} more" if len(known) > 10 else "")


def _check_no_revision(revision: str | None, what: str) -> None:
    if revision is not None:
        raise ConfigError(f"revision {revision} works with repositories on the hub only, and {what}: leave it out.")


def check_entries(folder: Path) -> None:
    """Raise CheckpointError for an entry with a checkpoint file's name that is a pipe, a device, or a broken link:
    reading it could block for ever, or the checkpoint be read without that file; and for one that may not be read, or
    is Git LFS's pointer to a file, which libraries take for a damaged one."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if not path.name.endswith(_READ) or path.is_dir():
            continue
        try:
            check_regular(path)
        except UnfitError as error:
            raise CheckpointError(f"{path} cannot be read: {error}. Download the checkpoint again.") from error
        if not os.access(path, os.R_OK):
            raise CheckpointError(f"{path} may not be read by this process's user: change its permissions.")
        if path.stat().st_size <= _MOST_LFS_BYTES and path.read_bytes().startswith(_LFS_START):
            raise CheckpointError(
                f"{path} is a pointer of Git LFS, not the file itself: run 'git lfs pull' in its repository (git lfs "
                "comes in a package of its own), or download the checkpoint again."
            )


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
        for mark in ("modules.json", "config.json", "*.gguf"):
            if found_marks := sorted(root.rglob(mark)):
                return found_marks[0].parent
    raise CheckpointNotFoundError(
        f"The installed package {model!r} carries no checkpoint (no config.json or GGUF file in it). "
        "Pass a checkpoint's folder or a hub id (owner/name)."
    )


def _folders_with_weights(folder: Path) -> list[Path]:
    """The root of a downloaded repository, and its module folders that have weights."""
    return [folder, *(path.parent for kind in ("Dense", "LayerNorm") for path in folder.glob(f"*_{kind}/config.json"))]


def _from_hub(model: str, revision: str | None, gguf: str, *, with_weights: bool) -> Location:
    """The repository ``model``. ``gguf``: the name of one of its GGUF files, or a part of the name ("Q8_0")."""
    if os.path.expanduser("~") == "~" and not _HUB_FOLDERS & os.environ.keys():
        raise CheckpointNotFoundError(
            f"{model!r} is no folder here, and there is no home directory to keep what the hub gives: set HOME or "
            "HF_HOME, or pass the path of a downloaded checkpoint."
        )
    with importing("huggingface_hub", "cpu", "Asking the hub for a checkpoint"):
        from huggingface_hub import snapshot_download

    def download(*patterns: str) -> Path:
        return Path(snapshot_download(model, revision=revision, allow_patterns=[*patterns]))

    try:
        folder = download(*(_HUB_PATTERNS if with_weights else _HUB_SETTINGS))
        if not with_weights:
            return Location(folder, model, "hub", folder.name)
        if not gguf and any(not list(part.glob("*.safetensors")) for part in _folders_with_weights(folder)):
            folder = download(*_HUB_PATTERNS, *_HUB_FALLBACK)
        file = None
        if gguf or not any((folder / name).exists() for name in _WEIGHTS):
            files = _files_of(model, revision, folder)
            file = _chosen_gguf(model, files, gguf)
            if weights := glob.escape(file) if file else _onnx_pattern(files):
                folder = download(*_HUB_PATTERNS, weights)
    except CheckpointNotFoundError:
        raise
    except Exception as error:  # of the HTTP library too, which is another one in each version of huggingface_hub
        raise _refusal(model, revision, error) from error
    # A snapshot's folder has the name of its commit.
    return Location(folder, model, "hub", folder.name, gguf=folder / file if file else None)


def _files_of(model: str, revision: str | None, folder: Path) -> Sequence[str]:
    """The files of the repository ``model``; where the hub does not answer, those of ``folder``, its snapshot here."""
    from huggingface_hub import HfApi

    try:
        return HfApi().list_repo_files(model, revision=revision)
    except Exception as error:  # as above
        held = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
        if _reason(error)[1] is None and any(name.endswith((".gguf", ".onnx")) for name in held):
            return held
        raise


def _chosen_gguf(model: str, files: Sequence[str], asked: str) -> str | None:
    """The one of ``files`` that ``asked`` is, or is a part of; without it the only GGUF file, None where there is none.
    Raises CheckpointNotFoundError."""
    found = sorted(name for name in files if name.endswith(".gguf") and "/" not in name)
    if not found and not asked:
        return None
    chosen = [name for name in found if name == asked] or [name for name in found if asked.lower() in name.lower()]
    if len(chosen) != 1:
        some = f"{len(chosen)} GGUF files" if chosen else "no GGUF file"
        named = f" with {asked!r} in its name" if asked else ", and no other weights"
        raise CheckpointNotFoundError(
            f"{model} has {some}{named}: name one as {model}:FILE, or by a part of its name. It has "
            f"{_listed(chosen or found) or 'none'}."
        )
    return chosen[0]


def _onnx_pattern(files: Sequence[str]) -> str | None:
    """A pattern for the ONNX file among ``files`` and those beside it with its tensors, None where the repository has
    other weights of its first module, or none."""
    if any(name in _WEIGHTS or (name.startswith("0_") and Path(name).name in _WEIGHTS) for name in files):
        return None
    return next((f"{name}*" for name in _ONNX if name in files), None)


def _refusal(model: str, revision: str | None, error: Exception) -> CheckpointNotFoundError:
    """What the hub has answered, or that it has not."""
    from huggingface_hub import constants, errors

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
    if status is None and (full := full_disk(error, Path(constants.HF_HUB_CACHE))) is not None:
        return HubUnreachableError(f"{here}, and what the hub gives cannot be kept. {full} HF_HOME names the place.")
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
