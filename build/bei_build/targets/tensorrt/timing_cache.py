"""TensorRT's timing cache in a file: measurements on a GPU that the next build reuses.

TensorRT-RTX measures nothing when it builds; its timing cache has no effect.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from bei.errors import ConfigError
from bei.utils.named_files import check_named, named_bytes

if TYPE_CHECKING:
    from tensorrt_module import TensorRTModule

_MOST_BYTES = 1_000_000_000


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
    stored = named_bytes("timing_cache", path, _MOST_BYTES) if path.exists() else b""
    num_lines = len(log)
    if stored:
        cache = config.create_timing_cache(stored)
        if cache is not None and config.set_timing_cache(cache, False):
            return None
        reasons = [" ".join(text.split()) for severity, text in log[num_lines:] if "ERROR" in severity]
        del log[num_lines:]
    empty = config.create_timing_cache(b"")
    if empty is not None:
        config.set_timing_cache(empty, False)
    if not stored:
        return None
    return (
        f"timing cache {path} was made with another TensorRT or another GPU, or is damaged: kernels were measured "
        f"anew, and the file was replaced{' (' + '; '.join(reasons) + ')' if reasons else ''}"
    )


def store(config: TensorRTModule.IBuilderConfig, path: Path) -> None:
    """Write the cache of the builder's ``config`` to ``path``, atomically. Raises OSError."""
    cache = config.get_timing_cache()
    if cache is None:
        return  # caching is off
    data = cache.serialize()
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        try:
            file.write(memoryview(data))
            file.flush()
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise
