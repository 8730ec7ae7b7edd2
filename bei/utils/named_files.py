"""Reading the files that a person names: settings, keys, certificates, texts.

Each has a bound. What is no regular file (a device, a pipe, a directory) is refused, and never waited for.
"""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

from bei.errors import ConfigError
from bei.utils.units import shown_size
from bei.utils.untrusted_files import UnfitError, open_regular, read_bounded

# Limits by kind of file: a hundred times what such files have.
MOST_KEY_BYTES = 1_000_000
MOST_SETTINGS_BYTES = 10_000_000
MOST_AUTHORITIES_BYTES = 10_000_000
MOST_TEXTS_BYTES = 1_000_000_000


def named_bytes(what: str, file: str | Path, most_bytes: int, *, may_be_pipe: bool = False) -> bytes:
    """The content of ``file``, which is ``what`` ("The signing key"). Raises ConfigError, which does not quote it.

    ``may_be_pipe``: the shell may have opened it as a pipe (``<(command)``). It is read to its end once, to the bound.
    """
    try:
        path = _expanded(what, file)
        if may_be_pipe and is_pipe_of_shell(path):
            return _read_pipe(path, most_bytes)
        return read_bounded(path, most_bytes)
    except (OSError, UnfitError, ValueError) as error:
        raise unreadable(what, file, most_bytes, error) from None


def named_text(what: str, file: str | Path, most_bytes: int, *, may_be_pipe: bool = False) -> str:
    """The same of a file in UTF-8."""
    try:
        return named_bytes(what, file, most_bytes, may_be_pipe=may_be_pipe).decode()
    except UnicodeDecodeError:
        raise ConfigError(f"{what} {file} cannot be read: it is no text in UTF-8.") from None


def open_named(what: str, file: str | Path, most_bytes: int) -> BinaryIO:
    """``file``, open for reading. Raises ConfigError like ``named_bytes``."""
    try:
        return open_regular(_expanded(what, file), most_bytes)
    except (OSError, UnfitError, ValueError) as error:
        raise unreadable(what, file, most_bytes, error) from None


def check_named(what: str, file: str | Path, most_bytes: int) -> None:
    """Raise ConfigError where a library that opens ``file`` itself would read without a bound, or wait."""
    open_named(what, file, most_bytes).close()


def unreadable(what: str, file: str | Path, most_bytes: int, error: Exception) -> ConfigError:
    """The error for ``file``: why it cannot be read, and what to give instead."""
    if isinstance(error, UnfitError):
        return ConfigError(
            f"{what} {file} cannot be read: {error}. Give a regular file of at most {shown_size(most_bytes)}."
        )
    return ConfigError(f"{what} {file} cannot be read: {getattr(error, 'strerror', None) or error}.")


def is_pipe_of_shell(file: str | Path) -> bool:
    """True for what the shell opened as a pipe (``<(command)``), which can be read once."""
    path = Path(file)
    return str(path.parent) in ("/dev/fd", "/proc/self/fd") and path.is_fifo()


def _read_pipe(path: Path, most_bytes: int) -> bytes:
    with path.open("rb") as pipe:
        content = pipe.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise UnfitError(f"it has more than the {most_bytes:,} bytes that are read")
    return content


def _expanded(what: str, file: str | Path) -> Path:
    try:
        return Path(file).expanduser()
    except RuntimeError as error:  # no HOME, and no entry in passwd
        raise ConfigError(f"{what} {file} cannot be read: {error}.") from None
