"""Ollama's API, under ``/ollama`` and where its clients ask for it: ``/api``.

Reference: github.com/ollama/ollama, ``docs/api.md`` and ``api/types.go``. Names of models may end in ``:latest``, which
is what a name without a tag means there. ``keep_alive`` and all ``options`` but ``num_ctx`` change no embedding.
"""

from __future__ import annotations

import time
from datetime import datetime, timezone
from typing import Annotated, Any, Literal, TypedDict

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from bei import errors
from bei.errors import InvalidRequestError, MalformedRequestError, ModelNotFoundError
from bei.server.dialects.base import Dialect, MessageBody, message_alone
from bei.server.endpoint.context import RequestContext
from bei.server.endpoint.examples import CREATED, EMBEDDER, HEX, NUM_TOKENS, TEXTS, VECTORS, Example
from bei.server.endpoint.field_schema import Text
from bei.server.endpoint.get_responses import RequestBody, answers
from bei.server.endpoint.inference import embedded
from bei.server.endpoint.models import Models
from bei.server.endpoint.parse import parser, read_now
from bei.server.endpoint.render import Reply
from bei.server.endpoint.route import Route
from bei.server.endpoint.shared_fields import Dimensions, Model, Tiered
from bei.server.endpoint.vector_encoding import FLOATS
from bei.server.http.responses import read_body
from bei.server.http.routing import ApiRouter
from bei.server.routes import systemone
from bei.service.service import InferenceService
from bei.tasks.embed import EmbedTask
from bei.tokenizer.encoder import EncodingOptions
from bei.version import __version__

_LATEST = ":latest"
_NDJSON = "application/x-ndjson"
_MOST_BYTES = 100_000  # of a request that names a model
_NEVER = "9999-12-31T23:59:59Z"
_THOUSAND, _MILLION, _BILLION = 10**3, 10**6, 10**9


class Options(msgspec.Struct, kw_only=True):
    """``num_ctx``: most tokens of an input, if the model takes more."""

    num_ctx: Annotated[int, Meta(ge=1)] | None = None


class EmbedRequest(Tiered, kw_only=True):
    """``truncate`` null: true. Without inputs the answer has no vectors."""

    model: Model | None = None
    input: str | list[Text] | None = None
    truncate: bool | None = None
    dimensions: Dimensions | None = None
    options: Options | None = None
    keep_alive: str | float | None = None


class EmbeddingsRequest(Tiered, kw_only=True):
    """The older form, of one text. An empty one has no vector."""

    model: Model | None = None
    prompt: str | None = None
    options: Options | None = None
    keep_alive: str | float | None = None


class EmbedResponse(TypedDict):
    """Vectors of unit length in the order of the texts, and times in nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class EmbeddingsResponse(TypedDict):
    """The vector as the model gives it."""

    embedding: list[float]


class ShowRequest(msgspec.Struct, kw_only=True):
    """``name`` is what older clients send. Both may be left out where one model is served."""

    model: str | None = None
    name: str | None = None


class Pulled(TypedDict):
    """The answer where no stream is asked for."""

    status: Literal["success"]


class PullRequest(ShowRequest, kw_only=True):
    """``stream`` null: true, a line for each step; false: the last one alone."""

    stream: bool | None = None


class Details(TypedDict):
    """A model in a few words."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str
    context_length: int
    embedding_length: int


