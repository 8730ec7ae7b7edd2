"""The side of a sparse retriever that is a table: a weight for each token (SparseStaticEmbedding).

An inference-free retriever (opensearch-neural-sparse-encoding-doc) encodes queries so: the weights of the distinct
tokens of a text, without special tokens around it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from bei.artifact.manifest import TOKEN_WEIGHTS, TOKENIZER
from bei.artifact.sides import Role, Side
from bei.artifact.token_weights import read_token_weights
from bei.core import Float32Array
from bei.engine.sparse import looked_up
from bei.errors import CheckpointError, TokenizerError, VerificationError
from bei.tokenizer.file import read_tokenizer
from bei_build.files.json_settings import read_object
from bei_build.tokenizer.artifact_tokenizer import model_max_length
from bei_build.tokenizer.library_tokenizer import TokenizerSettings, open_tokenizer
from bei_build.weights.tensor_store import open_weights

_TENSOR = "weight"
# Cases that the held-out texts lack.
_PROBES = (
    "The Cat, the cat and THE CAT",
    "[CLS] [MASK] [SEP] [PAD] [UNK]",
    "<s> <mask> </s>",
    "e\u0301\u00e9 \u4e16\u754c",
)


def table_roles(side: Side, folder: Path) -> dict[Side, Role]:
    """Roles of the two sides, where ``folder`` holds the table for ``side``."""
    looked_up = Role(max_tokens=model_max_length(folder), expansion=None, skip_ids=[], table=True)
    computed = Role(max_tokens=None, expansion=None, skip_ids=[])
    return {"query": looked_up, "document": computed} if side == "query" else {"query": computed, "document": looked_up}


def read_table(folder: Path, tokenizer: Tokenizer, vocab_size: int) -> Float32Array:
    """The weights in ``folder``, float32 [vocab_size]: 0 for entries beyond the vocabulary of ``tokenizer``.

    Raises CheckpointError, WeightsError.
    """
    if read_object(folder / "config.json").get("path") is not None:
        raise CheckpointError(
            f"{folder.name} (SparseStaticEmbedding) reads its weights from a JSON file (path): save the model again "
            "with sentence-transformers, which writes them as a tensor."
        )
    with closing(open_weights(folder)) as store:
        ids, shape = tokenizer.get_vocab(with_added_tokens=True).values(), store.shapes.get(_TENSOR)
        count = len(ids)
        if shape != (count,) or max(ids) >= count:
            raise CheckpointError(
                f"{folder.name} (SparseStaticEmbedding) has weights of shape {list(shape or ())}, and the tokenizer "
                f"{count} tokens: the two are not from the same checkpoint. Download it again."
            )
        weights = store.read(_TENSOR)
    if not np.isfinite(weights).all():
        raise CheckpointError(
            f"{folder.name} (SparseStaticEmbedding) has weights that are NaN or Inf. Download it again."
        )
    return np.append(weights, np.zeros(vocab_size - count, np.float32)).astype(np.float32)


def check_table(
    artifact: Path, folder: Path, settings: TokenizerSettings, vocab_size: int, texts: Sequence[str]
) -> int:
    """Compare the vectors from the artifact's own files for ``texts`` with those of the library's module in ``folder``,
    whose tokenizer settings are the other side's; returns the number of texts.

    Raises VerificationError where a weight differs, TokenizerError where ``folder`` has another tokenizer.
    """
    tokenizer, library = read_tokenizer(artifact / TOKENIZER), open_tokenizer(folder, settings)
    table = read_token_weights(artifact / TOKEN_WEIGHTS, vocab_size)
    with closing(open_weights(folder)) as store:
        weights = store.read(_TENSOR)
    asked = [*texts, *_PROBES]
    expected_ids = library.encode([(text,) for text in asked], None, special_tokens=False)
    for text, (theirs, _) in zip(asked, expected_ids, strict=True):
        ours = tokenizer.encode(text, add_special_tokens=False).ids
        if ours != theirs:
            raise TokenizerError(
                f"The tokenizer in {folder.name} is not that of the other side (they differ on {text[:60]!r}), and an "
                "artifact has one: build the other side alone, with --route."
            )
        presence = np.zeros(len(weights), np.float32)
        presence[theirs] = 1
        expected = presence * weights
        indices, found = looked_up(np.array(ours, np.int32), table)
        if not np.array_equal(indices, np.flatnonzero(expected)) or not np.array_equal(found, expected[indices]):
            raise VerificationError(f"{TOKEN_WEIGHTS} gives other weights than {folder.name} for {text[:60]!r}.")
    return len(asked)
