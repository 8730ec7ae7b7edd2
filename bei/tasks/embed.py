"""Vectors of texts: dense, sparse, a vector a token, and late chunking."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import partial

import msgspec
import numpy as np
import numpy.typing as npt

from bei.artifact.int8 import scaled
from bei.artifact.manifest import Manifest
from bei.artifact.sides import Role
from bei.core import Float32Array
from bei.engine.postprocess import cut, means_of_chunks, unit_length
from bei.engine.sparse import SparseVector, nonzero, sparse_vectors
from bei.errors import BeiError, InvalidRequestError
from bei.port import UNIT_EMBEDDING
from bei.service.admission import Ticket
from bei.service.service import Answer, InferenceService
from bei.service.submission import ModelInput
from bei.tasks.dimensions import check_dimensions
from bei.tasks.partial import Fates, tried
from bei.tasks.support import MANY_NUMBERS, computed, require
from bei.tokenizer.encoder import AS_CONFIGURED, EncodingOptions
from bei.tokenizer.prompts import in_role, keeping, prompted, prompted_inputs, sides_of
from bei.utils.threads import off_loop

# Sparse vectors of more texts are made off the event loop.
_MANY_TEXTS = 32


class Embeddings(msgspec.Struct, frozen=True):
    """``vectors`` float32 [n, dimension], row i for input i, zeros where it has an error. The other fields: ``Fates``.

    ``int8_largest``: the component that is 127 where these vectors are written as bytes; None where nothing says it.
    """

    vectors: Float32Array
    num_tokens: int
    truncated: list[int]
    int8_largest: float | None = None
    errors: Mapping[int, BeiError] = msgspec.field(default_factory=dict)
    lengths: Seq[int] = ()


class TokenEmbeddings(msgspec.Struct, frozen=True):
    """``vectors[i]`` float32 [tokens, dimension] for input i, special tokens included, a role's skipped ones not; none
    where it has an error. The other fields: ``Fates``."""

    vectors: list[Float32Array]
    num_tokens: int
    truncated: list[int]
    errors: Mapping[int, BeiError] = msgspec.field(default_factory=dict)
    lengths: Seq[int] = ()


class SparseEmbeddings(msgspec.Struct, frozen=True):
    """``vectors[i]`` for input i, without weights where it has an error. The other fields: ``Fates``."""

    vectors: list[SparseVector]
    num_tokens: int
    truncated: list[int]
    errors: Mapping[int, BeiError] = msgspec.field(default_factory=dict)
    lengths: Seq[int] = ()


async def embed_inputs(
    service: InferenceService,
    inputs: Seq[ModelInput],
    *,
    ticket: Ticket,
    prompt: str = "",
    dimensions: int | None = None,
    normalize: bool | None = None,
    options: EncodingOptions = AS_CONFIGURED,
    wrong: Mapping[int, BeiError] | None = None,
) -> Embeddings:
    """Embed texts, ``prompt`` in front of each, and lists of token ids, exactly as given: no prompt, no special tokens
    added, never truncated. Vectors are cut to ``dimensions`` (Matryoshka) before they are normalized.

    ``normalize`` None is as the checkpoint says. ``wrong`` asks for a part of the answer, where not all can be had: it
    holds the errors of inputs, by their places, that are not to be tried.
    """
    require(service, "embed")
    manifest = service.manifest
    check_dimensions(manifest, dimensions)
    assert manifest.embedding is not None  # require("embed") has passed
    normalize = manifest.embedding.normalize if normalize is None else normalize
    if not normalize and manifest.engine.unit_vectors:
        raise InvalidRequestError(
            f"{manifest.name} gives vectors of unit length only, as its engine ({manifest.target}) makes them: leave "
            "normalize out.",
            "normalize",
        )
    most = manifest.dimension("embedding") or 0
    width = min(most, dimensions or most)
    is_cut = width < most
    output = UNIT_EMBEDDING if normalize and not is_cut else "embedding"
    if prompt and not manifest.embedding.pools_prompt:
        options = replace(options, unpooled_prompt=sides_of(prompt)[0])
    options = keeping(prompt, options)
    given = prompted_inputs(prompt, inputs)
    answer, fates = await tried(service, given, wrong, ticket=ticket, output=output, options=options)
    vectors = np.zeros((0, width), np.float32)  # where every input has an error
    if answer.rows:
        shorten = partial(cut, dimensions=width, normalize=normalize) if is_cut else None
        vectors = await computed(answer.rows, output, shorten)
    largest = _int8_largest(manifest, width) if is_cut else manifest.embedding.int8_largest
    if fates.errors:
        whole = np.zeros((len(inputs), width), np.float32)
        whole[[index for index in range(len(inputs)) if index not in fates.errors]] = vectors
        vectors = whole
    return Embeddings(vectors, answer.num_tokens, fates.truncated, largest, fates.errors, fates.lengths)


async def dropped_tokens(
    service: InferenceService,
    inputs: Seq[ModelInput],
    answer: Fates,
    *,
    ticket: Ticket,
    prompt: str = "",
    options: EncodingOptions = AS_CONFIGURED,
) -> dict[int, int | None]:
    """How many tokens were cut off each of the inputs that ``answer`` names as truncated; None where the tokenizer
    cannot count so long a text. The other arguments are those of the task."""
    if not answer.truncated:
        return {}
    cut = prompted_inputs(prompt, [inputs[index] for index in answer.truncated])
    texts = [text for text in cut if isinstance(text, str)]  # ids are never cut
    ticket.check_tokens = None  # it bounds the answer, which does not grow with tokens that are only counted
    options = replace(options, whole=True, max_tokens=None)
    encodings = await service.encode(texts, ticket=ticket, options=options, in_part=True)
    return {
        index: encoding.num_tokens - answer.lengths[index] if encoding.num_tokens else None
        for index, encoding in zip(answer.truncated, encodings, strict=True)
    }


async def embed_tokens(
    service: InferenceService,
    texts: Seq[str],
    *,
    ticket: Ticket,
    prompt: str = "",
    role: Role | None = None,
    options: EncodingOptions = AS_CONFIGURED,
    wrong: Mapping[int, BeiError] | None = None,
) -> TokenEmbeddings:
    """A vector a token, of unit length in models for late interaction (arXiv:2004.12832), which read and answer
    queries and documents as their ``role`` says. ``wrong``: as of ``embed_inputs``."""
    require(service, "embed_tokens")
    inputs, options = prompted(prompt, texts), in_role(keeping(prompt, options), role)
    answer, fates = await tried(service, inputs, wrong, ticket=ticket, output="token_embedding", options=options)
    unit = any(output.unit_length for output in service.manifest.outputs if output.name == "token_embedding")
    work = partial(_token_vectors, answer, role, unit)
    is_large = answer.num_tokens * (service.manifest.dimension("token_embedding") or 0) > MANY_NUMBERS
    made = await off_loop(work) if is_large else work()
    vectors = fates.spread(made, np.zeros((0, 0), np.float32))
    return TokenEmbeddings(vectors, answer.num_tokens, fates.truncated, fates.errors, fates.lengths)


async def embed_chunks(
    service: InferenceService,
    chunks: Seq[str],
    *,
    ticket: Ticket,
    prompt: str = "",
    dimensions: int | None = None,
    normalize: bool | None = None,
) -> Embeddings:
    """Late chunking (arXiv:2409.04701): read ``chunks`` as one document, a space between two, and embed each as the
    mean of its tokens' states, which have seen the others.

    The mean is of the last layer's states: right only where nothing but unit length follows the pooling. For models
    with mean pooling that were built with their tokens' states. Raises InvalidRequestError too where the document is
    too long.
    """
    require(service, "embed")
    _check_late_chunking(service.manifest)
    check_dimensions(service.manifest, dimensions)
    before, behind = sides_of(prompt)
    document, ends = before, []
    for chunk in chunks:
        document += chunk
        ends.append(len(document))
        document += " "
    options = EncodingOptions(truncate=False, with_spans=True)
    answer = await service.infer([document[:-1] + behind], ticket=ticket, outputs={"token_embedding"}, options=options)
    spans = answer.encodings[0].spans
    assert spans is not None  # they were asked for
    owner = np.searchsorted(ends, spans.offsets[:, 1])  # of each token, the chunk in which it ends
    owner[spans.special | (spans.offsets[:, 1] <= len(before))] = -1
    counts = np.bincount(owner[owner >= 0], minlength=len(chunks))
    if not counts.all():
        raise InvalidRequestError(f"input {counts.argmin()} has no tokens: leave it out.", "input")
    states = answer.rows[0]["token_embedding"]
    work = partial(means_of_chunks, states, owner, counts)
    vectors = (await off_loop(work) if states.size > MANY_NUMBERS else work())[:, :dimensions]
    unit = service.manifest.embedding.normalize if normalize is None and service.manifest.embedding else normalize
    vectors = unit_length(vectors) if unit else vectors
    return Embeddings(vectors, answer.num_tokens, [], _int8_largest(service.manifest, vectors.shape[1]))


async def embed_sparse(
    service: InferenceService,
    inputs: Seq[ModelInput],
    *,
    ticket: Ticket,
    prompt: str = "",
    role: Role | None = None,
    top_k: int | None = None,
    options: EncodingOptions = AS_CONFIGURED,
    wrong: Mapping[int, BeiError] | None = None,
) -> SparseEmbeddings:
    """Weights of vocabulary entries: SPLADE's or those of the inputs' own tokens (BGE-M3), above zero, or a table's.

    ``top_k``: only the largest so many of each input (sentence-transformers' ``max_active_dims``). The other arguments
    are those of ``embed_inputs``.
    """
    require(service, "embed_sparse")
    given, options = prompted_inputs(prompt, inputs), in_role(keeping(prompt, options), role)
    table = service.encoder.token_weights if role is not None and role.table else None
    output = None if table is not None else "sparse" if service.manifest.dimension("sparse") else "token_weights"
    reduce = nonzero if output == "sparse" else None
    answer, fates = await tried(service, given, wrong, ticket=ticket, output=output, options=options, reduce=reduce)
    work = partial(sparse_vectors, answer.rows, answer.row_encodings, service.encoder.special_ids, top_k, table)
    made = await off_loop(work) if len(inputs) > _MANY_TEXTS else work()
    vectors = fates.spread(made, (np.zeros(0, np.int32), np.zeros(0, np.float32)))
    return SparseEmbeddings(vectors, answer.num_tokens, fates.truncated, fates.errors, fates.lengths)


def _int8_largest(manifest: Manifest, dimensions: int) -> float | None:
    largest = manifest.embedding.int8_largest if manifest.embedding else None
    return None if largest is None else scaled(largest, manifest.dimension("embedding") or dimensions, dimensions)


def _token_vectors(answer: Answer, role: Role | None, unit: bool) -> list[Float32Array]:
    """Takes the rows out of ``answer``: they are the largest of all, and should not lie in memory twice."""
    kept: Seq[npt.NDArray[np.bool_]] | None = None
    if role is not None and role.skip_ids and answer.rows:
        ids = np.concatenate([encoding.input_ids for encoding in answer.row_encodings])
        ends = np.cumsum([encoding.num_tokens for encoding in answer.row_encodings])
        kept = np.split(~np.isin(ids, role.skip_ids), ends[:-1])  # at once: a call of isin costs 13 us for any text
    vectors = []
    for index, row in enumerate(answer.rows):
        rows = row["token_embedding"] if kept is None else row["token_embedding"][kept[index]]
        vectors.append(unit_length(rows) if unit else rows)
        answer.rows[index] = {}
    return vectors


def _check_late_chunking(manifest: Manifest) -> None:
    """Raise InvalidRequestError unless the mean of the tokens' states is the embedding, but for its length."""
    name, embedding = manifest.name, manifest.embedding
    states = next((output for output in manifest.outputs if output.name == "token_embedding"), None)
    if embedding is None or embedding.pooling != "mean":
        fault = f"Late chunking needs a model with mean pooling, which {name} has not:"
    elif embedding.layers_follow_pooling is True:
        fault = f"Late chunking needs a model that ends with its pooling; {name} has further layers behind it:"
    elif states is None or states.unit_length or states.dimension != manifest.dimension("embedding"):
        fault = f"{name} does not give its tokens' states: build it with --token-embeddings, or"
    elif embedding.layers_follow_pooling is msgspec.UNSET:
        fault = f"The artifact of {name} does not say whether layers follow its pooling: build it again, or"
    else:
        return
    raise InvalidRequestError(f"{fault} send late_chunking false.", "late_chunking")
