"""The table for sparse vectors that are looked up instead of computed: one weight for each entry of the vocabulary.

Inference-free sparse retrievers encode queries so (SparseStaticEmbedding of sentence-transformers). The file is
numpy's, float32 [vocabulary], and is read without pickle.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from bei.artifact.held_files import shown_path
from bei.core import Float32Array
from bei.errors import ArtifactManifestError


def write_token_weights(path: Path, weights: Float32Array) -> None:
    """Write the table to ``path``, which ends in .npy."""
    np.save(path, weights, allow_pickle=False)


def read_token_weights(path: Path, vocab_size: int) -> Float32Array:
    """The table in ``path``. Raises ArtifactManifestError if it does not have ``vocab_size`` entries."""
    try:
        with path.open("rb") as file:
            np.lib.format.read_magic(file)
            shape, _, dtype = np.lib.format.read_array_header_1_0(file)  # before anything of that size is allocated
            is_table = shape == (vocab_size,) and dtype == np.float32
            weights = np.fromfile(file, np.float32, vocab_size) if is_table else np.empty(0, np.float32)
    except Exception as error:  # numpy reads the header as Python, and raises whatever its tokenizer does
        raise ArtifactManifestError(
            f"{shown_path(path)} is not a table of weights ({error}). Build the artifact again."
        ) from error
    if len(weights) != vocab_size or not np.isfinite(weights).all():
        raise ArtifactManifestError(
            f"{shown_path(path)} does not hold {vocab_size} finite float32 weights. Build the artifact again."
        )
    return weights
