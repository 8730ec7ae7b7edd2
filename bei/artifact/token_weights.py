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
        weights = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ArtifactManifestError(
            f"{shown_path(path)} is not a table of weights ({error}). Build the artifact again."
        ) from error
    is_array = isinstance(weights, np.ndarray)  # np.load returns an archive for .npz
    if not is_array or weights.dtype != np.float32 or weights.shape != (vocab_size,) or not np.isfinite(weights).all():
        raise ArtifactManifestError(
            f"{shown_path(path)} does not hold {vocab_size} finite float32 weights. Build the artifact again."
        )
    found: Float32Array = weights
    return found
