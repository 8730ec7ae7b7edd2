"""API keys with the clients that people have, and keys that change while requests come."""

from __future__ import annotations

import json
import signal
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import baseten_performance_client
import cohere
import httpx
import huggingface_hub
import openai
import pytest
import voyageai.client

from bei.artifact.manifest import Artifact
from tests.e2e.operated import BEARER, OTHER, SECRET, TEXT, Operate, Operated, curl
from tests.e2e.process import DEADLINE_S, wait_until
from tests.e2e.test_bad_start import fails
from tests.support.artifacts import save_artifact


def put(file: Path, content: object) -> Path:
    """At once, as operators should: the server may read at any time."""
    new = file.with_suffix(".new")
    new.write_text(json.dumps(content))
    new.rename(file)
    return file


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return put(tmp_path / "keys.yaml", {"search": SECRET})


def model_of(server: Operated) -> str:
    with server.client(BEARER) as client:
        return str(client.get("/v1/models").json()["data"][0]["id"])


def test_clients_send_keys_each_in_its_way_and_raise_their_own_error_for_a_wrong_one(
    operate: Operate, file: Path
) -> None:
    server = operate("--api-keys-file", file, "--access-log")
    url, model = server.url, model_of(server)

    def with_openai(key: str) -> int:
        with openai.OpenAI(base_url=f"{url}/v1", api_key=key, timeout=DEADLINE_S, max_retries=0) as client:
            return len(client.embeddings.create(model=model, input=TEXT).data)

    def with_cohere(key: str) -> int:
        with httpx.Client(timeout=DEADLINE_S) as http:
            client: Any = cohere.ClientV2(api_key=key, base_url=url, httpx_client=http)
            answer = client.embed(model=model, input_type="search_query", texts=[TEXT], embedding_types=["float"])
            return len(answer.embeddings.float_)

    def with_hugging_face(key: str) -> int:
        try:
            client = huggingface_hub.InferenceClient(f"{url}/embed", token=key, timeout=DEADLINE_S)
            return len(client.feature_extraction(TEXT))
        finally:
            huggingface_hub.close_session()

    def with_voyage(key: str) -> int:
        client = voyageai.client.Client(api_key=key, base_url=f"{url}/voyage/v1", timeout=DEADLINE_S)
        return len(client.embed([TEXT], model=model).embeddings)

    def with_baseten(key: str) -> int:
        client = baseten_performance_client.PerformanceClient(base_url=url, api_key=key)
        return len(client.embed([TEXT], model=model).data)

    wrong: list[tuple[Callable[[str], int], type[Exception]]] = [
        (with_openai, openai.AuthenticationError),
        (with_cohere, cohere.UnauthorizedError),
        (with_hugging_face, huggingface_hub.errors.HfHubHTTPError),
        (with_voyage, voyageai.error.AuthenticationError),
        (with_baseten, Exception),
    ]
    for embeds, error in wrong:
        assert embeds(SECRET) == 1
        with pytest.raises(error, match=r"401|API key|nauthorized"):
            embeds(OTHER)


def test_curl_gets_in_with_a_key_and_is_told_how_without(operate: Operate, file: Path) -> None:
    server = operate("--api-keys-file", file)

    def asked(*arguments: str) -> str:
        return curl("-i", *arguments, "-d", json.dumps({"input": TEXT}), f"{server.url}/v1/embeddings")

    assert asked("-H", f"Authorization: Bearer {SECRET}").startswith("HTTP/1.1 200 ")
    assert asked("-H", f"x-api-key: {SECRET}").startswith("HTTP/1.1 200 ")
    refused = asked()
    assert refused.startswith("HTTP/1.1 401 ")
    assert "\nwww-authenticate: Bearer\n" in refused


def test_keys_of_the_environment_and_the_file_are_all_good(operate: Operate, file: Path) -> None:
    server = operate("--api-keys-file", file, variables={"BEI_API_KEYS": f"crawler:{OTHER}"})
    assert [server.ask(headers).status_code for headers in ({}, BEARER, {"api-key": OTHER})] == [401, 200, 200]
    with server.client() as client:
        text = client.get("/metrics").text
    assert 'bei_key_requests_total{key="crawler",status="200"} 1.0' in text


def test_a_large_body_without_a_key_is_refused_before_it_has_come(operate: Operate, file: Path) -> None:
    server = operate("--api-keys-file", file)
    for _ in range(3):
        refused = server.ask({}, input=["word " * 100_000])
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "unauthorized")
    assert server.ask(BEARER).status_code == 200


def test_a_client_that_comes_back_when_told_is_served_at_its_rate(operate: Operate, file: Path) -> None:
    seldom = f"{SECRET}-seldom"
    put(
        file,
        {
            "search": {"key": SECRET, "requests_per_second": 2},
            "seldom": {"key": seldom, "requests_per_second": 0.001},
            "other": OTHER,
        },
    )
    server = operate("--api-keys-file", file)
    assert [server.ask({"x-api-key": seldom}).status_code for _ in range(3)] == [200, 429, 429]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=SECRET, timeout=DEADLINE_S, max_retries=5) as client:
        for _ in range(3):
            assert client.embeddings.create(model=model_of_other(server), input=TEXT).data
    assert server.ask({"x-api-key": OTHER}).status_code == 200


