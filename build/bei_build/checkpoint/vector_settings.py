"""Settings of config_sentence_transformers.json that change finished vectors, or the scores of pairs of them.

bei changes vectors by what a request asks for, not by the checkpoint, and refuses these.
"""

from __future__ import annotations

from bei.errors import CheckpointError
from bei_build.checkpoint.sentence_transformers import SentenceTransformersFiles
from bei_build.spec.model_spec import ModelSpec

_FILE = "config_sentence_transformers.json"


def check_vectors(files: SentenceTransformersFiles, spec: ModelSpec) -> None:
    """Raise CheckpointError where sentence-transformers would change the vectors of ``spec``, or score them otherwise
    than by MaxSim."""
    dense, sparse = spec.head("embedding"), spec.head("sparse")
    if dense and files.truncate_dim is not None and files.truncate_dim < (width := dense.dimension(spec.hidden_size)):
        raise CheckpointError(
            f"{_FILE} has truncate_dim = {files.truncate_dim}, by which sentence-transformers cuts all vectors of "
            f"{width} components and does not normalize them again; bei cuts by a request's dimensions, before it "
            "normalizes: take truncate_dim out, and give dimensions in requests."
        )
    if sparse and files.max_active_dims is not None:
        raise CheckpointError(
            f"{_FILE} has max_active_dims = {files.max_active_dims}, by which sentence-transformers keeps only the "
            "largest weights; bei does so by a request's top_k: take max_active_dims out, and give top_k in requests."
        )
    if spec.head("token_embedding") and not dense and files.similarity == "meanmaxsim":
        raise CheckpointError(
            f"{_FILE} has similarity_fn_name 'meanmaxsim', MaxSim divided by the number of the query's tokens; bei "
            "gives MaxSim, which ranks documents alike: set similarity_fn_name to maxsim, and divide scores where "
            "those of several queries are compared."
        )
