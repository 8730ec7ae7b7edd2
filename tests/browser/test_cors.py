"""Scripts of other origins, in a browser that decides what they may see: those that are named get answers."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.browser.conftest import SECRET
from tests.e2e.process import Server, serve

# Asks with a key and JSON, so a preflight comes first; tells what the script may read.
ASK = """async ([url, key]) => {
    try {
        const answer = await fetch(url + "/v1/embeddings", {
            method: "POST",
            headers: {"content-type": "application/json", "authorization": "Bearer " + key},
            body: JSON.stringify({input: ["a text", "another"]}),
        });
        const body = await answer.json();
        const seen = {status: answer.status, id: answer.headers.get("x-request-id")};
        return {...seen, count: (body.data ?? []).length, code: body.error?.code};
    } catch (error) {
        return {refused: error.name};
    }
}"""


class _Blank(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        content = b"<!doctype html><title>somebody's page</title>"
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Silent."""


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """Of a web server with a page of somebody else's."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Blank) as pages:
        threading.Thread(target=pages.serve_forever, daemon=True).start()
        yield pages.server_port
        pages.shutdown()


@pytest.fixture(scope="module")
def shared(artifacts: Mapping[str, Path], env: Mapping[str, str], home: Path, port: int) -> Iterator[Server]:
    """A server with a key, for scripts of 127.0.0.1 and not of localhost, which is another origin."""
    settings = {**env, "BEI_API_KEYS": f"page:{SECRET}"}
    with serve([artifacts["embedder"], "--cors-origins", f"http://127.0.0.1:{port}"], settings, home) as server:
        yield server


def asked(browser: Any, origin: str, server: Server, key: str) -> dict[str, Any]:
    context = browser.new_context()
    try:
        page = context.new_page()
        page.goto(origin)
        found: dict[str, Any] = page.evaluate(ASK, [server.url, key])
        return found
    finally:
        context.close()


def test_a_script_of_an_origin_that_is_named_reads_answers_and_their_ids(
    browser: Any, shared: Server, port: int
) -> None:
    found = asked(browser, f"http://127.0.0.1:{port}", shared, SECRET)
    assert (found["status"], found["count"]) == (200, 2)
    assert found["id"]


def test_it_reads_errors_too(browser: Any, shared: Server, port: int) -> None:
    found = asked(browser, f"http://127.0.0.1:{port}", shared, "wrong")
    assert (found["status"], found["count"], bool(found["id"])) == (401, 0, True)
    assert found["code"]


def test_a_script_of_another_origin_reads_nothing(browser: Any, shared: Server, port: int) -> None:
    assert asked(browser, f"http://localhost:{port}", shared, SECRET) == {"refused": "TypeError"}
