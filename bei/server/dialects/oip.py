"""The Open Inference Protocol, version 2 over HTTP, under ``/oip``: what KServe, Triton and MLServer speak.

A model has one input, ``text``, of texts or pairs of texts, and the outputs of its first task.

Reference: github.com/kserve/open-inference-protocol, ``specification/protocol/inference_rest.md``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, TypedDict

import msgspec
import numpy as np
from starlette.convertors import Convertor, register_url_convertor
from starlette.requests import Request
from typing_extensions import NotRequired

from bei import errors
from bei.server.dialects.base import Dialect, MessageBody, message_alone
from bei.server.dialects.oip_tensors import (
    INPUT,
    LENGTH_HEADER,
    InputTensor,
    Tensor,
    content_of,
    header_length,
    texts_of,
)
from bei.server.endpoint.context import RequestContext
from bei.server.endpoint.examples import EMBEDDER, TEXTS, VECTORS, Example
from bei.server.endpoint.field_schema import limits
from bei.server.endpoint.get_responses import answers
from bei.server.endpoint.inference import embedded
from bei.server.endpoint.models import Models
from bei.server.endpoint.parse import parser
from bei.server.endpoint.render import FLOAT_BYTES, Reply
from bei.server.endpoint.route import Route
from bei.server.endpoint.shared_fields import Dimensions, Tiered
from bei.server.endpoint.truncation_fields import Truncate
from bei.server.http.routing import ApiRouter
from bei.server.routes.classify import labels_of
from bei.server.status.whole_server import WholeServer
from bei.service.service import InferenceService
from bei.tasks.classify import ClassifyTask, classify
from bei.tasks.classify import num_around as around_texts
from bei.tasks.embed import EmbedTask
from bei.tasks.rerank import RerankTask, rerank
from bei.tasks.rerank import num_around as around_pairs
from bei.tasks.support import PHRASES
from bei.tokenizer.truncation import encoding_options
from bei.version import __version__

Texts: TypeAlias = list[str] | list[tuple[str, str]]


class InferParameters(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``binary_data_output``: outputs that do not say otherwise go behind the JSON. Then what an embedder takes
    (`prompt_name`, `input_type`, `prompt`, `dimensions`, `normalize`), what classifiers and rerankers take
    (`raw_scores`: logits), and `truncate`, null: as the server is configured."""

    binary_data_output: bool = False
    prompt_name: str | None = None
    input_type: str | None = None
    prompt: str | None = None
    dimensions: Dimensions | None = None
    normalize: bool | None = None
    raw_scores: bool | None = None
    truncate: Truncate | None = None


