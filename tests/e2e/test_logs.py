"""The log of a whole run as JSON: every line of it, and no text or key in any, whatever goes wrong."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from tests.e2e import wire
from tests.e2e.operated import BEARER, OTHER, SECRET, TEXT, Operate
from tests.e2e.process import DEADLINE_S, Server
from tests.support.artifacts import save_artifact


def test_every_line_of_a_run_is_an_object_and_no_request_is_missing(operate: Operate, tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(f"search: {SECRET}\ncrawler: {{key: {OTHER}, lane: bulk, requests_per_second: 0.001}}\n")
    server = operate("--log-format", "json", "--access-log", "--api-keys-file", file, "--max-headers", "30")
    asked = [
        server.ask(BEARER),
        server.ask({**BEARER, "X-Bei-Lane": "bulk"}, input=[TEXT, "b"], model=TEXT),
        server.ask({"Authorization": f"Bearer {SECRET}-wrong"}),
        server.ask({"x-api-key": OTHER}),
        server.ask({"x-api-key": OTHER}),
        server.ask(BEARER, input={TEXT: TEXT}),
        server.ask({**BEARER, "X-Bei-Lane": TEXT}),
        server.ask({**BEARER, "X-Bei-Dialect": TEXT}),
        server.ask({f"x-{number}": TEXT for number in range(40)}),
    ]
    with server.client(BEARER) as client:
        asked.append(client.get(f"/no/such/route?text={TEXT}"))
        asked.append(client.get("/v1/models/" + TEXT))
        asked.append(client.post(f"/tei/embed?text={TEXT}", json={"inputs": TEXT}))
    assert [response.status_code for response in asked] == [200, 404, 401, 200, 429, 400, 400, 400, 431, 404, 404, 200]
    file.write_text(f"search: [{SECRET}")
    server.send_signal(signal.SIGHUP)
    server.wait_for_log("the API keys stay as they were")
    server.send_signal(signal.SIGTERM)
    assert server.wait_exit() == 0
    lines: list[dict[str, Any]] = [json.loads(line) for line in server.log]
    assert all({"time", "level", "logger", "message"} <= set(line) for line in lines)
    requests = {line["request_id"]: line for line in lines if line["message"] == "request"}
    for response in asked:
        line = requests[response.headers["x-request-id"]]
        assert line["status"] == response.status_code
        if line["route"] != "unmatched" or line["method"]:
            assert line["bytes_out"] == len(response.content)
    assert [requests[one.headers["x-request-id"]]["key"] for one in asked[:5]] == [
        *("search", "search", None),
        *("crawler", "crawler"),
    ]
    first, crawled = (requests[asked[place].headers["x-request-id"]] for place in (0, 3))
    assert (first["lane"], first["model"], first["inputs"]) == ("interactive", "tiny", 1)
    assert first["tokens"] > 2
    assert crawled["lane"] == "bulk"
    assert [line["message"] for line in lines][-1] == "stopped"


def test_texts_are_logged_where_the_operator_asks_for_them(tmp_path: Path, env: Mapping[str, str]) -> None:
    artifact = save_artifact(tmp_path / "fake")
    flags = ("--access-log", "--log-inputs", "--log-format", "json")
    command = [sys.executable, "-m", "tests.e2e.gated_server", artifact.path, *flags]

    class JsonServer(Server):
        def wait_until_up(self) -> None:
            self.url = json.loads(self.wait_for_log("listening on"))["message"].split()[-1]

    with JsonServer(command, env, tmp_path) as server:
        server.say("open")
        assert server.embed([TEXT, "line\nbreak"]).status_code == 200
        line = json.loads(server.wait_for_log('"message": "request"'))
        assert line["texts"] == [TEXT, "line\nbreak"]


def test_without_access_log_a_run_has_no_line_of_a_request(operate: Operate) -> None:
    server = operate("--log-format", "json")
    assert server.ask().status_code == 200
    with wire.connect(server) as client:
        client.sendall(b"BROKEN\r\n\r\n")
        assert wire.read_answer(client).status == 400
    assert httpx.get(f"{server.url}/nowhere", timeout=DEADLINE_S).status_code == 404
    server.send_signal(signal.SIGTERM)
    assert server.wait_exit() == 0
    assert not [line for line in server.log if json.loads(line)["message"] == "request"]
