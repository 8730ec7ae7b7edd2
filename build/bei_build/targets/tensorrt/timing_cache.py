"""TensorRT's timing cache in a file: measurements on a GPU that the next build reuses.

TensorRT-RTX measures nothing when it builds; its timing cache has no effect.
"""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bei.errors import ConfigError
from bei.utils.named_files import check_named, named_bytes

if TYPE_CHECKING:
    from tensorrt_module import TensorRTModule

_MOST_BYTES = 1_000_000_000
_FOLDER = "~/.cache/bei/timing"


def default_file(version: str, gpu: str) -> Path | None:
    """The file of all builds by this ``version`` of TensorRT on GPUs called ``gpu``; None where none can be kept.

    A build by another one would replace it, so each has its own.
    """
    try:
        folder = Path(_FOLDER).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # RuntimeError: there is no home
        return None
    path = folder / re.sub(r"[^A-Za-z0-9.]+", "-", f"tensorrt-{version}-{gpu}")
    is_kept = os.access(folder, os.W_OK) and (path.is_file() or not path.exists())
    return path if is_kept and (not path.exists() or path.stat().st_size <= _MOST_BYTES) else None


def check_writable(path: Path) -> None:
    """Raise ConfigError if a timing cache cannot be written to ``path``."""
    if path.exists():
        check_named("timing_cache", path, _MOST_BYTES)
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise ConfigError(f"timing_cache {path} must be a file in a folder that exists and can be written to.")


def load(config: TensorRTModule.IBuilderConfig, path: Path, log: list[tuple[str, str]]) -> str | None:
    """Give the builder's ``config`` the cache in ``path``, or an empty one. Returns the reason why the file is not
    used.

    TensorRT refuses the cache of another version, or of another GPU, with an error in its ``log``, which is removed
    from it.
    """
    found = named_bytes("timing_cache", path, _MOST_BYTES) if path.exists() else b""
    num_lines = len(log)
    if found:
        cache = config.create_timing_cache(found)
        if cache is not None and config.set_timing_cache(cache, False):
            return None
        reasons = [" ".join(text.split()) for severity, text in log[num_lines:] if "ERROR" in severity]
        del log[num_lines:]
    empty = config.create_timing_cache(b"")
    if empty is not None:
        config.set_timing_cache(empty, False)
    if not found:
        return None
    return (
        f"timing cache {path} was made with another TensorRT or another GPU, or is damaged: kernels were measured "
        f"anew, and the file was replaced{' (' + '; '.join(reasons) + ')' if reasons else ''}"
    )


def stored(config: TensorRTModule.IBuilderConfig, path: Path) -> str | None:
    """Write the cache of the builder's ``config`` to ``path``, atomically. Returns the reason why it cannot be: the
    plan, which took longer, is kept."""
    cache = config.get_timing_cache()
    if cache is None:
        return None  # caching is off
    try:
        _write(cache.serialize(), path)
    except OSError as error:
        return f"timing cache {path} could not be written ({error.strerror or error}): the next build measures anew"
    return None


def _write(data: Any, path: Path) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        try:
            file.write(memoryview(data))
            file.flush()
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise
