"""/openapi.json: what every route reads and answers.

Schemas come from the types of bodies, the statuses of errors from the table of errors and the forms of dialects: there
is no second list of them.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from itertools import chain, count
from types import MappingProxyType
from typing import Any, NamedTuple, TypedDict

from bei import errors
from bei.config.settings import ServeConfig
from bei.errors import BeiError
from bei.metrics.request_timing import Timing
from bei.port import LANES
from bei.server.auth.priority import DEADLINES
from bei.server.dialects.base import HEADER, OWN, Dialect
from bei.server.endpoint.get_responses import GetResponses, answers_of
from bei.server.endpoint.input_report import InputReport
from bei.server.endpoint.route import WARNING_HEADER, Route
from bei.server.http.accept import MSGPACK, OCTETS, REPORT_HEADER, REPORT_VALUES
from bei.server.http.compression import CODINGS
from bei.server.http.errors import JSON, UNEXPECTED, ErrorBody, ErrorForm, headers_of, own_form, status_of
from bei.server.http.responses import TRUNCATED_HEADER
from bei.server.http.routing import ApiRoute
from bei.server.open_paths import open_paths
from bei.server.openapi.groups import Groups
from bei.server.openapi.schemas import Schemas
from bei.server.telemetry.request_record import SERVER_TIMING_HEADER
from bei.version import __version__

_INFO = {
    "title": "bei",
    "description": "Embedding inference server. Every answer has the request's x-request-id, or a new one. In examples "
    "vectors are cut to three numbers.",
    "version": __version__,
}


_RANGES = {"type": "string", "pattern": r"^\d+(-\d+)?(,\d+(-\d+)?)*(,\.\.\.)?$"}
_WHOLE = {"type": "integer", "minimum": 0}
_TEXT = {"type": "string"}
_ANSWER_HEADERS: Mapping[str, Mapping[str, Any]] = {
    TRUNCATED_HEADER: {"schema": _RANGES, "description": "Inputs that were cut: 0,4-7."},
    WARNING_HEADER: {"schema": _TEXT, "description": "Where the answer may not be what the client meant."},
    "x-bei-shape": {"schema": _TEXT, "description": "For bytes: the number of vectors, and of numbers in each: 2,384."},
    "x-bei-dtype": {"schema": _TEXT, "description": "For bytes: the numbers' type, by NumPy's name."},
    "inference-header-content-length": {"schema": _TEXT, "description": "For tensors as bytes: where they begin."},
    "metadata": {"schema": _TEXT, "description": "vLLM's, for bytes: where each value begins and ends, as JSON."},
    "retry-after": {"schema": _WHOLE, "description": "Seconds after which to retry."},
    "retry-after-ms": {"schema": _WHOLE, "description": "The same in milliseconds."},
    "accept-encoding": {"schema": _TEXT, "description": "Codings of bodies that are decoded here."},
    "www-authenticate": {"schema": {"type": "string", "const": "Bearer"}, "description": "How to send an API key."},
}

_TIMING_HEADER = {"schema": _TEXT, "description": "TEI's: what the request took, times in milliseconds."}
_SERVER_TIMING_HEADER = {
    "schema": _TEXT,
    "description": "Milliseconds of each stage of the request, and of all: receive;dur=0.310, ..., total;dur=9.127.",
}
# Headers of answers, on servers that compress.
_CODED_HEADERS: Mapping[str, Mapping[str, Any]] = {
    "content-encoding": {
        "schema": {"type": "string", "enum": [*CODINGS]},
        "description": "Where the answer is compressed, as Accept-Encoding allows.",
    },
    "vary": {"schema": {"type": "string", "const": "accept-encoding"}, "description": "What the answer depends on."},
}

# Errors of requests that are refused before they have arrived completely: in our form on every path.
_REFUSED: tuple[type[BeiError], ...] = (
    errors.RequestTimeoutError,
    errors.HeadersTooLargeError,
    errors.TooManyConnectionsError,
)
# Errors of servers with API keys, on routes that need a key.
_OF_KEYS: tuple[type[BeiError], ...] = (errors.UnauthorizedError, errors.RateLimitedError)
_SECURITY_SCHEMES: Mapping[str, Mapping[str, str]] = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
    "api-key": {"type": "apiKey", "in": "header", "name": "Api-Key"},
}
# RequestErrors that a request to a model does not end with: the root class, and those raised before a route runs.
_ELSEWHERE = {
    errors.RequestError,
    errors.HeadersTooLargeError,
    errors.RouteNotFoundError,
    errors.MethodNotAllowedError,
    errors.UnauthorizedError,
    errors.UnknownApiKeyError,
    errors.ForbiddenError,
    errors.ObjectNotFoundError,
    errors.ConflictError,
    errors.QuotaExceededError,
}


def _tree(root: type[BeiError]) -> Iterator[type[BeiError]]:
    yield root
    for child in root.__subclasses__():
        yield from _tree(child)


# The errors that a request to a model may end with; a bug is answered as BeiError.
MODEL_ERRORS: tuple[type[BeiError], ...] = (
    *(cls for cls in _tree(errors.RequestError) if cls not in _ELSEWHERE),
    errors.OverloadedError,
    errors.DeadlineExceededError,
    errors.ShuttingDownError,
    *_tree(errors.EngineError),
    BeiError,
)


class Form(NamedTuple):
    """The error format of a dialect: its name, the function that writes errors, and the types of the bodies that the
    function returns."""

    name: str
    write: ErrorForm
    bodies: tuple[Any, ...]

    def body_of(self, written: object) -> Any:
        """The one of ``bodies`` that has the fields of ``written``, which ``write`` has returned."""
        assert isinstance(written, dict)
        return next(body for body in self.bodies if set(body.__annotations__) == set(written))


_OWN = Form(OWN, own_form, (ErrorBody,))


def page(
    framework_routes: Iterable[ApiRoute], routes: Iterable[Route[Any]], dialects: Seq[Dialect], config: ServeConfig
) -> dict[str, Any]:
    """The OpenAPI document of a server, as /openapi.json answers it.

    ``framework_routes``: all routes. ``routes``: those of them that read a request body, the ones of ``dialects``
    with their mount paths.
    """
    groups = Groups(dialects)
    found = [
        (route.path_format, method, route)
        for route in framework_routes
        if route.include_in_schema
        for method in route.methods or ()
        if method != "HEAD"  # as GET, on every path that has that
    ]
    operations = sorted(found, key=lambda one: groups.place_of(one[1], one[0]))
    bodies = {_template(route.path): route for route in routes}
    reads = {
        (path, method): answers_of(route.function)
        for path, method, route in operations
        if method != "POST" or path not in bodies
    }
    forms = {dialect.name: _form_of(dialect) for dialect in dialects}
    schemas = Schemas(_types(bodies.values(), reads.values(), forms.values()), config.max_client_batch_size)
    writer = _Writer(forms, schemas, config)
    without_key = open_paths(config, dialects)
    paths: dict[str, dict[str, Any]] = {}
    for path, method, route in operations:
        answers = reads.get((path, method))
        if answers is None:
            paths[path] = paths.pop(path, {})  # a path stands where its request to a model does
            written = writer.inference(path, bodies[path])
        else:
            written = writer.read(path, _parameters(route), answers, is_open=path in without_key and method != "POST")
        name = method.lower()
        paths.setdefault(path, {})[name] = {
            "tags": [groups.name_of(method, path)],
            "summary": route.summary,
            "description": route.description,
            "operationId": re.sub(r"\W", "_", f"{route.name}{path}") + f"_{name}",
            **written,
        }
    components = {"schemas": schemas.components, "responses": writer.responses, "parameters": writer.parameters}
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": _INFO,
        "tags": groups.tags(),
        "paths": paths,
        "components": components,
    }
    if config.root_path:
        document["servers"] = [{"url": config.root_path}]
    if config.asks_for_keys:
        components["securitySchemes"] = {**_SECURITY_SCHEMES}
        document["security"] = [{name: []} for name in _SECURITY_SCHEMES]
    return document


def _parameters(route: ApiRoute) -> list[dict[str, Any]]:
    """The parameters of the path (required) and of the query (optional)."""
    in_path = [_parameter(name, "path", _TEXT) for name in route.param_convertors]
    return in_path + [_parameter(name, "query", {"anyOf": [_TEXT, {"type": "null"}]}) for name in route.query]


def _parameter(name: str, place: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    titled = {**schema, "title": name.title()}
    return {"name": name, "in": place, "required": place == "path", "schema": titled}


def _form_of(dialect: Dialect) -> Form:
    body = dialect.error_body
    return Form(dialect.name, dialect.error_form, body if isinstance(body, tuple) else (body,))


def _types(routes: Iterable[Route[Any]], reads: Iterable[GetResponses], forms: Iterable[Form]) -> Iterator[Any]:
    yield Reported
    for route in routes:
        yield route.request
        yield route.response
    for answers in reads:
        yield from (body for body in answers.bodies.values() if body is not None)
        yield from [] if answers.or_json is None else [answers.or_json]
        if answers.request is not None:
            yield answers.request.type
    for form in (_OWN, *forms):
        yield from form.bodies


def _template(path: str) -> str:
    """``path`` as OpenAPI writes it: without the types of the parameters."""
    return re.sub(r"{(\w+):\w+}", r"{\1}", path)


class _Writer:
    """Writes the OpenAPI operation of each route. ``responses`` and ``parameters``: shared components."""

    def __init__(self, forms: Mapping[str, Form], schemas: Schemas, config: ServeConfig) -> None:
        self._forms = forms
        self._asks_for_keys = config.asks_for_keys
        self._schemas = schemas
        self._urgency = _urgency_headers()
        self._dialect = _dialect_header(config)
        self._coded = _CODED_HEADERS if config.compress_answers else {}
        self._timed = {SERVER_TIMING_HEADER.decode(): _SERVER_TIMING_HEADER} if config.server_timing else {}
        self.responses: dict[str, Any] = {}
        self.parameters: dict[str, Any] = {one["name"]: one for one in (*self._urgency, _REPORT, self._dialect)}

    def inference(self, path: str, route: Route[Any]) -> dict[str, Any]:
        """The operation of a route with a request body."""
        form = self._form_of(path)
        names = (TRUNCATED_HEADER, WARNING_HEADER, *route.octet_headers)
        timing = {} if route.timing_headers is None else route.timing_headers(Timing())
        answer = {
            "description": "In the order of the inputs, unless the route sorts.",
            "headers": {
                **{name: _ANSWER_HEADERS[name] for name in names},
                **dict.fromkeys(timing, _TIMING_HEADER),
                **self._timed,
                **self._coded,
            },
            "content": self._answers(route),
        }
        request = {
            "required": True,
            "description": f"Content-Encoding may be {' or '.join(CODINGS)}.",
            "content": self._content(route.request, example=route.example.request),
        }
        parameters = [_path_parameter(name) for name in re.findall(r"{(\w+)}", path)]
        return {
            "parameters": parameters + self._headers(form, (*self._urgency, *([_REPORT] if route.has_report else ()))),
            "requestBody": request,
            "responses": {"200": answer, **self._errors(path, form, (*MODEL_ERRORS, *self._of_keys(in_lanes=True)))},
        }

    def read(self, path: str, parameters: Seq[Any], answers: GetResponses, *, is_open: bool) -> dict[str, Any]:
        """The operation of a route of the framework. ``is_open``: it needs no API key."""
        form = self._form_of(path)
        raised = (*answers.errors, BeiError)
        if form is _OWN:
            raised = (errors.InvalidRequestError, *raised)  # for an unknown dialect in the header
        refusals = {status: body for status, body in answers.bodies.items() if status >= 400}
        responses = self._errors(path, form, raised if is_open else (*raised, *self._of_keys()), refusals)
        answer: dict[str, Any] = {"description": "As asked."}
        if answers.bodies[200] is not None:
            answer["content"] = self._content(answers.bodies[200], answers.media_type, example=answers.example)
        if answers.or_json is not None:
            answer["content"] |= self._content(answers.or_json)
        responses["200"] = answer
        read: dict[str, Any] = {
            "parameters": [*parameters, *self._headers(form)],
            "responses": dict(sorted(responses.items())),
        }
        if answers.request is not None:
            asked = answers.request
            content = self._content(asked.type, asked.media_type, example=asked.example)
            read["requestBody"] = {"required": True, "content": content}
        return {**read, "security": []} if is_open and self._asks_for_keys else read

    def _of_keys(self, *, in_lanes: bool = False) -> tuple[type[BeiError], ...]:
        """The errors of API keys on routes that need one; none if the server has no keys."""
        if not self._asks_for_keys:
            return ()
        return (*_OF_KEYS, errors.ForbiddenError) if in_lanes else _OF_KEYS

    def _form_of(self, path: str) -> Form:
        return self._forms.get(path[1:].partition("/")[0], _OWN)

    def _headers(self, form: Form, parameters: Iterable[Mapping[str, Any]] = ()) -> list[dict[str, Any]]:
        mine = (*parameters, self._dialect) if form is _OWN else parameters
        return [{"$ref": f"#/components/parameters/{one['name']}"} for one in mine]

    def _content(self, body: Any, media_type: str = JSON, *, example: Any = None) -> dict[str, Any]:
        shown = {} if example is None else {"example": example}
        return {media_type: {"schema": self._schemas.of(body), **shown}}

    def _answers(self, route: Route[Any]) -> dict[str, Any]:
        """The schemas of a successful answer, by media type."""
        schema = self._schemas.of(route.response)
        if route.has_report:
            schema = {"anyOf": [schema, self._schemas.of(Reported)]}
        content = {JSON: {"schema": schema, "example": route.example.answer}, MSGPACK: {"schema": schema}}
        if route.octet_headers:
            content[OCTETS] = {"schema": {"type": "string", "format": "binary"}}
        return content

    def _errors(
        self,
        path: str,
        form: Form,
        raised: Iterable[type[BeiError]],
        refusals: Mapping[int, Any] = MappingProxyType({}),
    ) -> dict[str, Any]:
        """Responses by status: for the errors ``raised``, written in ``form``, and ``refusals`` (types of bodies)."""
        found = {status: [_Refusal(body, None, _text_of_type(body), frozenset())] for status, body in refusals.items()}
        for used, cls in [(form, cls) for cls in raised] + [(_OWN, cls) for cls in _REFUSED]:
            error = _example(cls)
            status, written = used.write(error, status_of(error), path)
            headers = frozenset(headers_of(error)) - {"connection"}
            found.setdefault(status, []).append(_Refusal(used.body_of(written), written, str(error), headers))
        return {str(status): self._shared_response(f"{form.name}_{status}", found[status]) for status in sorted(found)}

    def _shared_response(self, name: str, refusals: Seq[_Refusal]) -> dict[str, Any]:
        """Put one response that describes all ``refusals`` into the components; returns the reference to it.

        All refusals have the same status. ``name`` gets a number if a different response has the name already.
        """
        bodies = {id(one.body): one.body for one in refusals}
        headers = [one.headers for one in refusals]
        response: dict[str, Any] = {
            "description": " ".join(dict.fromkeys(one.text for one in refusals)),
            "content": self._content(tuple(bodies.values()), example=refusals[0].example),
        }
        if any(headers):
            always = frozenset.intersection(*headers)
            response["headers"] = {
                header: {**_ANSWER_HEADERS[header], "required": header in always}
                for header in sorted(frozenset.union(*headers))
            }
        names = chain([name], (f"{name}_{number}" for number in count(2)))
        free = next(one for one in names if self.responses.setdefault(one, response) == response)
        return {"$ref": f"#/components/responses/{free}"}


class Reported(TypedDict):
    """Where X-Bei-Report asks for it: beside the fields of the answer, of which a bare list is then `embeddings`, what
    became of each input. Vectors of inputs that have an error are null."""

    report: list[InputReport]


class _Refusal(NamedTuple):
    """An error response: the type of its body and an example (None: there is none), a sentence that says when it is
    sent, and the names of its headers."""

    body: Any
    example: object
    text: str
    headers: frozenset[str]


def _example(cls: type[BeiError]) -> BeiError:
    """One that says when it is raised."""
    text = _text_of_type(cls)
    if issubclass(cls, errors.OverloadedError):
        return cls(text, 1.0)
    return UNEXPECTED if cls is BeiError else cls(text)


def _text_of_type(cls: Any) -> str:
    return (inspect.getdoc(cls) or "").split("\n")[0]


def _path_parameter(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": _TEXT}


def _header(name: str, schema: Any, description: str) -> dict[str, Any]:
    return {"name": name, "in": "header", "required": False, "schema": schema, "description": description}


_REPORT = _header(
    REPORT_HEADER,
    {"type": "string", "enum": [*REPORT_VALUES]},
    "1, true: a wrong input leaves the others unharmed, and the answer reports the state of each input.",
)


def _urgency_headers() -> list[dict[str, Any]]:
    lane = {"type": "string", "enum": [*LANES]}
    return [
        _header("X-Bei-Lane", lane, "By default a request's size decides."),
        *(
            _header(deadline.header, {"type": "number", "minimum": 0}, deadline.description)
            for deadline in DEADLINES.values()
        ),
    ]


def _dialect_header(config: ServeConfig) -> dict[str, Any]:
    """Another dialect's name asks for another operation: the one that stands under its mount point."""
    is_default = config.dialect == OWN
    described = _header(
        HEADER.decode().title(),
        {"type": "string", "enum": [OWN]},
        "The name of a mount point asks for the same path there, where it has one.",
    )
    return described if is_default else {**described, "required": True}
