"""The form of stored reference answers, checked as they are read: arrays that do not fit each other or the model would
fail far from their file, or inside an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bei.artifact.manifest import Manifest
from bei.core import Float32Array
from bei.utils.untrusted_files import UnfitError
from bei.verification.retrieval import RetrievalRanking

_LISTS = ("input_ids", "num_tokens", "num_keys", "num_unpooled")
_TYPES = "token_type_ids"
ADAPTERS = "adapters"
_MOST_GRADE = 1 << 20


def check_encodings(arrays: Mapping[str, Any], manifest: Manifest, all_keys: int) -> None:
    """Raise UnfitError unless ``arrays`` are token ids, their types, and the figures of each text, that the model can
    read. ``all_keys``: the number of keys of a text whose tokens are all looked up."""
    for name in (*_LISTS, *(each for each in (_TYPES, ADAPTERS) if each in arrays)):
        array = arrays.get(name)
        if array is None or array.ndim != 1 or array.dtype != np.int32:
            raise UnfitError(f"{name} is no list of int32")
    ids, lengths, keys, unpooled = (arrays[name] for name in _LISTS)
    if not len(lengths) == len(keys) == len(unpooled) > 0:
        raise UnfitError("num_tokens, num_keys and num_unpooled must have a figure for each text")
    if lengths.min() < 1 or lengths.max() > manifest.max_seq_len or lengths.sum(dtype=np.int64) != len(ids):
        raise UnfitError(f"num_tokens must be from 1 to {manifest.max_seq_len}, and {len(ids)} together")
    if ids.min() < 0 or ids.max() >= manifest.spec.vocab_size:
        raise UnfitError(f"input_ids must be from 0 to {manifest.spec.vocab_size - 1}")
    if not (((keys >= 1) & (keys <= lengths)) | (keys == all_keys)).all():
        raise UnfitError("num_keys must be from 1 to num_tokens")
    if unpooled.min() < 0 or (unpooled > lengths).any():
        raise UnfitError("num_unpooled must be from 0 to num_tokens")
    adapters = arrays.get(ADAPTERS, lengths[:0])
    most = len(manifest.adapter_names)
    if len(adapters) and (len(adapters) != len(lengths) or adapters.min() < 0 or adapters.max() > most):
        raise UnfitError(f"{ADAPTERS} must be from 0 to {most} for each text")
    if _TYPES in arrays and (len(arrays[_TYPES]) != len(ids) or arrays[_TYPES].min() < 0):
        raise UnfitError(f"{_TYPES} must have a type for each token")


def check_rows(rows: Float32Array, name: str, manifest: Manifest, ends: Sequence[int]) -> None:
    """Raise UnfitError unless ``rows`` are those of output ``name`` for the first texts. ``ends``: the numbers of rows
    up to each text's last."""
    width = manifest.dimension(name)
    if width is None:
        raise UnfitError(f"the engine does not give {name}")
    if name == "span_logits" and rows.ndim == 2:  # as wide as the texts' labels need
        width *= max(1, rows.shape[1] // width)
    if rows.dtype != np.float32 or rows.ndim != 2 or rows.shape[1] != width or not np.isfinite(rows).all():
        raise UnfitError(f"the rows of {name} must be {width} finite float32 numbers each")
    if len(rows) not in ends:
        raise UnfitError(f"the {len(rows)} rows of {name} are not those of the first texts")


def check_ranking(ranking: RetrievalRanking, ndcgs: Sequence[float], num_rows: int, manifest: Manifest) -> None:
    """Raise UnfitError unless ``num_rows`` encodings are those of ``ranking``, and ``ndcgs`` its figures."""
    documents, queries = ranking.num_documents, len(ranking.grades)
    if manifest.dimension(ranking.output) is None:
        raise UnfitError(f"the engine does not give {ranking.output}")
    if len(ndcgs) != queries or not queries or not all(0 <= figure <= 1 for figure in ndcgs):
        raise UnfitError("ndcgs must have a figure from 0 to 1 for each query")
    ranked = ranking.candidates
    if ranked is None:
        expected = queries + documents
        ranked = [[*range(documents)]] * queries if 0 < documents <= num_rows else []
    else:
        expected = sum(map(len, ranked))
    if num_rows != expected or len(ranked) != queries or not all(ranked):
        raise UnfitError(f"the {num_rows} encodings are not those of {queries} queries and their documents")
    for grades, found in zip(ranking.grades, ranked, strict=True):
        if not all(0 <= document < documents for document in (*grades, *found)):
            raise UnfitError(f"documents must be from 0 to {documents - 1}")
        if not all(0 <= grade <= _MOST_GRADE for grade in grades.values()) or not any(map(grades.get, found)):
            raise UnfitError("each query must have a document of a grade above 0")
