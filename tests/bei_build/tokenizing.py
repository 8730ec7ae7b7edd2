"""The tokenizer that a checkpoint's artifact gets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from bei_build.library_tokenizer import TokenizerReading, open_tokenizer
from bei_build.tokenizer import artifact_tokenizer


def tokenizer_of(folder: Path, **reading: Any) -> Tokenizer:
    """As a build makes it of ``folder``; ``reading``: fields of TokenizerReading."""
    asked = TokenizerReading(**reading)
    return artifact_tokenizer(open_tokenizer(folder, asked), asked, folder)