class ListedModel(TypedDict):
    """``modified_at`` is when the server was started, ``digest`` the artifact's."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: Details
    capabilities: list[str]


class RunningModel(ListedModel):
    """A model that is loaded: all are, until the server ends."""

    expires_at: str
    size_vram: int
    context_length: int


class ListedModels(TypedDict):
    """Every served model."""

    models: list[ListedModel]


class RunningModels(TypedDict):
    """Every served model."""

    models: list[RunningModel]


class ShowResponse(TypedDict):
    """A model."""

    modelfile: str
    parameters: str
    template: str
    details: Details
    model_info: dict[str, int | str]
    capabilities: list[str]
    modified_at: str


class Version(TypedDict):
    """This server's, not Ollama's."""

    version: str


_parse_embed = parser(EmbedRequest)


def _embed_request(content: bytes) -> EmbedRequest:
    try:
        return _parse_embed(content)
    except MalformedRequestError as error:
        if error.param == "input":  # in Ollama's words
            message = "invalid input type: input must be a text or a list of texts."
            raise MalformedRequestError(message, "input") from error
        raise


async def embed(body: EmbedRequest, context: RequestContext) -> Reply:
    """Embed texts: vectors of unit length. Texts that are too long are cut, unless `truncate` is false."""
    begun_ns = time.perf_counter_ns()
    service = _able(context, body.model)
    texts = body.input if isinstance(body.input, list) else [body.input] if body.input else []  # none, of an empty text
    content: dict[str, object] = {"model": body.model or service.name, "embeddings": []}
    num_tokens, truncated = 0, list[int]()
    if texts:
        options = _options(body.options, truncate=body.truncate is not False)
        task = EmbedTask(texts, options, dimensions=body.dimensions, normalize=True, param="input")
        found = await embedded(context, service, task)
        content["embeddings"] = FLOATS.items(found.dense)
        num_tokens, truncated = found.answer.num_tokens, [*found.answer.truncated]
    content |= {
        "total_duration": time.perf_counter_ns() - begun_ns,
        "load_duration": 0,
        "prompt_eval_count": num_tokens,
    }
    return Reply(content, truncated)


async def embed_prompt(body: EmbeddingsRequest, context: RequestContext) -> Reply:
    """Embed one text: the vector as the model gives it, which may have another length than one."""
    service = _able(context, body.model)
    if not body.prompt:
        return Reply({"embedding": []})
    normalize = service.manifest.engine.unit_vectors  # or as the engine gives it
    task = EmbedTask([body.prompt], _options(body.options), normalize=normalize, param="prompt")
    found = await embedded(context, service, task)
    (row,) = found.dense.vectors
    return Reply({"embedding": row}, found.answer.truncated)


def _options(asked: Options | None, *, truncate: bool = True) -> EncodingOptions:
    return EncodingOptions(truncate, max_tokens=asked.num_ctx if asked else None)


def _able(context: RequestContext, name: str | None) -> InferenceService:
    """The embedder that is called ``name``, with or without its tag; None: the only one. Raises ModelNotFoundError."""
    try:
        return context.able("embed", _untagged(context.models, name))
    except ModelNotFoundError as error:
        raise _not_found(name, error) from None


def _named(models: Models, name: str | None) -> InferenceService:
    try:
        return models.named(_untagged(models, name))
    except ModelNotFoundError as error:
        raise _not_found(name, error) from None


def _not_found(name: str | None, error: ModelNotFoundError) -> ModelNotFoundError:
    """With the words that clients look for."""
    return ModelNotFoundError(f"model {name!r} not found: {error}", "model")


def _untagged(models: Models, name: str | None) -> str | None:
    return name if name is None or name in models else name.removesuffix(_LATEST)


def _tagged(name: str) -> str:
    return name if ":" in name else f"{name}{_LATEST}"


def _shortened(count: int) -> str:
    """As Ollama writes numbers of parameters: 22.7M, 7B."""
    for unit, letter in ((_BILLION, "B"), (_MILLION, "M"), (_THOUSAND, "K")):
        if count >= unit:
            return f"{round(count / unit, 1 if count < 100 * unit else 0):g}{letter}"
    return str(count)


def _details(service: InferenceService) -> Details:
    manifest = service.manifest
    return {
        "parent_model": "",
        "format": "bei",
        "family": manifest.spec.family,
        "families": [manifest.spec.family],
        "parameter_size": _shortened(manifest.spec.num_parameters),
        "quantization_level": manifest.precision.upper(),
        "context_length": manifest.max_seq_len,
        "embedding_length": service.embedding_width,
    }


def _capabilities(service: InferenceService) -> list[str]:
    return ["embedding"] if "embed" in service.manifest.tasks else []


def _listed(name: str, service: InferenceService, started_s: int) -> ListedModel:
    return {
        "name": _tagged(name),
        "model": _tagged(name),
        "modified_at": _rfc_3339(started_s),
        "size": sum(file.size for file in service.manifest.files),
        "digest": service.manifest.digest,
        "details": _details(service),
        "capabilities": _capabilities(service),
    }


def _shown(service: InferenceService, started_s: int) -> ShowResponse:
    manifest, family = service.manifest, service.manifest.spec.family
    return {
        "modelfile": "",
        "parameters": "",
        "template": "{{ .Prompt }}",
        "details": _details(service),
        "model_info": {
            "general.architecture": family,
            "general.parameter_count": manifest.spec.num_parameters,
            f"{family}.context_length": manifest.max_seq_len,
            f"{family}.embedding_length": service.embedding_width,
            f"{family}.block_count": manifest.spec.num_layers,
            f"{family}.attention.head_count": manifest.spec.num_heads,
        },
        "capabilities": _capabilities(service),
        "modified_at": _rfc_3339(started_s),
    }


def _rfc_3339(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat().replace("+00:00", "Z")


_parse = parser(PullRequest)


async def _asked(request: Request, models: Models) -> tuple[PullRequest, InferenceService]:
    """The body of ``request``, and the model that it names. Raises InvalidRequestError, ModelNotFoundError."""
    content = await read_body(request, _MOST_BYTES)
    body: PullRequest = read_now(_parse, content, False).request
    return body, _named(models, body.model or body.name)


_DETAILS_EXAMPLE: Details = {
    "parent_model": "",
    "format": "bei",
    "family": "bert",
    "families": ["bert"],
    "parameter_size": "22.7M",
    "quantization_level": "BF16",
    "context_length": 256,
    "embedding_length": 384,
}
_LISTED_EXAMPLE: ListedModel = {
    "name": f"{EMBEDDER}:latest",
    "model": f"{EMBEDDER}:latest",
    "modified_at": _rfc_3339(CREATED),
    "size": 45_000_000,
    "digest": HEX * 2,
    "details": _DETAILS_EXAMPLE,
    "capabilities": ["embedding"],
}
_SHOWN_EXAMPLE: ShowResponse = {
    "modelfile": "",
    "parameters": "",
    "template": "{{ .Prompt }}",
    "details": _DETAILS_EXAMPLE,
    "model_info": {"general.architecture": "bert", "bert.context_length": 256, "bert.embedding_length": 384},
    "capabilities": ["embedding"],
    "modified_at": _rfc_3339(CREATED),
}
_RUNNING = "Ollama is running"
_PULLED = '{"status": "pulling manifest"}\n{"status": "success"}\n'


def _reads(models: Models) -> ApiRouter:
    router = ApiRouter()

    @router.get("/", summary="Liveness (Ollama)")
    @answers(bodies={200: str}, example=_RUNNING, media_type="text/plain; charset=utf-8")
    async def root() -> Response:
        """The words that clients look for."""
        return PlainTextResponse(_RUNNING)

    @router.get("/api/version", summary="Version (Ollama)")
    @answers(example={"version": __version__})
    async def version() -> Version:
        """This server's, not Ollama's."""
        return {"version": __version__}

    @router.get("/api/tags", summary="List the served models (Ollama)")
    @answers(example={"models": [_LISTED_EXAMPLE]})
    async def tags() -> ListedModels:
        """Every served model."""
        return {"models": [_listed(name, service, models.started_s) for name, service in models.listed]}

    @router.get("/api/ps", summary="List the loaded models (Ollama)")
    @answers(example={"models": [{**_LISTED_EXAMPLE, "expires_at": _NEVER, "size_vram": 0, "context_length": 256}]})
    async def running() -> RunningModels:
        """Every served model: all are loaded."""
        return {
            "models": [
                {
                    **_listed(name, service, models.started_s),
                    "expires_at": _NEVER,
                    "size_vram": 0,
                    "context_length": service.manifest.max_seq_len,
                }
                for name, service in models.listed
            ]
        }

    @router.post("/api/show", summary="Describe a model (Ollama)")
    @answers(
        InvalidRequestError,
        ModelNotFoundError,
        errors.PayloadTooLargeError,
        bodies={200: ShowResponse},
        example=_SHOWN_EXAMPLE,
        request=RequestBody(ShowRequest, example={}),
    )
    async def show(request: Request) -> Response:
        """One served model."""
        _, service = await _asked(request, models)
        return JSONResponse(_shown(service, models.started_s))

    @router.post("/api/pull", summary="Pull a model that is served (Ollama)")
    @answers(
        InvalidRequestError,
        ModelNotFoundError,
        errors.PayloadTooLargeError,
        bodies={200: str},
        example=_PULLED,
        media_type=_NDJSON,
        or_json=Pulled,
        request=RequestBody(PullRequest, example={}),
    )
    async def pull(request: Request) -> Response:
        """Nothing is loaded: a served model is there already, and another one is a 404. A line for each step."""
        body, _ = await _asked(request, models)
        if body.stream is False:
            return JSONResponse({"status": "success"})
        return Response(_PULLED, media_type=_NDJSON)

    return router


_ROUTES: tuple[Route[Any], ...] = (
    Route(
        "/api/embed",
        "Embed (Ollama)",
        EmbedRequest,
        EmbedResponse,
        _embed_request,
        embed,
        Example(
            {"input": TEXTS},
            {
                "model": EMBEDDER,
                "embeddings": VECTORS,
                "total_duration": 2_140_000,
                "load_duration": 0,
                "prompt_eval_count": NUM_TOKENS,
            },
        ),
    ),
    Route(
        "/api/embeddings",
        "Embed one text (Ollama)",
        EmbeddingsRequest,
        EmbeddingsResponse,
        parser(EmbeddingsRequest),
        embed_prompt,
        Example({"prompt": TEXTS[0]}, {"embedding": VECTORS[0]}),
    ),
    systemone.OLLAMA_ROUTE,
)


def dialect(models: Models) -> Dialect:
    """The dialect of Ollama, with routes that read the served models."""
    return Dialect(
        "ollama", "Ollama", _ROUTES, message_alone, MessageBody, _reads(models), probes=("/",), at_root=("api",)
    )
