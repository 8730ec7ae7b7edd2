"""Scores of pairs whose texts are read apart: by dense, sparse or token vectors, or by the weighted mean of these.

Sources: of a model with all three from one pass (BGE-M3) FlagEmbedding's ``M3Embedder.compute_score``
(arXiv:2402.03216, section 3.2); of models for late interaction ColBERT's sum (arXiv:2004.12832, equation 3).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from functools import partial
from typing import Literal, NamedTuple, TypeAlias, cast

import numpy as np

from bei.artifact.manifest import Manifest
from bei.artifact.sides import Role, Side
from bei.core import Encoding, Float32Array, Row
from bei.engine.postprocess import unit_length
from bei.engine.sparse import SparseVector, nonzero, sparse_vectors
from bei.errors import InvalidImageError, InvalidRequestError
from bei.image.source import ImageInput, MixedInput
from bei.port import UNIT_EMBEDDING
from bei.service.admission import Ticket
from bei.service.call import ModelInput, ModelRequest
from bei.service.model_service import ModelService
from bei.tasks.classify import Scores
from bei.tasks.embed import EmbedTask, TaskName, check_task
from bei.tasks.mixed import mixed_error, read_inputs
from bei.tasks.support import off_loop_if_large, require
from bei.utils.threads import off_loop

Kind: TypeAlias = Literal["dense", "sparse", "multi_vector"]
# A text, an image, or both, which a reranker may read.
Compared: TypeAlias = str | ImageInput | MixedInput
ComparedPair: TypeAlias = tuple[Compared, Compared]
ScoreMode: TypeAlias = Literal["dense", "sparse", "multi_vector", "hybrid"]

TASK_OF: Mapping[ScoreMode, TaskName] = {
    "dense": "embed",
    "sparse": "embed_sparse",
    "multi_vector": "embed_tokens",
    "hybrid": "embed",
}
_KINDS: tuple[Kind, ...] = ("dense", "sparse", "multi_vector")
_PREFERRED: tuple[Kind, ...] = ("dense", "multi_vector", "sparse")
_WEIGHTS = "score_weights"

# Token vectors are compared as they come, so many characters at a time: 65,536 tokens of 1,024 components have 256 MiB.
_CHARS_AT_ONCE = 65_536


class CompareTask(ModelRequest, frozen=True, kw_only=True):
    """Pairs of a query and a document. ``mode`` None: by the first kind of vectors that the model has, of dense, token
    and sparse ones. ``weights``: of each kind, for the mode hybrid; None: one each."""

    mode: ScoreMode | None = None
    weights: Mapping[str, float] | None = None


class _Vectors(NamedTuple):
    """Of one text; what is not asked for is None. ``dense`` [width] and rows of ``tokens`` [n, width]: unit length."""

    dense: Float32Array | None
    sparse: SparseVector | None
    tokens: Float32Array | None


class _Reading(NamedTuple):
    """How one side is read, and what is asked of the engine."""

    request: Callable[[Seq[Compared]], ModelRequest]
    role: Role | None
    outputs: frozenset[str]


def checked_weights(
    service: ModelService, mode: ScoreMode | None, weights: Mapping[str, float] | None
) -> dict[Kind, float]:
    """The kinds of vectors to compare, with the weight of each: above zero, of sum one.

    Raises TaskNotSupportedError, InvalidRequestError.
    """
    if weights is not None and mode != "hybrid":
        raise InvalidRequestError("score_weights are of the score_mode hybrid: send that, or leave them out.", _WEIGHTS)
    kinds = [kind for kind in _KINDS if TASK_OF[kind] in service.manifest.tasks]
    if mode != "hybrid":
        best: Kind = next((kind for kind in _PREFERRED if kind in kinds), "dense")
        kind: Kind = best if mode is None else mode
        require(service, TASK_OF[kind])
        _check_late_interaction(service.manifest, [kind])
        return {kind: 1.0}
    if len(kinds) < 2:
        require(service, TASK_OF[kinds[0]] if kinds else "embed")
        raise InvalidRequestError(
            f"{service.name} gives one kind of vectors, {kinds[0]}: hybrid weighs several. Leave score_mode out.",
            "score_mode",
        )
    asked = dict.fromkeys(kinds, 1.0) if weights is None else weights
    unknown = next((name for name in asked if name not in kinds), None)
    if unknown is not None:
        raise InvalidRequestError(
            f"score_weights names {unknown[:40]!r}: {service.name} gives {', '.join(kinds)}.", _WEIGHTS
        )
    total = sum(asked.values())
    if not all(0 <= weight < math.inf for weight in asked.values()) or not 0 < total < math.inf:
        raise InvalidRequestError("score_weights must be numbers from 0 on, and one of them above 0.", _WEIGHTS)
    found = {kind: asked[kind] / total for kind in kinds if asked.get(kind)}
    _check_late_interaction(service.manifest, found)
    return found


def check_alone(mode: ScoreMode | None, others: Mapping[str, object]) -> None:
    """Raise InvalidRequestError that names the first of ``others``, which are a reranker's, that is not None."""
    for name, value in others.items():
        if value is not None:
            raise InvalidRequestError(
                f"score_mode {mode or 'hybrid'} compares vectors, {name} is of a reranker: send one of them.", name
            )


