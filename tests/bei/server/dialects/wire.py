"""Exchanges of every dialect as data: ``<dialect>.json`` has requests, and what is answered to the letter.

    python -m tests.bei.server.dialects.wire

writes the answers of all files anew; read the difference before it is committed. Numbers are compared to six digits.
"""

from __future__ import annotations

import json
import math
import re
import tempfile
from pathlib import Path
from typing import Any

import httpx

from bei import errors
from bei.server.dialects.base import Dialect
from bei.server.http.errors import FORM_KEY, error_response
from tests.bei.server.app import App
from tests.bei.server.kinds import save_kinds

FOLDER = Path(__file__).parent

# What is new in every answer, by name and type, and what stands for it in the files.
_NEW = {
    ("id", str): "<id>",
    ("created", int): 0,
    ("unix", float): 0.0,
    ("modified_at", str): "<time>",
    ("total_duration", int): 0,
}

# An error of every class that a request can end with.
ERRORS: tuple[errors.BeiError, ...] = (
    errors.InvalidRequestError("wrong", "input"),
    errors.MalformedRequestError("malformed", "input"),
    errors.EmptyInputError("empty", "input"),
    errors.InputTooLongError("long", "input"),
    errors.UnauthorizedError("no key"),
    errors.ForbiddenError("not with this key", "x-bei-lane"),
    errors.TaskNotSupportedError("no such task", "model"),
    errors.ModelNotFoundError("no such model", "model"),
    errors.RouteNotFoundError("no such route"),
    errors.MethodNotAllowedError("no such method"),
    errors.RequestTimeoutError("slow"),
    errors.PayloadTooLargeError("large"),
    errors.AnswerTooLargeError("large answer"),
    errors.EncodingNotSupportedError("encoding"),
    errors.OverloadedError("full", 1.5),
    errors.RateLimitedError("more than the rate", 1.5),
    errors.ShuttingDownError("stopping"),
    errors.DeadlineExceededError("late"),
    errors.EngineError("failed"),
    errors.EngineDeadError("dead"),
    errors.BeiError("a bug"),
)


def app_of_all_kinds(folder: Path) -> App:
    """An application that serves a model of every kind."""
    return App(*save_kinds(folder), max_client_batch_size=8, payload_limit=100_000)


def exchanges(name: str) -> list[dict[str, Any]]:
    """Those of the dialect ``name``."""
    found: list[dict[str, Any]] = json.loads((FOLDER / f"{name}.json").read_text("utf-8"))
    return found


def has_path(template: str, path: str) -> bool:
    """True if ``path`` is one of the route's paths; parameters of ``template`` are paths too."""
    pattern = re.sub(r"\\{\w+:path\\}", ".+", re.escape(template))
    return re.fullmatch(re.sub(r"\\{\w+\\}", "[^/]+", pattern), path) is not None


def asked(app: App, request: dict[str, Any]) -> dict[str, Any]:
    """What ``app`` answers now, as the files have it."""
    content = json.dumps(request["body"]).encode() if "body" in request else request.get("content", "").encode()
    work = app.client.request(
        request.get("method", "POST"), request["path"], content=content or None, headers=request.get("headers")
    )
    response: httpx.Response = app.run(work)
    is_json = response.headers.get("content-type") == "application/json"
    answer: dict[str, Any] = {"status": response.status_code}
    headers = {
        key: "<ms>" if key.endswith("-time") and value.isdecimal() else value
        for key, value in response.headers.items()
        if (key.startswith("x-") and key != "x-request-id") or key == "retry-after"
    }
    if headers:
        answer["headers"] = headers
    return {**answer, "body": _settled(response.json()) if is_json else response.text}


def error_table(dialect: Dialect, path: str) -> dict[str, Any]:
    """Status and body of every error in ``dialect``, by class."""
    table = {}
    for error in ERRORS:
        response = error_response(error, {FORM_KEY: dialect.error_form, "path": path})
        table[type(error).__name__] = {"status": response.status_code, "body": json.loads(bytes(response.body))}
    return table


def is_same(found: Any, expected: Any) -> bool:
    """Whether two bodies are equal, numbers nearly."""
    if isinstance(expected, float) or isinstance(found, float):
        return isinstance(found, (int, float)) and math.isclose(found, expected, rel_tol=1e-6, abs_tol=1e-7)
    if isinstance(expected, dict):
        same_names = isinstance(found, dict) and list(found) == list(expected)
        return same_names and all(is_same(found[name], expected[name]) for name in expected)
    if isinstance(expected, list):
        same_length = isinstance(found, list) and len(found) == len(expected)
        return same_length and all(is_same(one, other) for one, other in zip(found, expected, strict=True))
    return bool(found == expected)


def _settled(body: Any) -> Any:
    """``body`` with a word in the place of what is new every time."""
    if isinstance(body, list):
        return [_settled(value) for value in body]
    if not isinstance(body, dict):
        return body
    return {key: _NEW.get((key, type(value)), _settled(value)) for key, value in body.items()}


def main() -> None:
    """Write all answers anew."""
    with tempfile.TemporaryDirectory() as folder:
        app = app_of_all_kinds(Path(folder))
        try:
            for file in sorted(FOLDER.glob("*.json")):
                if file.stem == "errors":
                    continue
                written = [{**one, "response": asked(app, one["request"])} for one in exchanges(file.stem)]
                file.write_text(_text(written), "utf-8")
            tables = {dialect.name: error_table(dialect, "/x") for dialect in app.dialects}
            tables["tei, OpenAI's routes"] = error_table(next(iter(app.dialects)), "/v1/embeddings")
            (FOLDER / "errors.json").write_text(_text(tables), "utf-8")
        finally:
            app.close()


def _text(content: Any) -> str:
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    main()
