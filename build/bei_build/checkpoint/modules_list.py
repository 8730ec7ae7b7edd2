"""modules.json: the modules of a sentence-transformers model, in the order in which they run."""

from __future__ import annotations

from pathlib import Path

from bei.errors import CheckpointError
from bei.utils.untrusted_files import UnfitError, within
from bei_build.checkpoint.router import Module
from bei_build.files.json_settings import read_json


def listed_modules(folder: Path) -> list[Module]:
    """The modules of the checkpoint in ``folder``. Raises CheckpointError, also for two with one name, or in another
    order than their numbers: the library runs the last one of a name, and goes by the list alone."""
    path = folder / "modules.json"
    entries = read_json(path)
    kinds = {"type": str, "path": str, "idx": int, "name": str}
    if not isinstance(entries, list) or not all(
        isinstance(entry, dict)
        and {"type", "path"} <= entry.keys()
        and all(isinstance(entry[key], kind) for key, kind in kinds.items() if key in entry)
        for entry in entries
    ):
        raise CheckpointError(f"{path} is not a list of modules. Download the checkpoint again.")
    numbers = [entry["idx"] for entry in entries if "idx" in entry]
    names = [entry["name"] for entry in entries if "name" in entry]
    if numbers != sorted(numbers):
        raise CheckpointError(
            f"{path} lists its modules in another order than their idx, {numbers}: sentence-transformers goes by the "
            "list. Put one of them right."
        )
    if len(set(names)) < len(names):
        raise CheckpointError(f"{path} gives two modules one name, {names}: rename one.")
    return [(entry["type"], _folder_of(folder, entry["path"])) for entry in entries]


def _folder_of(folder: Path, path: str) -> Path:
    """The folder of a module. Raises CheckpointError for a path outside of the checkpoint."""
    try:
        return within(folder, path)
    except UnfitError as error:
        raise CheckpointError(
            f"{folder / 'modules.json'} names a module's folder that bei does not read: {error}. Download the "
            "checkpoint again."
        ) from error