def has_late_interaction(manifest: Manifest) -> bool:
    """True of a model whose vectors of tokens are trained to be compared with each other."""
    return any(info.name == "token_embedding" and info.unit_length for info in manifest.outputs)


def _check_late_interaction(manifest: Manifest, kinds: Seq[Kind] | Mapping[Kind, float]) -> None:
    if "multi_vector" in kinds and not has_late_interaction(manifest):
        raise InvalidRequestError(
            f"{manifest.name} gives its tokens' states, which are not trained for late interaction: "
            "send another score_mode.",
            "score_mode",
        )


def read_apart(service: ModelService, sides: Iterable[Compared]) -> Seq[ModelInput]:
    """``sides`` as the model reads them by themselves. Raises InvalidImageError for an image beside a text, where there
    is no vector of both."""
    given = [*sides]
    for one in given:
        if isinstance(one, MixedInput) and (error := mixed_error(service.manifest, service.name, one)) is not None:
            raise InvalidImageError(f"{error} Or ask a reranker that reads both.", error.param)
    return read_inputs(service.manifest, "", given)


async def compare(service: ModelService, task: CompareTask, *, ticket: Ticket) -> Scores:
    """A score of each pair, one column: inner products of dense vectors of unit length, inner products of sparse
    vectors, or for each token of the query the largest cosine with a token of the document: summed, in a model with
    dense and sparse vectors beside them (BGE-M3) without the first token and as the mean. Hybrid: their weighted mean.

    ``lengths``: of each text, which is read once for all pairs that are compared together. Raises
    TaskNotSupportedError, InvalidRequestError.
    """
    weights = checked_weights(service, task.mode, task.weights)
    pairs = cast("Seq[ComparedPair]", task.inputs)
    read_apart(service, (one for pair in pairs for one in pair))
    sides = _readings(service, task, weights)
    is_joint = sides[0] is sides[1]
    values = np.zeros(len(pairs), np.float32)
    lengths: list[int] = []
    cut: set[int] = set()
    queries: dict[Compared, tuple[_Vectors, bool]] = {}
    tower = service.manifest.image_tower
    of_image = 0 if tower is None else tower.num_tokens
    parts = _parts(pairs, of_image) if "multi_vector" in weights else [range(len(pairs))]
    for part in parts:
        asked = dict.fromkeys(pairs[index][0] for index in part)
        found = {text: queries[text] for text in asked if text in queries}
        texts = [text for text in asked if text not in found]
        documents = dict.fromkeys(pairs[index][1] for index in part)
        if is_joint:
            texts = [*dict.fromkeys((*texts, *(text for text in documents if text not in found)))]
        read = await _read(service, sides[0], texts, ticket, lengths)
        queries = found | read
        others = queries if is_joint else await _read(service, sides[1], [*documents], ticket, lengths)
        taken = [pairs[index] for index in part]
        work = partial(_scores, service.manifest, taken, queries, others, weights)
        values[part.start : part.stop] = await off_loop_if_large(work, _num_numbers(taken, queries, others))
        cut |= {index for index in part if queries[pairs[index][0]][1] or others[pairs[index][1]][1]}
    return Scores(lengths, sorted(cut), values=values[:, None], labels=["score"])


def _parts(pairs: Seq[ComparedPair], of_image: int) -> Iterator[range]:
    """Ranges of pairs whose texts together have not too many characters, an image being as long as ``of_image``."""

    def length(one: Compared) -> int:
        return len(one) if isinstance(one, str) else of_image

    start = num_chars = 0
    for index, pair in enumerate(pairs):
        size = length(pair[1]) + (length(pair[0]) if index and pair[0] != pairs[index - 1][0] else 0)
        if num_chars and num_chars + size > _CHARS_AT_ONCE:
            yield range(start, index)
            start, num_chars = index, 0
        num_chars += size
    yield range(start, len(pairs))


def _readings(service: ModelService, task: CompareTask, weights: Mapping[Kind, float]) -> tuple[_Reading, _Reading]:
    """How queries and documents are read: one reading for both in models without sides, and for dense vectors."""
    manifest = service.manifest
    name = TASK_OF[[*weights][-1]]
    if name == "embed" or not manifest.roles:
        both = _reading(service, task, weights, name, None)
        return both, both
    return _reading(service, task, weights, name, "query"), _reading(service, task, weights, name, "document")


