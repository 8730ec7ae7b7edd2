"""Texts that are filled up with padding which is attended, as their model was trained (SigLIP)."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from bei.errors import CheckpointError, ConfigError
from bei_build.spec.model_spec import ModelSpec
from bei_build.tokenizer.artifact_tokenizer import padding_id
from bei_build.tokenizer.library_tokenizer import LibraryTokenizer


def filling_id_of(
    spec: ModelSpec, library: LibraryTokenizer, tokenizer: Tokenizer, folder: Path, max_seq_len: int
) -> int:
    """The token that texts are filled up with. Raises CheckpointError where the checkpoint's own library would do it in
    another way, ConfigError for another ``max_seq_len`` than the position table's."""
    positions, padding = spec.embeddings.max_positions, library.padding
    if max_seq_len != positions:
        raise ConfigError(
            f"max_seq_len is {max_seq_len}, and texts of this model are filled up to {positions} tokens, whose last "
            "one gives the vector: leave --max-seq-len out, and correct model_max_length in tokenizer_config.json."
        )
    token_id = padding_id(tokenizer, folder) if padding.token_id is None else padding.token_id
    if token_id is None or not 0 <= token_id < spec.embeddings.vocab_size:
        raise CheckpointError(
            "Texts of this model are filled up with padding: name pad_token in tokenizer_config.json."
        )
    if padding.side == "left":
        raise CheckpointError(
            "Texts of this model are filled up behind their end: tokenizer_config.json has padding_side = left. "
            "Download the tokenizer's files again."
        )
    if padding.is_masked:
        raise CheckpointError(
            "Texts of this model are filled up with padding that is attended; tokenizer_config.json hides it: write "
            '"model_input_names": ["input_ids"] there, as the model\'s authors do.'
        )
    return token_id