class OutputParameters(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``binary_data``: the tensor goes behind the JSON."""

    binary_data: bool | None = None


class RequestedOutput(msgspec.Struct, kw_only=True):
    """An output that is wanted."""

    name: str
    parameters: OutputParameters | None = None


class InferRequest(Tiered, kw_only=True):
    """``outputs`` null: all that the model has."""

    inputs: Annotated[list[InputTensor], limits(minItems=1, maxItems=1)]
    id: str | None = None
    outputs: list[RequestedOutput] | None = None
    parameters: InferParameters | None = None


class ParsedInfer(NamedTuple):
    """A request to ``model``, and its texts or pairs."""

    body: InferRequest
    inputs: Texts
    model: str | None

    @property
    def parameters(self) -> InferParameters:
        """Where there are none: those that ask for nothing."""
        return self.body.parameters or InferParameters()


class TensorMetadata(TypedDict):
    """``shape``: -1 for the number of inputs."""

    name: str
    datatype: Literal["BYTES", "FP32"]
    shape: list[int]


class ModelMetadata(TypedDict):
    """A model, with its tensors."""

    name: str
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


class ServerMetadata(TypedDict):
    """This server."""

    name: Literal["bei"]
    version: str
    extensions: list[str]


class Live(TypedDict):
    """Every thread works."""

    live: Literal[True]


class Ready(TypedDict):
    """Every model answers."""

    ready: Literal[True]


class ModelReady(Ready):
    """The model answers."""

    name: str


class OutputTensor(TypedDict):
    """`data` is flat, in row-major order. A tensor behind the JSON has `parameters` with `binary_data_size` instead."""

    name: str
    shape: list[int]
    datatype: Literal["BYTES", "FP32"]
    data: NotRequired[list[float | str]]
    parameters: NotRequired[dict[str, int]]


class InferResponse(TypedDict):
    """`id` as in the request."""

    model_name: str
    outputs: list[OutputTensor]
    id: NotRequired[str]


class Inferred(NamedTuple):
    """The values of outputs by name, and the inputs that were cut."""

    outputs: Mapping[str, Any]
    truncated: Seq[int]


@dataclass(frozen=True)
class _Form:
    """How a task is asked for. ``num_texts``: how many texts an input may have. ``unused``: parameters that mean
    nothing to the task. ``outputs``: those of a model, by name."""

    task: str
    num_texts: Seq[int]
    unused: Seq[str]
    outputs: Callable[[InferenceService], Mapping[str, TensorMetadata]]
    answer: Callable[[InferenceService, ParsedInfer, RequestContext], Awaitable[Inferred]]


async def infer(request: ParsedInfer, context: RequestContext) -> Reply:
    """Embed texts, classify texts or pairs, or score pairs of a query and a document, in their order.

    The header `Inference-Header-Content-Length` says how many bytes of a body are JSON; behind them stands the input
    whose `parameters` have `binary_data_size`. Outputs are sent in the same way where they are asked for so.
    """
    service, tensors, truncated = await inferred(request, context)
    fields = {"model_name": service.name, **({} if request.body.id is None else {"id": request.body.id})}
    return Reply(content_of(fields, tensors), truncated)


async def inferred(request: ParsedInfer, context: RequestContext) -> tuple[InferenceService, list[Tensor], Seq[int]]:
    """The model that answers, the tensors that are wanted, and the inputs that were cut."""
    service = context.named(request.model)
    form = _form_of(service)
    available = form.outputs(service)
    wanted = _wanted(request, available)
    for name in form.unused:
        if getattr(request.parameters, name) is not None:
            message = f"{name} means nothing to {service.name}, which is asked to {PHRASES[form.task]}: leave it out."
            raise errors.InvalidRequestError(message, name)
    context.check_inputs(request.inputs, "inputs")
    num_texts = 2 if isinstance(request.inputs[0], tuple) else 1
    if num_texts not in form.num_texts:
        wants = " or ".join(f"[n, {count}]" if count > 1 else "[n]" for count in form.num_texts)
        raise errors.InvalidRequestError(f"{service.name} takes inputs of the shape {wants}.", "inputs")
    answer = await form.answer(service, request, context)
    tensors = [Tensor(name, answer.outputs[name], is_binary) for name, is_binary in wanted.items()]
    return service, tensors, answer.truncated


def _form_of(service: InferenceService) -> _Form:
    for task in service.manifest.tasks:
        if task in _FORMS:
            return _FORMS[task]
    can = ", ".join(service.manifest.tasks)
    raise errors.TaskNotSupportedError(
        f"{service.name} can do: {can}, whose answers are no tensors of one shape: ask on the routes of /docs.", "model"
    )


def _wanted(request: ParsedInfer, available: Mapping[str, TensorMetadata]) -> dict[str, bool]:
    """The outputs that are asked for; True: in bytes behind the JSON."""
    by_default = request.parameters.binary_data_output
    if not request.body.outputs:
        return dict.fromkeys(available, by_default)
    wanted = {}
    for output in request.body.outputs:
        if output.name not in available:
            names = ", ".join(available)
            raise errors.InvalidRequestError(f"There is no output {output.name[:40]!r}; there is {names}.", "outputs")
        is_binary = output.parameters.binary_data if output.parameters else None
        wanted[output.name] = by_default if is_binary is None else is_binary
    return wanted


async def _embed(service: InferenceService, request: ParsedInfer, context: RequestContext) -> Inferred:
    asked = request.parameters
    task = EmbedTask(
        request.inputs,
        encoding_options(asked.truncate),
        prompt_name=asked.prompt_name,
        input_type=asked.input_type,
        prompt=asked.prompt,
        dimensions=asked.dimensions,
        normalize=asked.normalize,
    )
    found = await embedded(context, service, task)
    return Inferred({"embedding": found.dense.vectors}, found.answer.truncated)


async def _classify(service: InferenceService, request: ParsedInfer, context: RequestContext) -> Inferred:
    asked, labels = request.parameters, labels_of(service)
    context.check_answer(len(request.inputs) * len(labels) * FLOAT_BYTES)
    task = ClassifyTask(request.inputs, encoding_options(asked.truncate), raw=bool(asked.raw_scores))
    ticket = context.admit(service, request.inputs, num_around=around_texts(service))
    scores = await classify(service, task, ticket=ticket)
    return Inferred({"scores": scores.values, "labels": labels}, scores.truncated)


async def _rerank(service: InferenceService, request: ParsedInfer, context: RequestContext) -> Inferred:
    asked = request.parameters
    context.check_answer(len(request.inputs) * FLOAT_BYTES)
    task = RerankTask(request.inputs, encoding_options(asked.truncate), raw=bool(asked.raw_scores))
    ticket = context.admit(service, request.inputs, num_around=around_pairs(service))
    scores = await rerank(service, task, ticket=ticket)
    return Inferred({"scores": np.ascontiguousarray(scores.values[:, 0])}, scores.truncated)


def _numbers(name: str, *shape: int) -> TensorMetadata:
    return {"name": name, "datatype": "FP32", "shape": [-1, *shape]}


def _outputs_of_embedder(service: InferenceService) -> dict[str, TensorMetadata]:
    return {"embedding": _numbers("embedding", service.embedding_width)}


def _outputs_of_classifier(service: InferenceService) -> dict[str, TensorMetadata]:
    num_labels = len(labels_of(service))
    return {
        "scores": _numbers("scores", num_labels),
        "labels": {"name": "labels", "datatype": "BYTES", "shape": [num_labels]},
    }


def _outputs_of_reranker(_: InferenceService) -> dict[str, TensorMetadata]:
    return {"scores": _numbers("scores")}


_OF_EMBEDDINGS = ("prompt_name", "input_type", "prompt", "dimensions", "normalize")

_FORMS: Mapping[str, _Form] = {
    form.task: form
    for form in (
        _Form("embed", (1,), ("raw_scores",), _outputs_of_embedder, _embed),
        _Form("classify", (1, 2), _OF_EMBEDDINGS, _outputs_of_classifier, _classify),
        _Form("rerank", (2,), _OF_EMBEDDINGS, _outputs_of_reranker, _rerank),
    )
}

_decode = parser(InferRequest)


def parse(content: bytes, max_inputs: int, model: str | None = None, length: str | None = None) -> ParsedInfer:
    """``length``: the header that says how many bytes are JSON. Raises InvalidRequestError."""
    num_bytes = header_length(length, len(content))
    body = _decode(content if num_bytes is None else content[:num_bytes])
    if len(body.inputs) != 1:
        raise errors.InvalidRequestError(f"inputs must have one tensor, {INPUT}, not {len(body.inputs)}.", "inputs")
    behind = None if num_bytes is None else memoryview(content)[num_bytes:]
    tensor = body.inputs[0]
    if behind and not (tensor.parameters and tensor.parameters.binary_data_size):
        raise errors.InvalidRequestError(f"{len(behind)} bytes follow the JSON, of which no input speaks.", "inputs")
    inputs = texts_of(tensor, behind, max_inputs)
    tensor.data = None  # or it would be kept twice
    return ParsedInfer(body, inputs, model)


_TEXT_EXAMPLE = {"name": INPUT, "shape": [len(TEXTS)], "datatype": "BYTES", "data": TEXTS}
_EMBEDDING_EXAMPLE = {
    "name": "embedding",
    "shape": [len(VECTORS), len(VECTORS[0])],
    "datatype": "FP32",
    "data": [*chain.from_iterable(VECTORS)],
}
_EXAMPLE = Example(
    {"id": "1", "inputs": [_TEXT_EXAMPLE]}, {"model_name": EMBEDDER, "id": "1", "outputs": [_EMBEDDING_EXAMPLE]}
)
_METADATA_EXAMPLE = {
    "name": EMBEDDER,
    "platform": "bei_cpu",
    "inputs": [{"name": INPUT, "datatype": "BYTES", "shape": [-1]}],
    "outputs": [{"name": "embedding", "datatype": "FP32", "shape": [-1, 384]}],
}


def _route(max_inputs: int) -> Route[ParsedInfer]:
    def parse_for(request: Request) -> Callable[[bytes], ParsedInfer]:
        model, length = request.path_params["model"], request.headers.get(LENGTH_HEADER)
        return partial(parse, max_inputs=max_inputs, model=model, length=length)

    return Route(
        "/v2/models/{model:path}/infer",
        "Infer (Open Inference Protocol)",
        InferRequest,
        InferResponse,
        partial(parse, max_inputs=max_inputs),
        infer,
        _EXAMPLE,
        octet_headers=(LENGTH_HEADER,),
        parse_for=parse_for,
    )


class _ModelName(Convertor[str]):
    """The rest of a path, unless it is that of another route: a GET of ``/infer`` is then a 405, as elsewhere."""

    regex = "(?s:.+)(?<!/infer)(?<!/ready)"

    def convert(self, value: str) -> str:
        """As it is."""
        return value

    def to_string(self, value: str) -> str:
        """As it is."""
        return value


register_url_convertor("oip_model", _ModelName())


def _reads(models: Models, server: WholeServer) -> ApiRouter:
    router = ApiRouter()

    @router.get("/v2", summary="The server (Open Inference Protocol)")
    @answers(example={"name": "bei", "version": __version__, "extensions": ["binary_tensor_data"]})
    async def server_metadata() -> ServerMetadata:
        """Its version, and what it has beside the protocol."""
        return {"name": "bei", "version": __version__, "extensions": ["binary_tensor_data"]}

    @router.get("/v2/health/live", summary="Liveness (Open Inference Protocol)")
    @answers(errors.EngineDeadError, example={"live": True})
    async def live() -> Live:
        """200 while every thread of every model works."""
        await server.check_alive()
        return {"live": True}

    @router.get("/v2/health/ready", summary="Readiness (Open Inference Protocol)")
    @answers(errors.NotReadyError, example={"ready": True})
    async def ready() -> Ready:
        """200 when every model answers as it did when it was built."""
        await server.check_ready()
        return {"ready": True}

    @router.get("/v2/models/{model:path}/ready", summary="Readiness of a model (Open Inference Protocol)")
    @answers(
        errors.InvalidRequestError,
        errors.ModelNotFoundError,
        errors.NotReadyError,
        example={"name": EMBEDDER, "ready": True},
    )
    async def model_ready(model: str) -> ModelReady:
        """200 when the model answers as it did when it was built."""
        name = models.named(model).name
        problems = await server.problems()
        if name in problems:
            raise errors.NotReadyError(problems[name])
        return {"name": name, "ready": True}

    @router.get("/v2/models/{model:oip_model}", summary="A model (Open Inference Protocol)")
    @answers(
        errors.InvalidRequestError,
        errors.ModelNotFoundError,
        errors.TaskNotSupportedError,
        example=_METADATA_EXAMPLE,
    )
    async def model_metadata(model: str) -> ModelMetadata:
        """Its input and its outputs."""
        return metadata_of(models.named(model))

    return router


def metadata_of(service: InferenceService) -> ModelMetadata:
    """The input and the outputs of a model. Raises TaskNotSupportedError."""
    form = _form_of(service)
    shape = [-1, 2] if form.num_texts == (2,) else [-1]
    return {
        "name": service.name,
        "platform": f"bei_{service.manifest.target}",
        "inputs": [{"name": INPUT, "datatype": "BYTES", "shape": shape}],
        "outputs": [*form.outputs(service).values()],
    }


def dialect(models: Models, max_inputs: int, server: WholeServer) -> Dialect:
    """The dialect of the Open Inference Protocol, for requests of at most ``max_inputs`` inputs."""
    return Dialect(
        "oip",
        "Open Inference Protocol",
        (_route(max_inputs),),
        message_alone,
        MessageBody,
        _reads(models, server),
        probes=("/v2/health/live", "/v2/health/ready"),
    )
