"""Reads tokenizer.json files from untrusted sources."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tokenizers import Tokenizer

from bei.utils.untrusted_files import MOST_TOKENIZER_BYTES, UnfitError, read_bounded

_PROBES = ("", "a", "The é世 1.\n")


def read_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer in the file ``path``. Raises UnfitError if it is invalid, or fails on a few words."""
    content = read_bounded(path, MOST_TOKENIZER_BYTES)  # not by its path, which may not be UTF-8
    try:
        with _silent():
            tokenizer = Tokenizer.from_buffer(content)
            for text in _PROBES:
                tokenizer.encode(text)
            tokenizer.encode("a", "b")
    except Exception as error:  # the library raises bare Exception
        raise UnfitError(str(error)) from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # raised by Rust code; it cannot be imported
            raise
        raise UnfitError(f"the library broke off: {error}") from error
    return tokenizer


@contextmanager
def _silent() -> Iterator[None]:
    """Silences standard error: the library writes panics to the file descriptor, past sys.stderr."""
    try:
        kept = os.dup(2)
    except OSError:  # standard error is closed
        yield
        return
    nothing = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)
