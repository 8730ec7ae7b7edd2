"""Vectors of inputs: dense, sparse, a vector a token, and late chunking."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import partial
from typing import Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from bei.artifact.int8 import scaled
from bei.artifact.manifest import Manifest
from bei.artifact.sides import Role
from bei.core import Float32Array
from bei.engine.postprocess import cut, means_of_chunks, unit_length
from bei.engine.sparse import SparseVector, nonzero, sparse_vectors
from bei.errors import BeiError, InvalidImageError, InvalidRequestError
from bei.image.source import ImageInput, ImagesInText, MixedInput
from bei.port import UNIT_EMBEDDING
from bei.service.admission import Ticket
from bei.service.call import InferenceResult, ModelRequest
from bei.service.image_side import no_images
from bei.service.model_service import ModelService
from bei.tasks.dimensions import check_dimensions
from bei.tasks.mixed import Given, mixed_error, read_inputs
from bei.tasks.support import PartialResult, computed, off_loop_if_large, require
from bei.tokenizer.adapters import adapter_name, adapter_of, is_task
from bei.tokenizer.encoder import EncodingOptions
from bei.tokenizer.prompts import (
    apply_prompt_to_inputs,
    choose_prompt,
    keep_prompt,
    num_chars,
    role_of,
    split_prompt,
    with_role,
)
from bei.utils.threads import off_loop

# Sparse vectors of more texts are made off the event loop.
_MANY_TEXTS = 32

# Types of inputs without an image.
_WITHOUT_IMAGE = frozenset((str, list))
# Inputs that no prompt is put in front of.
_PROMPTLESS = (list, ImageInput)
# Those with an image.
_WITH_IMAGE = (ImageInput, MixedInput)

TaskName: TypeAlias = Literal["embed", "embed_sparse", "embed_tokens"]


class EmbedTask(ModelRequest, frozen=True, kw_only=True):
    """Which vectors of its inputs, of which one may be a MixedInput, a request asks for. Routes, dialects and
    ``bei.offline`` make it.

    ``prompt_name``, ``input_type``, ``prompt``: the prompt of texts, and the side that they are on
    (``bei.tokenizer.prompts``). ``is_bare``: texts have no prompt and no side, whatever the model's default.
    ``dimensions``: dense vectors are cut to so many components (Matryoshka) before they are normalized.
    ``normalize`` None: as the checkpoint says of dense vectors, or as the model's late interaction has vectors of
    tokens. ``top_k``: only so many of the largest weights of a sparse vector (sentence-transformers'
    ``max_active_dims``). ``late_chunking``: inputs are chunks of one document, which the model reads whole.
    ``param`` and ``dimensions_param``: the fields that errors blame.
    """

    prompt_name: str | None = None
    input_type: str | None = None
    prompt: str | None = None
    is_bare: bool = False
    dimensions: int | None = None
    normalize: bool | None = None
    top_k: int | None = None
    late_chunking: bool = False
    param: str = "inputs"
    dimensions_param: str = "dimensions"


class CheckedTask(NamedTuple):
    """A task that the model can do: ``check_task`` makes it.

    ``prompt`` stands in front of texts or around them. ``role``: the side of sparse and token vectors, whose options
    ``task`` has. ``width``: components of dense vectors. ``warnings`` are for the client.
    """

    task: EmbedTask
    prompt: str
    role: Role | None
    width: int
    warnings: Seq[str]

    @property
    def num_around(self) -> int:
        """Characters of the prompt, which are read with each text."""
        return num_chars(self.prompt) if self.prompt else 0

    def on(self, manifest: Manifest, inputs: Seq[Given], failed: Mapping[int, BeiError] | None) -> CheckedTask:
        """The same task for other inputs."""
        read = read_inputs(manifest, self.prompt, inputs)
        return self._replace(task=msgspec.structs.replace(self.task, inputs=read, failed=failed))

    def model_request(self, options: EncodingOptions) -> ModelRequest:
        """The inputs as the model reads them, tokenized by ``options``."""
        if not self.prompt and options is self.task.options:
            return self.task
        inputs = apply_prompt_to_inputs(self.prompt, self.task.inputs)
        return ModelRequest(inputs, keep_prompt(self.prompt, options), self.task.failed, self.task.adapter)


class Embeddings(PartialResult, frozen=True, kw_only=True):
    """``vectors`` float32 [n, dimension], row i for input i, zeros where it has an error.

    ``int8_largest``: the component that is 127 where these vectors are written as bytes; None where nothing says it.
    ``image_tokens``: of inputs of an image and a text, by their places, the tokens that stand for the image.
    """

    vectors: Float32Array
    int8_largest: float | None = None
    image_tokens: Mapping[int, int] = msgspec.field(default_factory=dict)


class TokenEmbeddings(PartialResult, frozen=True, kw_only=True):
    """``vectors[i]`` float32 [tokens, dimension] for input i, special tokens included, a role's skipped ones not; none
    where it has an error."""

    vectors: list[Float32Array]


class SparseEmbeddings(PartialResult, frozen=True, kw_only=True):
    """``vectors[i]`` for input i, without weights where it has an error."""

    vectors: list[SparseVector]


def check_task(service: ModelService, task: EmbedTask, name: TaskName) -> CheckedTask:
    """All checks of ``task`` that need no inputs. ``name``: the manifest's, of the vectors that are asked for.

    Raises TaskNotSupportedError, InvalidRequestError.
    """
    require(service, name)
    manifest, dimensions = service.manifest, task.dimensions
    warnings: list[str] = []
    width = 0
    if dimensions is not None:
        param = task.dimensions_param
        warning = check_dimensions(manifest, dimensions, param, untrained=service.untrained_dimensions)
        if name != "embed":
            raise InvalidRequestError(f"{param} works with dense vectors only: leave it out.", param)
        if warning is not None:
            warnings.append(warning)
    if name == "embed":
        width = dimensions or service.embedding_width
        if manifest.engine.unit_vectors and not _is_normalized(manifest, task):
            raise InvalidRequestError(
                f"{manifest.name} gives vectors of unit length only, as its engine ({manifest.target}) makes them: "
                "leave normalize out.",
                "normalize",
            )
    if task.late_chunking:
        _check_late_chunking(manifest)
    if manifest.adapters:
        adapter = adapter_of(manifest, task.prompt_name, task.input_type, asked=service.adapter or task.adapter)
        task = msgspec.structs.replace(task, adapter=adapter)
    task = _check_images(service, task, name)
    if task.is_bare:
        return _checked(manifest, CheckedTask(task, "", None, width, warnings))
    if task.prompt_name is None and task.input_type is None and task.prompt is None:
        if service.adapter and is_task(manifest, named := adapter_name(manifest, service.adapter)):
            asked = choose_prompt(manifest, None, named)  # a task by the model's name has its prompt too
        else:
            asked = service.default_prompt
    else:
        asked = choose_prompt(manifest, task.prompt_name, task.input_type, task.prompt)
    if asked.warning is not None and not (task.inputs and all(isinstance(one, _PROMPTLESS) for one in task.inputs)):
        warnings.append(asked.warning)
    role = None if name == "embed" else role_of(manifest, task.prompt_name, task.input_type)
    if role is not None:
        task = msgspec.structs.replace(task, options=with_role(task.options, role))
    return _checked(manifest, CheckedTask(task, asked.text, role, width, warnings))


def _checked(manifest: Manifest, found: CheckedTask) -> CheckedTask:
    """``found`` with inputs as the model reads them."""
    return found.on(manifest, found.task.inputs, found.task.failed) if manifest.images else found


async def embed_inputs(service: ModelService, checked: CheckedTask, *, ticket: Ticket) -> Embeddings:
    """Embed texts, each with the prompt, and lists of token ids, exactly as given: no prompt, no special tokens added,
    never truncated."""
    manifest, task, width = service.manifest, checked.task, checked.width
    assert manifest.embedding is not None  # ``check_task`` has passed
    normalize = _is_normalized(manifest, task)
    is_cut = task.dimensions is not None and width < service.embedding_width
    output = UNIT_EMBEDDING if normalize and not is_cut else "embedding"
    options = task.options
    if checked.prompt and not manifest.embedding.pools_prompt:
        options = replace(options, unpooled_prompt=split_prompt(checked.prompt)[0])
    answer = await service.infer(checked.model_request(options), ticket=ticket, outputs={output})
    if answer.rows:
        shorten = partial(cut, dimensions=width, normalize=normalize) if is_cut else None
        vectors = await computed(answer.rows, output, shorten)
    else:  # every input has an error
        vectors = np.zeros((0, width), np.float32)
    largest = _int8_largest(manifest, width) if is_cut else manifest.embedding.int8_largest
    vectors = answer.spread_rows(vectors)
    return Embeddings(
        answer.lengths,
        answer.truncated,
        answer.errors,
        vectors=vectors,
        int8_largest=largest,
        image_tokens=_image_tokens(manifest, task, answer),
    )


async def dropped_tokens(
    service: ModelService, checked: CheckedTask, result: PartialResult, *, ticket: Ticket
) -> dict[int, int | None]:
    """The number of tokens cut off each input that ``result`` names as truncated; None where the tokenizer cannot count
    so long a text."""
    if not result.truncated:
        return {}
    task = checked.task
    cut = apply_prompt_to_inputs(checked.prompt, [task.inputs[index] for index in result.truncated])
    ticket.check_tokens = None  # it bounds the answer, which does not grow with tokens that are only counted
    options = replace(task.options, whole=True, max_tokens=None)
    encodings = await service.encode(ModelRequest(cut, options, failed={}), ticket=ticket)  # texts: ids are never cut
    return {
        index: encoding.num_tokens - result.lengths[index] if encoding.num_tokens else None
        for index, encoding in zip(result.truncated, encodings, strict=True)
    }


async def embed_tokens(service: ModelService, checked: CheckedTask, *, ticket: Ticket) -> TokenEmbeddings:
    """A vector a token of each text, unless the task says otherwise of unit length in models for late interaction
    (arXiv:2004.12832), which read and answer queries and documents as their role says."""
    manifest = service.manifest
    asked = checked.model_request(checked.task.options)
    answer = await service.infer(asked, ticket=ticket, outputs={"token_embedding"})
    of_model = any(output.unit_length for output in manifest.outputs if output.name == "token_embedding")
    unit = of_model if checked.task.normalize is None else checked.task.normalize
    lengths = answer.lengths
    num_numbers = sum(lengths) * (manifest.dimension("token_embedding") or 0)
    made = await off_loop_if_large(partial(_token_vectors, answer, checked.role, unit), num_numbers)
    vectors = answer.spread(made, np.zeros((0, 0), np.float32))
    return TokenEmbeddings(lengths, answer.truncated, answer.errors, vectors=vectors)


async def embed_sparse(service: ModelService, checked: CheckedTask, *, ticket: Ticket) -> SparseEmbeddings:
    """Weights of vocabulary entries: SPLADE's or those of the inputs' own tokens (BGE-M3), above zero, or a table's."""
    encoder, role = service.encoder, checked.role
    table = encoder.token_weights if role is not None and role.table else None
    output = None if table is not None else "sparse" if service.manifest.dimension("sparse") else "token_weights"
    answer = await service.infer(
        checked.model_request(checked.task.options),
        ticket=ticket,
        outputs=set() if output is None else {output},
        reduce=nonzero if output == "sparse" else None,
    )
    top_k = checked.task.top_k
    work = partial(sparse_vectors, answer.rows, answer.row_encodings, encoder.special_ids, top_k, table)
    made = await off_loop(work) if len(checked.task.inputs) > _MANY_TEXTS else work()
    vectors = answer.spread(made, (np.zeros(0, np.int32), np.zeros(0, np.float32)))
    return SparseEmbeddings(answer.lengths, answer.truncated, answer.errors, vectors=vectors)


