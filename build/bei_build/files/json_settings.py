"""JSON settings of a checkpoint: parsed, and checked one by one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

from bei.errors import CheckpointError
from bei.utils.untrusted_files import read_bounded, unique_keys

_T = TypeVar("_T")


# Bound for configs and shard indexes: the largest name each of 100,000 labels, or as many tensors.
_MOST_BYTES = 16_000_000


def read_json(path: Path) -> Any:
    """Parse a JSON file of a checkpoint. Raises CheckpointError if it is missing, not JSON, too large for a config, or
    gives a key twice."""
    try:
        return json.loads(read_bounded(path, _MOST_BYTES), object_pairs_hook=unique_keys)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing. Download the checkpoint again.") from error
    except (ValueError, OSError, RecursionError) as error:
        raise CheckpointError(f"{path} is not readable JSON ({error}). Download the checkpoint again.") from error


def read_object(path: Path) -> dict[str, Any]:
    """Parse a JSON file that holds settings by name. Raises CheckpointError if it does not."""
    content = read_json(path)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} does not hold a JSON object. Download the checkpoint again.")
    return content


def setting(path: Path, config: dict[str, Any], key: str, kind: type[_T]) -> _T | None:
    """``config[key]``, None where it is absent or null. Raises CheckpointError if it is not a ``kind``."""
    value = config.get(key)
    if value is not None and type(value) is not kind:
        raise CheckpointError(f"{path} has {key} = {value!r}: correct it to a value of type {kind.__name__}.")
    return value


def string_list(path: Path, config: dict[str, Any], key: str) -> tuple[str, ...] | None:
    """``config[key]``, a list of strings, None where it is absent or null. Raises CheckpointError."""
    values = setting(path, config, key, list)
    if values is not None and not all(isinstance(value, str) for value in values):
        raise CheckpointError(f"{path} has {key} = {values!r}: correct it to a list of texts.")
    return None if values is None else tuple(values)
