"""From a checkpoint's tokenizer files to the ``tokenizer.json`` of an artifact.

``tokenizer.json`` is taken as it is: going through transformers would rebuild pipelines that some checkpoints change
on purpose. Truncation and padding are switched off; the runtime does both itself.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.normalizers import Lowercase, Normalizer, Sequence

from bei.errors import TokenizerError
from bei_build.sentence_transformers import read_object

# transformers writes int(1e30) for "no limit".
_NO_LIMIT = 1 << 24


def tokenizer_from_checkpoint(folder: Path, do_lower_case: bool) -> Tokenizer:
    """The tokenizer of ``folder``. Raises TokenizerError.

    ``do_lower_case`` (sentence_bert_config.json) puts a Lowercase normalizer in front, as sentence-transformers does.
    """
    path = folder / "tokenizer.json"
    if path.is_file():
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise TokenizerError(
                f"{path} is not a readable tokenizer ({error}). Download the checkpoint again."
            ) from error
    else:
        tokenizer = _converted(folder)
    if do_lower_case:
        before = [Lowercase()] + ([tokenizer.normalizer] if tokenizer.normalizer else [])
        normalizers: list[Normalizer] = before
        tokenizer.normalizer = Sequence(normalizers)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Refuse a tokenizer that can produce ids behind the embedding table. Raises TokenizerError."""
    highest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if highest >= vocab_size:
        raise TokenizerError(
            f"The tokenizer's ids go up to {highest}, but the embedding table has {vocab_size} rows: "
            "this tokenizer belongs to another checkpoint. Download both again from one source."
        )


def model_max_length(folder: Path) -> int | None:
    """``model_max_length`` of tokenizer_config.json, None if absent or infinite."""
    path = folder / "tokenizer_config.json"
    value = read_object(path).get("model_max_length") if path.is_file() else None
    return int(value) if isinstance(value, (int, float)) and 0 < value < _NO_LIMIT else None


def _converted(folder: Path) -> Tokenizer:
    """Build from vocab.txt, sentencepiece and the like: transformers knows how."""
    from transformers import AutoTokenizer

    try:
        slow_or_fast = AutoTokenizer.from_pretrained(folder, use_fast=True, trust_remote_code=False)
        tokenizer = Tokenizer.from_str(slow_or_fast.backend_tokenizer.to_str())
        special_tokens = set(slow_or_fast.all_special_tokens)
    except Exception as error:  # transformers raises OSError, ValueError, KeyError, AttributeError, ... here
        raise TokenizerError(
            f"{folder} has no tokenizer.json, and transformers could not make one from its other files ({error}). "
            "Download the tokenizer's files too."
        ) from error
    if set(tokenizer.get_vocab()) <= special_tokens:  # what transformers 5 makes of a folder without any such file
        raise TokenizerError(
            f"{folder} has no tokenizer.json and no other file with a vocabulary. Download the tokenizer's files too."
        )
    return tokenizer
