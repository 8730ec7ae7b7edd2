"""Reads tokenizer.json files from untrusted sources."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tokenizers import Tokenizer

from bei.utils.untrusted_files import MOST_TOKENIZER_BYTES, UnfitError, read_bounded

_MOST_TOKENS = 1 << 24
_PROBES = ("", "a", "The é世 1.\n")


def read_tokenizer(path: Path, vocab_size: int | None = None) -> Tokenizer:
    """The tokenizer in the file ``path``. Raises UnfitError if it is invalid, fails on a few words, or has ids that a
    model of ``vocab_size`` tokens lacks."""
    content = read_bounded(path, MOST_TOKENIZER_BYTES)  # not by its path, which may not be UTF-8
    try:
        with _silent():
            tokenizer = Tokenizer.from_buffer(content)
            for text in _PROBES:
                tokenizer.encode(text)
            tokenizer.encode("a", "b")
            # Before it is written: the library then lists every id that is missing below the highest.
            highest = _highest_of_all(tokenizer) if vocab_size is None else _highest_id(tokenizer, vocab_size)
    except Exception as error:  # the library raises bare Exception
        raise UnfitError(str(error)) from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # raised by Rust code; it cannot be imported
            raise
        raise UnfitError(f"the library broke off: {error}") from error
    if vocab_size is None and highest >= _MOST_TOKENS:
        raise UnfitError(f"its ids go up to {highest}, and no model has more than {_MOST_TOKENS:,} tokens")
    if vocab_size is not None and highest >= vocab_size:
        raise UnfitError(f"its ids go up to {highest}, and the model has {vocab_size} tokens")
    return tokenizer


def _highest_of_all(tokenizer: Tokenizer) -> int:
    return max([*tokenizer.get_vocab().values(), *tokenizer.get_added_tokens_decoder()], default=-1)


def _highest_id(tokenizer: Tokenizer, vocab_size: int) -> int:
    """The highest id if it is ``vocab_size`` or more; else any lower number."""
    around = [*tokenizer.encode("").ids, *tokenizer.encode("", "").ids]  # a template has ids of its own
    highest = max([*around, *tokenizer.get_added_tokens_decoder()], default=-1)
    # Counted first: the whole vocabulary as a dict takes up to five times as long.
    token_of = tokenizer.model.id_to_token
    num_known = sum(token_of(index) is not None for index in range(vocab_size))
    if num_known < tokenizer.get_vocab_size(with_added_tokens=False):
        highest = max(highest, *tokenizer.get_vocab().values())
    return highest


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
