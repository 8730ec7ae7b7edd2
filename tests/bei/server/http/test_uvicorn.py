"""The contract with uvicorn: its internals are subclassed, so another minor version is tried before it is allowed.

On a new version: read the diff of the modules named here, run tests/bei/server/http, tests/bei/server/lifecycle and the
end-to-end tests of connections, drain, TLS and the event loop, then raise ``TESTED`` and the bounds in pyproject.toml.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from bei.server.http.connection import Connection
from bei.server.http.fast_response import Exchange
from bei.server.lifecycle.drain import DrainingServer

ROOT = Path(__file__).parents[4]

# Minor versions whose internals were tested with ``Connection``, ``Exchange`` and ``DrainingServer``.
TESTED = ("0.54",)

# The only modules that may import uvicorn.
ROOM = ("bei/server/http/connection.py", "bei/server/http/fast_response.py", "bei/server/lifecycle/drain.py")

# Parameters, self left out, of all that is called or overridden.
SIGNATURES: dict[Callable[..., Any], list[str]] = {
    HttpToolsProtocol.__init__: ["config", "server_state", "app_state", "_loop"],
    HttpToolsProtocol._start_asgi_task: ["cycle", "app"],
    HttpToolsProtocol.connection_made: ["transport"],
    HttpToolsProtocol.connection_lost: ["exc"],
    HttpToolsProtocol.data_received: ["data"],
    HttpToolsProtocol.pause_writing: [],
    HttpToolsProtocol.resume_writing: [],
    HttpToolsProtocol.on_message_begin: [],
    HttpToolsProtocol.on_url: ["url"],
    HttpToolsProtocol.on_header: ["name", "value"],
    HttpToolsProtocol.on_headers_complete: [],
    HttpToolsProtocol.on_body: ["body"],
    HttpToolsProtocol.on_message_complete: [],
    HttpToolsProtocol.on_response_complete: [],
    HttpToolsProtocol.shutdown: [],
    RequestResponseCycle.__init__: [
        *("scope", "transport", "flow", "logger", "access_logger", "access_log", "default_headers"),
        *("message_event", "expect_100_continue", "keep_alive", "on_response"),
    ],
    RequestResponseCycle.run_asgi: ["app"],
    RequestResponseCycle.receive: [],
    RequestResponseCycle.send: ["message"],
    FlowControl.pause_reading: [],
    FlowControl.resume_reading: [],
    uvicorn.Server.__init__: ["config"],
    uvicorn.Server.serve: ["sockets"],
    uvicorn.Server.startup: ["sockets"],
    uvicorn.Server.shutdown: ["sockets"],
    uvicorn.Server.capture_signals: [],
}

# Attributes that an instance of uvicorn's own class must have, since ours read or set them.
PROTOCOL = (
    *("app", "loop", "logger", "access_logger", "parser", "server_state", "transport", "flow", "server", "client"),
    *("scheme", "pipeline", "scope", "headers", "cycle"),
)
CYCLE = (
    *("scope", "transport", "flow", "default_headers", "message_event", "on_response", "disconnected", "keep_alive"),
    *("body", "more_body", "response_started", "response_complete"),
)
FLOW = ("read_paused", "write_paused")
STATE = ("total_requests", "connections", "tasks", "default_headers")
SERVER = ("config", "server_state", "started", "should_exit")


def test_the_version_is_one_whose_internals_were_tested() -> None:
    assert uvicorn.__version__.rpartition(".")[0] in TESTED


def test_no_other_version_is_installed_with_bei() -> None:
    major, minor = TESTED[-1].split(".")
    bounds = f'"uvicorn>={TESTED[0]},<{major}.{int(minor) + 1}"'
    assert bounds in (ROOT / "pyproject.toml").read_text("utf-8")


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda function: function.__qualname__)
def test_signatures_are_those_that_are_called_and_overridden(function: Callable[..., Any]) -> None:
    assert [*inspect.signature(function).parameters][1:] == SIGNATURES[function]


def test_instances_have_what_is_read_and_set() -> None:
    async def check() -> None:
        config = uvicorn.Config(lambda *_: None, http="httptools", lifespan="off", log_config=None)
        server = uvicorn.Server(config)
        _check_has(server, SERVER)
        _check_has(server.server_state, STATE)
        protocol = HttpToolsProtocol(config, server.server_state, {}, asyncio.get_running_loop())
        _check_has(protocol, PROTOCOL)
        flow = FlowControl(asyncio.Transport())
        _check_has(flow, FLOW)
        parameters: dict[str, Any] = dict.fromkeys(SIGNATURES[RequestResponseCycle.__init__])
        _check_has(RequestResponseCycle(**parameters), CYCLE)

    asyncio.run(check())


def _check_has(thing: object, names: tuple[str, ...]) -> None:
    assert [name for name in names if not hasattr(thing, name)] == []


def test_constants_have_the_form_that_is_relied_on() -> None:
    assert STATUS_LINE[200] == b"HTTP/1.1 200 OK\r\n"
    assert STATUS_LINE[499] == b"HTTP/1.1 499 \r\n"
    assert isinstance(HIGH_WATER_LIMIT, int)
    assert ServerState().default_headers == []


def test_every_private_name_of_uvicorn_s_that_is_used_is_in_the_contract() -> None:
    """What our subclasses call with one underscore is their own, or in SIGNATURES."""
    for ours, theirs in (
        (Connection, HttpToolsProtocol),
        (Exchange, RequestResponseCycle),
        (DrainingServer, uvicorn.Server),
    ):
        tree = ast.parse(inspect.getsource(ours))
        used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr.startswith("_")}
        inherited = {name for name in used if hasattr(theirs, name) and not name.startswith("__")}
        assert inherited <= {function.__name__ for function in SIGNATURES}


def test_one_room_alone_imports_uvicorn() -> None:
    found = [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "bei").rglob("*.py"))
        if any(name.partition(".")[0] == "uvicorn" for name in _imported(path))
    ]
    assert found == sorted(ROOM)


def _imported(path: Path) -> list[str]:
    text = path.read_text("utf-8")
    nodes = [*ast.walk(ast.parse(text))] if "uvicorn" in text else []  # parsing all files takes seconds
    plain = [name.name for node in nodes if isinstance(node, ast.Import) for name in node.names]
    return plain + [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module is not None]