async def embed_chunks(service: ModelService, checked: CheckedTask, *, ticket: Ticket) -> Embeddings:
    """Late chunking (arXiv:2409.04701): read the inputs as one document, a space between two, and embed each as the
    mean of its tokens' states, which have seen the others.

    The mean is of the last layer's states: right only where nothing but unit length follows the pooling. For models
    with mean pooling that were built with their tokens' states. Raises InvalidRequestError where the document is too
    long.
    """
    task = checked.task
    before, after = split_prompt(checked.prompt)
    document, ends = before, []
    for chunk in task.inputs:
        assert isinstance(chunk, str)
        document += chunk
        ends.append(len(document))
        document += " "
    asked = ModelRequest(
        [document[:-1] + after], EncodingOptions(truncate=False, with_spans=True), adapter=task.adapter
    )
    answer = await service.infer(asked, ticket=ticket, outputs={"token_embedding"})
    spans = answer.encodings[0].spans
    assert spans is not None  # they were asked for
    owner = np.searchsorted(ends, spans.offsets[:, 1])  # of each token, the chunk in which it ends
    owner[spans.special | (spans.offsets[:, 1] <= len(before))] = -1
    counts = np.bincount(owner[owner >= 0], minlength=len(ends))
    if not counts.all():
        raise InvalidRequestError(f"input {counts.argmin()} has no tokens: leave it out.", "input")
    states = answer.rows[0]["token_embedding"]
    vectors = await off_loop_if_large(partial(means_of_chunks, states, owner, counts), states.size)
    vectors = vectors[:, : checked.width]
    vectors = unit_length(vectors) if _is_normalized(service.manifest, task) else vectors
    largest = _int8_largest(service.manifest, checked.width)
    return Embeddings(answer.lengths, [], vectors=vectors, int8_largest=largest)


