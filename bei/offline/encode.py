"""``Model.encode`` and ``Model.similarity``: embedding as users of sentence-transformers write it.

Reference: sentence-transformers 6.2, ``SentenceTransformer.encode``, ``encode_query``, ``encode_document``,
``util/similarity.py``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeAlias, TypedDict

import numpy as np
from msgspec import Meta

from bei.artifact.manifest import Manifest
from bei.core import Float32Array
from bei.errors import InvalidRequestError
from bei.offline.input_checks import EncodeInput, is_one, several
from bei.offline.method import Vectors
from bei.offline.options import PromptOptions, checked
from bei.service.model_service import ModelService
from bei.tasks.compare import is_one_of_three, max_sim
from bei.tasks.dimensions import check_dimensions
from bei.tasks.vector_formats import numbers_of
from bei.tokenizer.prompts import prompt_of
from bei.utils.libraries import importing

# Vectors as any array-like: numpy, a tensor on the CPU, lists. [n, width], or [width] for one.
ArrayLike: TypeAlias = Any

# Names of the prompt of a side, the first that the model has.
_PROMPTS = {"query": ("query",), "document": ("document", "passage", "corpus")}

_LEAST_NORM = 1e-12  # torch.nn.functional.normalize

# From a warning to the caller of a Model's method: ``_check_width``, ``encode``, the method.
_TO_THE_CALLER = 4


class EncodeOptions(TypedDict, total=False):
    """The arguments of ``SentenceTransformer.encode``, with its names and defaults.

    ``batch_size`` changes nothing: the scheduler cuts batches by their cost. ``truncate_dim`` cuts vectors, which are
    at unit length behind it if ``normalize_embeddings`` says so. Not there: ``pool`` and ``chunk_size`` (there is one
    queue for all devices), integer ``precision`` (``embed`` has ``output_dtype``), ``device``, ``output_value``.
    """

    prompt_name: str | None
    prompt: str | None
    batch_size: Annotated[int, Meta(ge=1)]
    show_progress_bar: bool | None
    output_value: Literal["sentence_embedding"]
    precision: Literal["float32", "binary", "ubinary"]
    convert_to_numpy: bool
    convert_to_tensor: bool
    device: None
    normalize_embeddings: bool
    truncate_dim: Annotated[int, Meta(ge=1)] | None


def encode(
    service: ModelService,
    embed: Callable[..., Vectors],
    inputs: EncodeInput,
    given: EncodeOptions,
    side: str | None = None,
) -> Any:
    """The vectors of ``inputs``: [width] for one text or image, else [n, width], in numpy or as the options say.

    ``embed``: the Model's. ``side``: query or document. Raises InvalidRequestError, and MissingDependencyError where
    tensors are asked for and there is no PyTorch. Warns (UserWarning) as ``embed`` does.
    """
    _check_if_elsewhere(given)
    options = checked(EncodeOptions, given)
    is_single, texts = is_one(inputs), list(several(inputs))
    width, normalize = options.get("truncate_dim"), options.get("normalize_embeddings", False)
    if width is not None and width < service.embedding_width:
        _check_width(service, width)
    vectors: Vectors = np.zeros((0, service.embedding_width), np.float32)
    if texts:
        is_shown = bool(options.get("show_progress_bar"))
        vectors = embed(
            texts, progress=is_shown, normalize=normalize or None, **_prompt(service.manifest, options, side)
        )
    if width is not None:
        vectors = np.ascontiguousarray(vectors[:, :width])
        vectors = _unit(vectors) if normalize else vectors
    dtype = options.get("precision", "float32")
    found = _in_form(numbers_of("float" if dtype == "float32" else dtype, vectors, None), options)
    return found[0] if is_single else found


def _check_if_elsewhere(given: EncodeOptions) -> None:
    """Raise InvalidRequestError for what sentence-transformers has here and a Model elsewhere (docs/python.md)."""
    if given.get("device") is not None:
        raise InvalidRequestError(
            "The artifact's target is the Model's device: leave device out ('bei serve --devices' serves on several).",
            "device",
        )
    if (dtype := str(given.get("precision"))) in ("int8", "uint8"):
        raise InvalidRequestError(f'encode gives no {dtype}: use embed(output_dtype="{dtype}").', "precision")
    if given.get("output_value") not in (None, "sentence_embedding"):
        raise InvalidRequestError("encode gives vectors of texts: use embed_all for those of tokens.", "output_value")


def _check_width(service: ModelService, width: int) -> None:
    untrained = service.untrained_dimensions
    warning = check_dimensions(service.manifest, width, "truncate_dim", untrained=untrained)
    if warning is not None:
        warnings.warn(f"{warning}.", UserWarning, stacklevel=_TO_THE_CALLER)


def _in_form(vectors: Vectors, options: EncodeOptions) -> Any:
    """One array, one tensor, or a list of tensors."""
    if options.get("convert_to_tensor"):
        return _tensor(vectors)
    return vectors if options.get("convert_to_numpy", True) else list(_tensor(vectors))


def _prompt(manifest: Manifest, options: EncodeOptions, side: str | None) -> PromptOptions:
    """A prompt is taken before a name of one, as there. A side without a prompt has none, not the default one."""
    prompt, name = options.get("prompt"), options.get("prompt_name")
    if side is None:
        return {"prompt_name": name} if prompt is None else {"prompt": prompt}
    if prompt is None:
        name = name or next((name for name in _PROMPTS[side] if name in manifest.prompts), None)
        prompt = "" if name is None else prompt_of(manifest, name)
    return {"prompt": prompt, "input_type": side}


def _tensor(vectors: Vectors) -> Any:
    with importing("torch", None, "convert_to_tensor", remedy="pip install torch"):
        import torch
    return torch.from_numpy(vectors)


def _unit(vectors: Float32Array) -> Float32Array:
    norms = np.linalg.norm(vectors, axis=-1, keepdims=True)
    unit: Float32Array = vectors / np.maximum(norms, _LEAST_NORM)
    return unit


# All scores are larger for what is nearer.


def _cosine(first: Float32Array, second: Float32Array) -> Float32Array:
    return _dot(_unit(first), _unit(second))


def _dot(first: Float32Array, second: Float32Array) -> Float32Array:
    scores: Float32Array = first @ np.swapaxes(second, -1, -2)
    return scores


def _euclidean(first: Float32Array, second: Float32Array) -> Float32Array:
    return np.stack([-np.linalg.norm(second - row, axis=-1) for row in first])


def _manhattan(first: Float32Array, second: Float32Array) -> Float32Array:
    return np.stack([-np.abs(second - row).sum(axis=-1) for row in first])


_SIMILARITIES: dict[str, Callable[[Float32Array, Float32Array], Float32Array]] = {
    "cosine": _cosine,
    "dot": _dot,
    "euclidean": _euclidean,
    "manhattan": _manhattan,
}


def similarity(manifest: Manifest, first: ArrayLike, second: ArrayLike, *, pairwise: bool = False) -> Float32Array:
    """Scores float32 [n, m] of the vectors ``first`` [n, width] and ``second`` [m, width], or [n] of pairs, by the
    function that the checkpoint names; cosine if it names none. Lists of token vectors, [tokens, width] for each text,
    have MaxSim: queries first, documents second (``bei.tasks.compare.max_sim``). Raises InvalidRequestError."""
    if _is_of_tokens(first) or _is_of_tokens(second):
        return _late_interaction(manifest, _token_matrices(first, "first"), _token_matrices(second, "second"), pairwise)
    one, other = _matrix(first, "first"), _matrix(second, "second")
    if one.shape[1] != other.shape[1]:
        raise InvalidRequestError(
            f"first has vectors of {one.shape[1]} components, second of {other.shape[1]}.", "second"
        )
    named = (manifest.embedding.similarity if manifest.embedding is not None else None) or "cosine"
    if named not in _SIMILARITIES:
        raise InvalidRequestError(f"{manifest.name} compares vectors by {named}: compute that of embed's vectors.")
    score = _SIMILARITIES[named]
    if not pairwise:
        return score(one, other)
    if len(one) != len(other):
        raise InvalidRequestError(
            f"first has {len(one)} vectors, second has {len(other)}: pairs need as many.", "second"
        )
    return np.concatenate([score(row[None], pair[None])[0] for row, pair in zip(one, other, strict=True)])


def _is_of_tokens(given: ArrayLike) -> bool:
    """True for a list of matrices, as ``embed_all`` gives them."""
    return isinstance(given, (list, tuple)) and bool(given) and np.ndim(given[0]) == 2


def _token_matrices(given: ArrayLike, name: str) -> list[Float32Array]:
    if not _is_of_tokens(given):
        raise InvalidRequestError(f"{name} must be token vectors too, a list of [tokens, width] of each text.", name)
    matrices = [_array(one, name) for one in given]
    if any(one.ndim != 2 for one in matrices) or len({one.shape[1] for one in matrices if one.size}) > 1:
        raise InvalidRequestError(f"{name} must be matrices [tokens, width] of one width.", name)
    return matrices


def _late_interaction(
    manifest: Manifest, queries: list[Float32Array], documents: list[Float32Array], pairwise: bool
) -> Float32Array:
    widths = {one.shape[1] for one in (*queries, *documents) if one.size}
    if len(widths) > 1:
        raise InvalidRequestError(f"first and second have token vectors of {sorted(widths)} components.", "second")
    is_mean = is_one_of_three(manifest)
    if pairwise and len(queries) != len(documents):
        raise InvalidRequestError(
            f"first has {len(queries)} texts, second has {len(documents)}: pairs need as many.", "second"
        )
    if pairwise:
        pairs = zip(queries, documents, strict=True)
        return np.array([max_sim(one, other, is_mean=is_mean) for one, other in pairs], np.float32)
    return np.array([[max_sim(one, other, is_mean=is_mean) for other in documents] for one in queries], np.float32)


def _matrix(given: ArrayLike, name: str) -> Float32Array:
    vectors = _array(given, name)
    if vectors.ndim == 1:
        vectors = vectors[None]
    if vectors.ndim != 2 or not vectors.size:
        raise InvalidRequestError(f"{name} must be vectors [n, width] or one [width], not {[*vectors.shape]}.", name)
    return vectors


def _array(given: ArrayLike, name: str) -> Float32Array:
    try:
        return np.asarray(given, np.float32)
    except (TypeError, ValueError) as error:  # of texts, say, or of rows that are not equally long
        raise InvalidRequestError(f"{name} must be vectors of numbers ({error}).", name) from error
