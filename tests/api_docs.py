"""``python -m tests.api_docs`` writes docs/api.md from the page that a server answers at /openapi.json."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import httpx

from bei.config.settings import DIALECTS, ServeConfig
from bei.metrics.registry import Metrics
from bei.server.app import create_app
from bei.server.endpoint.models import Models
from bei.server.server_parts import ServerParts

DOCUMENT = Path(__file__).parent.parent / "docs" / "api.md"

_TITLE = """# API

Every route with its request, its answer and its statuses, of a server with default settings. Written by `python -m
tests.api_docs` from the server's own `/openapi.json`; `tests/test_api_docs.py` fails where it is out of date.
[reference.md](reference.md) says what fields mean for a model. Every answer to a POST may also be
`application/msgpack`, and vectors `application/octet-stream`, where `Accept` asks for it.
"""

# A field that so many requests have in the same form stands in one table for all of them.
_COMMON = 4
# Characters of a description that stands once.
_LONG = 100


@cache
def page() -> dict[str, Any]:
    """What /openapi.json is, of a server with default settings."""
    application = create_app(Models([]), ServerParts(ServeConfig(), Metrics()))

    async def answer() -> Any:
        transport = httpx.ASGITransport(application)
        async with httpx.AsyncClient(transport=transport, base_url="http://bei.test") as client:
            return (await client.get("/openapi.json")).json()

    found: dict[str, Any] = asyncio.run(answer())
    return found


class Document:
    """docs/api.md of a page."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self._paths: Mapping[str, Any] = content["paths"]
        self._components: Mapping[str, Any] = content["components"]
        self._schemas: Mapping[str, Any] = content["components"]["schemas"]
        self._shared_limits: list[str] = []  # said once for all requests

    def text(self) -> str:
        """All of it."""
        parts = [_TITLE, self._headers()]
        parts += [self._mount(name) for name in DIALECTS]
        requests = self._named("requestBody")
        parts += [self._requests(requests), self._others([name for name in self._schemas if name not in requests])]
        return "\n".join(parts)

    def _headers(self) -> str:
        rows = [
            (f"`{name}`", _type(one["schema"]), one["description"])
            for name, one in self._components["parameters"].items()
        ]
        answered = {
            name: header for response in self._responses() for name, header in response.get("headers", {}).items()
        }
        answers = [(f"`{name}`", _type(one["schema"]), one["description"]) for name, one in answered.items()]
        return "\n".join(
            [
                "## Headers\n",
                "Of requests to a model; `X-Bei-Dialect` of all that are not under a mount point.\n",
                _table(("header", "type", ""), rows),
                "Of answers.\n",
                _table(("header", "type", ""), answers),
            ]
        )

    def _responses(self) -> Iterator[Mapping[str, Any]]:
        for item in self._paths.values():
            for operation in item.values():
                for response in operation["responses"].values():
                    yield self._resolved(response)

    def _resolved(self, response: Mapping[str, Any]) -> Mapping[str, Any]:
        found: Mapping[str, Any] = response
        if "$ref" in response:
            found = self._components["responses"][_name(response)]
        return found

    def _mount(self, name: str) -> str:
        """The routes of a mount point, and its errors."""
        paths = [path for path in self._paths if _mount_of(path) == name]
        rows: dict[tuple[str, ...], list[str]] = {}
        for path in paths:
            for method in sorted(self._paths[path]):
                rows.setdefault(self._row(path, method), []).append(f"`{path}`")
        posts = (self._paths[path]["post"] for path in paths if "post" in self._paths[path])
        inference = next(operation for operation in posts if "504" in operation["responses"])
        title = "Without a mount point" if name == "bei" else f"`/{name}`"
        return "\n".join(
            [
                f"## {title}\n",
                _table(
                    ("", "route", "", "request", "answer", "errors"),
                    [(method, ", ".join(named), *rest) for (method, *rest), named in rows.items()],
                ),
                "Errors of POST to a model:\n",
                _table(("status", "body", "when"), self._errors(inference)),
            ]
        )

    def _row(self, path: str, method: str) -> tuple[str, ...]:
        """Of all routes that have the same one."""
        operation = self._paths[path][method]
        answer = self._resolved(operation["responses"]["200"])
        request = operation.get("requestBody")
        query = [one["name"] for one in operation.get("parameters", []) if one.get("in") == "query"]
        asked = self._body(request) if request else ", ".join(f"`?{name}=`" for name in query)
        errors = ", ".join(status for status in operation["responses"] if status != "200")
        described = f"{operation['summary']}. {self._description(path, method)}"
        asks_model = "504" in operation["responses"]
        return method.upper(), described, asked, self._body(answer), "below" if asks_model else errors

    def _description(self, path: str, method: str) -> str:
        """Of a mounted route that is also without a mount point, and of one whose long description stands before it:
        where it is described."""
        operation = self._paths[path][method]
        text = str(operation.get("description", ""))
        bare = "/" + path[1:].partition("/")[2]
        alike = [one for one, item in self._paths.items() if item.get(method, {}).get("description") == text]
        if _mount_of(path) != "bei" and bare in alike:
            return f"As `{bare}`."
        first = next((one for one in alike if _mount_of(one) == _mount_of(path)), path)
        is_said = self._paths[first][method]["summary"] != operation["summary"]  # else it has the same row
        return f"As `{first}`." if is_said and len(text) > _LONG else text

    def _body(self, holder: Mapping[str, Any]) -> str:
        content = holder.get("content", {})
        if not content:
            return "empty"
        media_type, body = next(iter(content.items()))
        return _type(body["schema"]) + ("" if media_type == "application/json" else f" (`{media_type}`)")

    def _errors(self, operation: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
        for status, response in operation["responses"].items():
            if status != "200":
                found = self._resolved(response)
                yield status, self._body(found), found["description"]

    def _named(self, holder: str) -> list[str]:
        """The names of all schemas that bodies of a kind refer to."""
        found: dict[str, None] = {}
        for item in self._paths.values():
            for operation in item.values():
                _collect(operation.get(holder), self._schemas, found)
        return list(found)

    def _requests(self, names: list[str]) -> str:
        counts: dict[tuple[str, ...], int] = {}
        fields = {name: list(_fields(self._schemas[name])) for name in names}
        for rows in fields.values():
            for row in rows:
                counts[row] = counts.get(row, 0) + 1
        common = [row for row, count in counts.items() if count >= _COMMON]
        self._shared_limits = self._limits_of_many(names)
        parts = ["## Requests\n", "Fields that many requests have:\n", _table(_FIELDS, common)]
        parts.append(f"Of requests that have them: {' '.join(self._shared_limits)}\n")
        for name, rows in fields.items():
            own = [row for row in rows if row not in common]
            shared = [row[0] for row in rows if row in common]
            parts.append(self._type_section(name, own, shared))
        return "\n".join(parts)

    def _limits_of_many(self, names: list[str]) -> list[str]:
        counts: dict[str, int] = {}
        for name in names:
            for limit in self._schemas[name].get("allOf", ()):
                counts[limit["description"]] = counts.get(limit["description"], 0) + 1
        return [text for text, count in counts.items() if count >= _COMMON]

    def _others(self, names: list[str]) -> str:
        sections = [self._type_section(name, list(_fields(self._schemas[name])), []) for name in names]
        return "\n".join(["## Answers\n", *sections])

    def _type_section(self, name: str, rows: list[tuple[str, ...]], shared: list[str]) -> str:
        schema = self._schemas[name]
        limits = [limit["description"] for limit in schema.get("allOf", ())]
        texts = [schema.get("description", ""), *(text for text in limits if text not in self._shared_limits)]
        parts = [f"### {name}\n", _line(" ".join(filter(None, texts))) + "\n"]
        if rows:
            # Answers have neither defaults nor remarks as a rule.
            width = max(index for index in range(len(_FIELDS)) if any(row[index] for row in rows)) + 1
            parts.append(_table(_FIELDS[:width], [row[:width] for row in rows]))
        if shared:
            parts.append(f"{'Also' if rows else 'Fields:'} {', '.join(shared)}.\n")
        return "\n".join(parts)


_FIELDS = ("field", "type", "default", "")


def _fields(schema: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    required = schema.get("required", ())
    for name, field in schema.get("properties", {}).items():
        default = f"`{json.dumps(field['default'])}`" if "default" in field else ""
        is_needed = name in required or "default" in field
        texts = dict.fromkeys(_descriptions(field))
        kind = _type(field).removesuffix(" or null") if default == "`null`" else _type(field)
        yield f"`{name}`", kind, default if is_needed else "optional", " ".join(texts)


def _descriptions(field: Mapping[str, Any]) -> Iterator[str]:
    if "description" in field:
        yield field["description"].rstrip(".") + "."
    for one in field.get("anyOf", ()):
        yield from _descriptions(one)


def _type(schema: Mapping[str, Any]) -> str:
    """A schema in words."""
    if "$ref" in schema:
        name = _name(schema)
        text = f"[{name}](#{re.sub(r'[^a-z0-9_-]', '', name.lower())})"
        also = schema.get("description")
        without = [field for field, one in schema.get("properties", {}).items() if one == {"type": "null"}]
        notes = [also] if also else [f"without {', '.join(without)}"] if without else []
        return f"{text} ({'; '.join(notes).rstrip('.')})" if notes else text
    if "enum" in schema:
        return ", ".join(f"`{json.dumps(value)}`" for value in schema["enum"])
    for alternatives in ("oneOf", "anyOf"):
        if alternatives in schema and "type" not in schema:
            return " or ".join(dict.fromkeys(map(_type, schema[alternatives])))
    kind = schema.get("type", "anything")
    if kind == "array":
        return f"list{_sizes(schema, 'minItems', 'maxItems')} of {_parenthesized(_type(schema.get('items', {})))}"
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"object of {_type(schema['additionalProperties'])}"
    if isinstance(kind, list):
        return " or ".join(kind)
    if schema.get("minLength") == 1 and "maxLength" not in schema:
        return "non-empty string"
    return f"{kind}{_sizes(schema, 'minLength', 'maxLength')}{_sizes(schema, 'minimum', 'maximum')}"


def _parenthesized(text: str) -> str:
    return f"({text})" if " or " in text or ", " in text else text


def _sizes(schema: Mapping[str, Any], least: str, most: str) -> str:
    low, high = schema.get(least), schema.get(most)
    if high is not None:
        return f" ({low or 0} to {high})"
    return "" if low is None else f" ≥ {low}" if least == "minimum" else f" (at least {low})"


def _name(reference: Mapping[str, Any]) -> str:
    return str(reference["$ref"]).rpartition("/")[2]


def _collect(node: Any, schemas: Mapping[str, Any], found: dict[str, None]) -> None:
    if isinstance(node, list):
        for value in node:
            _collect(value, schemas, found)
    elif isinstance(node, dict):
        if isinstance(node.get("$ref"), str) and _name(node) in schemas and _name(node) not in found:
            found[_name(node)] = None
            _collect(schemas[_name(node)], schemas, found)
        for value in node.values():
            _collect(value, schemas, found)


def _mount_of(path: str) -> str:
    first = path[1:].partition("/")[0]
    return first if first in DIALECTS else "bei"


def _table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [header, ("-",) * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(_line, line))} |" for line in lines) + "\n"


def _line(text: str) -> str:
    """As it may stand in a table."""
    return " ".join(text.split()).replace("|", "\\|").replace("``", "`")


def main() -> None:
    """Write the document."""
    DOCUMENT.write_text(Document(page()).text(), "utf-8")


if __name__ == "__main__":
    main()