def _image_tokens(manifest: Manifest, task: EmbedTask, answer: InferenceResult) -> dict[int, int]:
    tower = manifest.image_tower
    if tower is None or not tower.sequence:
        return {}
    token = tower.sequence.token_id  # refused in texts
    places = [place for place, value in enumerate(task.inputs) if isinstance(value, ImagesInText)]
    return {place: int(np.count_nonzero(answer.encodings[place].input_ids == token)) for place in places}


def _is_normalized(manifest: Manifest, task: EmbedTask) -> bool:
    if task.normalize is not None:
        return task.normalize
    return manifest.embedding is not None and manifest.embedding.normalize


def _int8_largest(manifest: Manifest, dimensions: int) -> float | None:
    largest = manifest.embedding.int8_largest if manifest.embedding else None
    return None if largest is None else scaled(largest, manifest.dimension("embedding") or dimensions, dimensions)


def _token_vectors(answer: InferenceResult, role: Role | None, unit: bool) -> list[Float32Array]:
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


def _check_images(service: ModelService, task: EmbedTask, name: TaskName) -> EmbedTask:
    """``task``, of which inputs with images fail that ``image_error`` refuses. Raises it where the answer is to be
    whole."""
    given: Seq[Given] = task.inputs
    if _WITHOUT_IMAGE.issuperset(map(type, given)):
        return task
    images = {place: value for place, value in enumerate(given) if isinstance(value, _WITH_IMAGE)}
    if not images:
        return task
    errors = {}
    for place, value in images.items():
        error = image_error(service, name, task.adapter, task.param, value)
        if error is None and task.late_chunking:
            error = InvalidImageError("Chunks of one document are texts: send no images.", task.param)
        if error is not None:
            errors[place] = error
    if not errors:
        return task
    if task.failed is None:
        raise errors[min(errors)]
    return msgspec.structs.replace(task, failed={**errors, **task.failed})


def image_error(
    service: ModelService, name: TaskName, adapter: int, param: str, value: ImageInput | MixedInput
) -> InvalidImageError | None:
    """The error of ``value`` for this kind of vectors; None where the model has them of it."""
    tower = service.manifest.image_tower
    if tower is None:
        return no_images(service.name, param)
    of_images = "embed_tokens" if service.manifest.reads_images_by_token else "embed"
    if name != of_images:
        kind = "dense vectors only, one each" if of_images == "embed" else "a vector a token only"
        return InvalidImageError(f"Images have {kind}: send texts.", param)
    if adapter:
        return InvalidImageError("Adapters read texts only: send images without one.", param)
    return mixed_error(service.manifest, service.name, value) if isinstance(value, MixedInput) else None


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