def model_of_other(server: Operated) -> str:
    with server.client({"x-api-key": OTHER}) as client:
        return str(client.get("/v1/models").json()["data"][0]["id"])


def test_a_broken_file_keeps_the_old_keys_and_logs_an_error_without_them(operate: Operate, file: Path) -> None:
    server = operate("--api-keys-file", file)
    for content in (f"search: [{SECRET}", "", f"{OTHER}: {SECRET}\n{OTHER}: x", "search: 5"):
        file.write_text(content)
        server.send_signal(signal.SIGHUP)
        assert " ERROR the API keys stay as they were" in server.wait_for_log("the API keys stay as they were")
        assert server.ask(BEARER).status_code == 200
    file.unlink()
    server.send_signal(signal.SIGHUP)
    server.wait_for_log("cannot be read: No such file")
    put(file, {"search": OTHER})
    server.send_signal(signal.SIGHUP)
    server.wait_for_log("API keys: 1 of 1 names")
    assert server.ask(BEARER).status_code == 401
    assert server.ask({"x-api-key": OTHER}).status_code == 200


class Clients:
    """Threads that ask without a pause, each with the key that is current, on a connection of its own."""

    def __init__(self, server: Operated, key: str, count: int) -> None:
        self._server = server
        self._key = key
        self._is_over = threading.Event()
        self._begun = [0] * count  # requests with the current key
        self.statuses: Counter[int] = Counter()
        self.errors: list[Exception] = []
        self._threads = [threading.Thread(target=self._ask, args=(place,)) for place in range(count)]

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(DEADLINE_S)
        assert not any(thread.is_alive() for thread in self._threads)

    def _ask(self, place: int) -> None:
        try:
            with self._server.client() as client:
                while not self._is_over.is_set():
                    key = self._key
                    response = client.post("/v1/embeddings", json={"input": TEXT}, headers={"x-api-key": key})
                    self.statuses[response.status_code] += 1
                    self._begun[place] += key == self._key
        except Exception as error:
            self.errors.append(error)

    def change_to(self, key: str) -> None:
        """Return when no request with another key is under way, and each client has been answered with this one."""
        self._key = key
        self._begun = [0] * len(self._begun)
        wait_until(lambda: self.errors != [] or all(count >= 2 for count in self._begun), "all have the new key")


def test_keys_are_rotated_under_load_and_no_request_with_a_good_one_fails(operate: Operate, file: Path) -> None:
    keys = [f"{SECRET}-{number}" for number in range(12)]
    put(file, {"search": keys[:2]})
    server = operate("--api-keys-file", file)
    with Clients(server, keys[0], 4) as clients:
        for number in range(1, len(keys) - 1):
            clients.change_to(keys[number])  # which has been good for a while
            put(file, {"search": keys[number : number + 2]})
            server.send_signal(signal.SIGHUP)
            server.wait_for_log("API keys: 2 of 1 names")
            assert server.ask({"x-api-key": keys[number - 1]}).status_code == 401
    assert clients.errors == []
    assert set(clients.statuses) == {200}
    assert clients.statuses[200] >= 8 * (len(keys) - 2)


@pytest.fixture
def artifact(tmp_path: Path) -> Artifact:
    return save_artifact(tmp_path / "fake")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "keys.yaml cannot be read: No such file"),
        ("", "must be a table of names"),
        (f"search: {SECRET}\nsearch: {OTHER}", "a name twice"),
        (f"search: [{SECRET}", "are no YAML"),
        (f"search: {{key: {SECRET}, lane: fast}}", "lane must be interactive or bulk"),
    ],
)
def test_a_server_with_wrong_keys_does_not_start_and_shows_none(
    artifact: Artifact, env: Mapping[str, str], tmp_path: Path, content: str | None, message: str
) -> None:
    if content is not None:
        (tmp_path / "keys.yaml").write_text(content)
    line = fails(["serve", artifact.path, "--port", "0", "--api-keys-file", "keys.yaml"], env, tmp_path)
    assert message in line
    assert SECRET not in line


def test_an_empty_or_misspelt_variable_does_not_open_the_server(
    artifact: Artifact, env: Mapping[str, str], tmp_path: Path
) -> None:
    for name, message in (("BEI_API_KEYS", "everybody would be let in"), ("BEI_API_KEY", "Did you mean BEI_API_KEYS")):
        value = "" if name == "BEI_API_KEYS" else SECRET
        line = fails(["serve", artifact.path, "--port", "0"], {**env, name: value}, tmp_path)
        assert message in line
        assert SECRET not in line


def test_no_flag_takes_a_key(artifact: Artifact, env: Mapping[str, str], tmp_path: Path) -> None:
    from tests.e2e import process

    shown = process.run(["serve", "--help"], env, tmp_path).stdout
    assert "--api-keys-file" in shown
    assert "--api-keys " not in shown
    ended = process.run(["serve", artifact.path, "--api-keys", "x"], env, tmp_path)
    assert ended.returncode == 2