def _reading(
    service: ModelService, task: CompareTask, weights: Mapping[Kind, float], name: TaskName, side: Side | None
) -> _Reading:
    manifest = service.manifest
    asked = EmbedTask((), task.options, input_type=side, is_bare=side is None)
    checked = check_task(service, asked, name)
    outputs = set()
    if "dense" in weights:
        outputs.add(UNIT_EMBEDDING)
    if "sparse" in weights and not (checked.role is not None and checked.role.table):
        outputs.add("sparse" if manifest.dimension("sparse") else "token_weights")
    if "multi_vector" in weights:
        outputs.add("token_embedding")

    def request(texts: Seq[Compared]) -> ModelRequest:
        on = checked.on(manifest, texts, None)
        return on.model_request(on.task.options)

    return _Reading(request, checked.role, frozenset(outputs))


async def _read(
    service: ModelService, reading: _Reading, texts: Seq[Compared], ticket: Ticket, lengths: list[int]
) -> dict[Compared, tuple[_Vectors, bool]]:
    """The vectors of each text, and whether it was cut. ``lengths`` grows by their tokens."""
    if not texts:
        return {}
    reduce = _without_vocabulary if "sparse" in reading.outputs else None
    answer = await service.infer(reading.request(texts), ticket=ticket, outputs=reading.outputs, reduce=reduce)
    lengths += answer.lengths
    role = reading.role
    sparse: Seq[SparseVector | None] = [None] * len(texts)
    table = service.encoder.token_weights if role is not None and role.table else None
    if table is not None or reading.outputs & {"sparse", "token_weights"}:
        work = partial(sparse_vectors, answer.rows, answer.encodings, service.encoder.special_ids, None, table)
        sparse = await off_loop(work)
    skipped = [] if role is None else role.skip_ids
    is_cut = set(answer.truncated)
    made = {}
    for index, (text, row, encoding) in enumerate(zip(texts, answer.rows, answer.encodings, strict=True)):
        tokens = _kept(row, encoding, skipped) if "token_embedding" in reading.outputs else None
        made[text] = _Vectors(row.get(UNIT_EMBEDDING), sparse[index], tokens), index in is_cut
    return made


def _without_vocabulary(row: Row, encoding: Encoding) -> dict[str, object]:
    rest = {name: values for name, values in row.items() if name != "sparse"}
    return {**rest, **nonzero(row, encoding)}


def _kept(row: Row, encoding: Encoding, skipped: Seq[int]) -> Float32Array:
    """The vectors of the tokens that count, of unit length."""
    rows = row["token_embedding"]
    if skipped:
        rows = rows[~np.isin(encoding.input_ids, skipped)]
    return unit_length(rows)


def is_one_of_three(manifest: Manifest) -> bool:
    """True of token vectors beside dense vectors and weights of tokens, as BGE-M3's."""
    return manifest.embedding is not None and manifest.dimension("token_weights") is not None


def _num_numbers(
    pairs: Seq[ComparedPair],
    queries: Mapping[Compared, tuple[_Vectors, bool]],
    documents: Mapping[Compared, tuple[_Vectors, bool]],
) -> int:
    """About as many as are multiplied."""
    return sum(
        1_000 if tokens is None or others is None else tokens.size * len(others)
        for tokens, others in ((queries[one][0].tokens, documents[other][0].tokens) for one, other in pairs)
    )


def _scores(
    manifest: Manifest,
    pairs: Seq[ComparedPair],
    queries: Mapping[Compared, tuple[_Vectors, bool]],
    documents: Mapping[Compared, tuple[_Vectors, bool]],
    weights: Mapping[Kind, float],
) -> Float32Array:
    is_mean = is_one_of_three(manifest)
    scores = np.zeros(len(pairs), np.float32)
    for kind, weight in weights.items():
        for index, (one, other) in enumerate(pairs):
            scores[index] += weight * _similarity(kind, queries[one][0], documents[other][0], is_mean=is_mean)
    return scores


def _similarity(kind: Kind, query: _Vectors, document: _Vectors, *, is_mean: bool) -> float:
    if kind == "dense":
        assert query.dense is not None  # they were asked for
        assert document.dense is not None
        return float(query.dense @ document.dense)
    if kind == "sparse":
        assert query.sparse is not None
        assert document.sparse is not None
        return sparse_product(query.sparse, document.sparse)
    assert query.tokens is not None
    assert document.tokens is not None
    return max_sim(query.tokens, document.tokens, is_mean=is_mean)


def sparse_product(one: SparseVector, other: SparseVector) -> float:
    """The inner product of two sparse vectors, whose indices ascend."""
    _, first, second = np.intersect1d(one[0], other[0], assume_unique=True, return_indices=True)
    return float(one[1][first] @ other[1][second])


def max_sim(query: Float32Array, document: Float32Array, *, is_mean: bool = False) -> float:
    """Of each query token's vector [n, width] the largest product with a token of the document [m, width], all of unit
    length: the sum, or (BGE-M3) the mean without the first token of both. A document without tokens is as far as any
    can be."""
    if is_mean:
        query, document = query[1:], document[1:]
    if not len(query):
        return 0.0
    best = (query @ document.T).max(axis=1, initial=-1.0)
    return float(best.mean() if is_mean else best.sum())
