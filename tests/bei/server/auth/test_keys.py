"""API keys over HTTP: who is let in and how, in whose lane, how often; and keys that change."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from bei.config.settings import DIALECTS
from bei.engine.fake import FakeEngine
from bei.errors import ConfigError, ForbiddenError, UnauthorizedError
from bei.port import Lane, Submission
from bei.scheduler.batch_manager import BatchManager
from bei.server.auth import keys as module
from bei.server.auth.key_file import KeySpec
from bei.server.auth.keys import Key, Keyring
from bei.server.auth.priority import Urgency
from bei.server.http.errors import FORM_KEY, error_response
from bei.server.scope import SCOPE_API_KEY
from tests.bei.server.app import ROUTE, App, check_error
from tests.bei.server.conftest import MakeApp
from tests.support.artifacts import LIMITS
from tests.support.engines import GatedEngine

SECRET = "s3cr3t-0123456789abcdef"
OTHER = "other-0123456789abcdef"
BEARER = {"Authorization": f"Bearer {SECRET}"}


@pytest.fixture
def keyed(make_app: MakeApp) -> App:
    return make_app(FakeEngine(LIMITS), api_keys=(f"search:{SECRET}", f"crawler:{OTHER}"))


def ask(app: App, headers: dict[str, str], path: str = ROUTE, method: str = "POST", **body: object) -> httpx.Response:
    content = json.dumps(body or {"input": [1]}).encode() if method == "POST" else None
    response: httpx.Response = app.run(app.client.request(method, path, content=content, headers=headers))
    return response


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": f"Bearer {SECRET}"},
        {"Authorization": f"bearer {SECRET}"},
        {"Authorization": f"BEARER   {SECRET} "},
        {"Authorization": f"Api-Key {SECRET}"},
        {"Authorization": SECRET},
        {"X-Api-Key": SECRET},
        {"Api-Key": f" {SECRET}"},
        {"Authorization": "Basic dXNlcjpwYXNz", "X-Api-Key": SECRET},
        {"X-Api-Key": "wrong", "Authorization": f"Bearer {SECRET}"},
        {"Authorization": f"Bearer {SECRET}", "X-Api-Key": "wrong"},
        {"Authorization": f"Bearer {OTHER}"},
    ],
)
def test_a_key_is_taken_however_clients_send_it(keyed: App, headers: dict[str, str]) -> None:
    assert ask(keyed, headers).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": ""},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer "},
        {"Authorization": f"Bearer {SECRET[:-1]}"},
        {"Authorization": f"Bearer {SECRET}x"},
        {"Authorization": f"Bearer {SECRET.upper()}"},
        {"Authorization": f"Basic {SECRET}"},
        {"Authorization": f"Bearer Bearer {SECRET}"},
        {"Authorization": f"Bearer {SECRET},{OTHER}"},
        {"X-Api-Key": f"Bearer {SECRET}"},
        {"X-Api-Key": "search"},
        {"Authorization": f"Bearer search:{SECRET}"},
        {"Authorization": "Bearer \xe9"},
        {"Authorization": "x" * 20_000},
    ],
)
def test_what_is_no_key_is_a_401_that_says_how_to_send_one(keyed: App, headers: dict[str, str]) -> None:
    raw = {name: value.encode("latin-1") for name, value in headers.items()}
    response = ask(keyed, raw)  # type: ignore[arg-type]
    message = check_error(response, 401, "none of this server's", code="invalid_api_key")  # OpenAI's word
    assert response.headers["www-authenticate"] == "Bearer"
    assert SECRET[:8] not in message


def test_without_a_key_nothing_is_computed_and_the_body_is_not_read(make_app: MakeApp) -> None:
    engine = FakeEngine(LIMITS)
    app = make_app(engine, api_keys=(SECRET,))
    for path in (ROUTE, f"{ROUTE}?api_key={SECRET}"):
        response = app.request("POST", path, b"{" * 1000)
        check_error(response, 401, "send it as the header 'Authorization: Bearer KEY'", code="unauthorized")
    assert engine.batches == []


@pytest.mark.parametrize("name", [name for name in DIALECTS if name != "bei"])
def test_a_401_has_the_form_of_the_dialect(keyed: App, name: str) -> None:
    dialect = next(one for one in keyed.dialects if one.name == name)
    path = f"/{name}{dialect.roots[0]}{dialect.routes[0].path}"
    error = UnauthorizedError(module._MISSING)
    expected = error_response(error, {FORM_KEY: dialect.error_form, "path": path})
    for response in (
        ask(keyed, {}, path),
        ask(keyed, {"X-Bei-Dialect": name}, dialect.routes[0].path),
        ask(keyed, {}, f"/{name}/no/such/route"),
    ):
        assert response.status_code == 401
        assert response.json() == json.loads(bytes(expected.body))
        assert response.headers["www-authenticate"] == "Bearer"


PROBES = (
    *("/", "/health", "/ping", "/ready", "/tei/health", "/tei/ping", "/tei/"),
    *("/nim/v1/health/live", "/nim/v1/health/ready", "/infinity/health", "/vllm/health", "/vllm/ping"),
    *("/oip/v2/health/live", "/oip/v2/health/ready", "/ollama/"),
)
METRICS = ("/metrics", "/tei/metrics", "/nim/v1/metrics", "/infinity/metrics", "/vllm/metrics")


@pytest.mark.parametrize("need_key", [False, True])
def test_only_probes_and_metrics_are_read_without_a_key(make_app: MakeApp, need_key: bool) -> None:
    app = make_app(FakeEngine(LIMITS), api_keys=(SECRET,), metrics_need_key=need_key)
    open_paths = {*PROBES} if need_key else {*PROBES, *METRICS}
    page = ask(app, BEARER, "/openapi.json", "GET").json()
    reads = {(path, method) for path, item in page["paths"].items() for method in item if method in ("get", "head")}
    assert {path for path, _ in reads} >= {*PROBES, *METRICS, "/info", "/v1/models"}
    for path, method in sorted(reads):
        status = ask(app, {}, path, method.upper()).status_code
        assert (status == 401) == (path not in open_paths), (path, method)
        assert status in (200, 401)
    for path in ("/openapi.json", "/docs", "/redoc", "/api-doc/openapi.json", "/no/such/route", "/health/x"):
        assert ask(app, {}, path, "GET").status_code == 401, path
    for path in (*PROBES, *METRICS):
        assert ask(app, {}, path, "POST").status_code == 401, path
    assert ask(app, {"X-Bei-Dialect": "tei"}, "/", "GET").status_code == 200
    assert ask(app, {}, "/health", "OPTIONS").status_code == 401


def test_a_server_without_keys_asks_for_none_and_takes_any(app: App) -> None:
    assert ask(app, {}).status_code == ask(app, BEARER).status_code == 200


# Lanes


def spec(lane: Lane | None = None, *, may_raise_lane: bool = False, **rates: float) -> KeySpec:
    return KeySpec("search", (SECRET,), lane, may_raise_lane, **rates)


@pytest.mark.parametrize(
    ("lane", "may_raise", "asked", "found"),
    [
        (None, False, None, None),
        (None, False, "interactive", "interactive"),
        (None, False, "bulk", "bulk"),
        ("bulk", False, None, "bulk"),
        ("bulk", False, "bulk", "bulk"),
        ("bulk", True, None, "bulk"),
        ("bulk", True, "interactive", "interactive"),
        ("interactive", False, None, "interactive"),
        ("interactive", False, "interactive", "interactive"),
        ("interactive", False, "bulk", "bulk"),
    ],
)
def test_a_request_is_in_the_lane_that_it_may_ask_for_or_else_its_key_s(
    lane: Lane | None, may_raise: bool, asked: Lane | None, found: Lane | None
) -> None:
    key = Key(spec(lane, may_raise_lane=may_raise), "search")
    assert key.urgency(Urgency(asked, 5.0)) == Urgency(found, 5.0)


def test_a_bulk_key_that_may_not_raise_its_lane_is_told() -> None:
    with pytest.raises(ForbiddenError, match="search is for the lane bulk alone: leave x-bei-lane out"):
        Key(spec("bulk"), "search").urgency(Urgency("interactive"))


@pytest.fixture
def crawler(make_app: MakeApp, tmp_path: Path) -> App:
    """An application whose only key is for bulk work."""
    file = tmp_path / "keys.yaml"
    file.write_text(f"crawler: {{key: {SECRET}, lane: bulk}}")
    return make_app(FakeEngine(LIMITS), api_keys_file=str(file), access_log=True)


def test_the_lane_of_a_key_is_that_of_its_requests(crawler: App, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "bei.server.telemetry.access_log")
    assert ask(crawler, BEARER).status_code == 200
    assert "key=crawler lane=bulk" in caplog.text
    response = ask(crawler, {**BEARER, "X-Bei-Lane": "interactive"})
    check_error(response, 403, "leave x-bei-lane out", code="forbidden", param="x-bei-lane")


# Rates


def rated(make_app: MakeApp, tmp_path: Path, options: str) -> App:
    file = tmp_path / "keys.yaml"
    file.write_text(f"search: {{key: {SECRET}, {options}}}\ncrawler: {OTHER}\n")
    return make_app(FakeEngine(LIMITS), api_keys_file=str(file))


def test_more_requests_than_the_rate_are_a_429_with_a_time_to_come_back(make_app: MakeApp, tmp_path: Path) -> None:
    app = rated(make_app, tmp_path, "requests_per_second: 0.01")
    assert ask(app, BEARER).status_code == 200
    response = ask(app, BEARER)
    check_error(response, 429, "may send 0.01 requests a second", code="rate_limited", type="rate_limit_error")
    assert 95 <= int(response.headers["retry-after"]) <= 100
    assert 95_000 <= int(response.headers["retry-after-ms"]) <= 100_000
    assert ask(app, {"X-Api-Key": OTHER}).status_code == 200  # others are not concerned
    assert ask(app, {}, "/health", "GET").status_code == 200
    assert ask(app, BEARER, "/nim/v1/embeddings").status_code == 429  # not NIM's 503 of a full queue


def test_more_tokens_than_the_rate_are_a_429_and_nothing_stays_admitted(make_app: MakeApp, tmp_path: Path) -> None:
    app = rated(make_app, tmp_path, "tokens_per_second: 0.1")
    assert ask(app, BEARER, input=[[1] * 10]).status_code == 200
    response = ask(app, BEARER, input=[[1] * 10])
    check_error(response, 429, "may send 0.1 tokens a second", code="rate_limited")
    assert 90 <= int(response.headers["retry-after"]) <= 130  # ten tokens, special ones perhaps, at a tenth a second
    (service,) = app.models
    assert service._admission.num_open == 0
    assert ask(app, BEARER, "/v1/models", "GET").status_code == 200


def test_a_prompt_counts_with_every_input(make_app: MakeApp, tmp_path: Path) -> None:
    """1,000 short texts with a prompt of 500 tokens each were 1,000 short texts."""
    waits = []
    for prompt in ("", "the cat " * 4):
        app = rated(make_app, tmp_path, "tokens_per_second: 0.1")
        assert ask(app, BEARER, input=["a"] * 3, prompt=prompt).status_code == 200
        waits.append(int(ask(app, BEARER, input="a").headers["retry-after"]))
    assert waits[1] - waits[0] >= 3 * 8 / 0.1 - 1  # 32 characters are eight tokens


# Keys that change


def ring(*specs: KeySpec) -> tuple[Keyring, list[KeySpec]]:
    """A keyring, and the list that it is read from."""
    source = [*specs]
    return Keyring(lambda: [*source]), source


def name_of(keys: Keyring, secret: str) -> str | None:
    scope: dict[str, Any] = {"headers": [(b"x-api-key", secret.encode())]}
    try:
        keys.check(scope)
    except UnauthorizedError:
        return None
    key: Key = scope[SCOPE_API_KEY]
    return key.name


def test_a_name_has_one_flow_whatever_its_secrets_and_whichever_process_asks() -> None:
    def flow_of(name: str, *secrets: str) -> int:
        return Key(KeySpec(name, secrets), name).flow

    assert flow_of("a", "one", "two") == flow_of("a", "three")
    flows = {flow_of(str(number), "one") for number in range(1000)}
    assert len(flows) == 1000
    assert all(0 < flow < 2**63 for flow in flows)


def test_the_requests_of_a_key_are_one_flow_on_their_way_to_the_engine(
    keyed: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int] = []
    submit = BatchManager.submit

    def noted(port: BatchManager, submission: Submission) -> None:
        found.append(submission.flow)
        submit(port, submission)

    monkeypatch.setattr(BatchManager, "submit", noted)
    for secret in (SECRET, OTHER, SECRET):
        assert ask(keyed, {"Api-Key": secret}).status_code == 200
    search, crawler, again = found
    assert search == again == Key(KeySpec("search", ()), "search").flow
    assert crawler != search


def test_a_reload_adds_keys_and_takes_others_away(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    keys, source = ring(KeySpec("a", ("old",)))
    source[:] = [KeySpec("a", ("old", "new")), KeySpec("b", ("other",))]
    assert name_of(keys, "new") is None
    asyncio.run(keys.reload())
    assert [name_of(keys, secret) for secret in ("old", "new", "other")] == ["a", "a", "b"]
    source[:] = [KeySpec("a", ("new",))]
    asyncio.run(keys.reload())
    assert [name_of(keys, secret) for secret in ("old", "new", "other")] == [None, "a", None]
    assert "API keys: 3 of 2 names" in caplog.text
    assert "old" not in caplog.text


def test_where_the_new_keys_cannot_be_read_the_old_ones_stay(caplog: pytest.LogCaptureFixture) -> None:
    def read() -> list[KeySpec]:
        if is_broken:
            raise ConfigError("line 3 is wrong.")
        return [KeySpec("a", ("old",))]

    is_broken = False
    keys = Keyring(read)
    is_broken = True
    asyncio.run(keys.reload())
    assert name_of(keys, "old") == "a"
    (record,) = (record for record in caplog.records if record.levelname == "ERROR")
    assert record.getMessage() == "the API keys stay as they were, the new ones cannot be read: line 3 is wrong."


def test_a_reload_makes_no_new_allowance() -> None:
    keys, source = ring(spec(requests_per_second=0.01))
    source[:] = [spec(requests_per_second=0.02)]
    assert name_of(keys, SECRET) == "search"
    asyncio.run(keys.reload())
    with pytest.raises(Exception, match=r"may send 0.02 requests a second"):
        name_of(keys, SECRET)


def test_a_request_under_way_is_answered_though_its_key_is_taken_away(make_app: MakeApp, tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(f"search: {SECRET}")
    engine = GatedEngine(LIMITS)
    app = make_app(engine, api_keys_file=str(file))

    async def work() -> list[int]:
        first = asyncio.ensure_future(app.client.post(ROUTE, content=b'{"input": [1]}', headers=BEARER))
        await asyncio.get_running_loop().run_in_executor(None, engine.wait_entered)
        file.write_text(f"search: {OTHER}")
        assert app.keys is not None
        await app.keys.reload()
        second = await app.client.post(ROUTE, content=b'{"input": [1]}', headers=BEARER)
        engine.open()
        return [(await first).status_code, second.status_code]

    assert app.run(work()) == [200, 401]


# What is known of keys from outside


def test_requests_are_counted_by_the_name_of_their_key(keyed: App) -> None:
    assert ask(keyed, BEARER).status_code == 200
    assert ask(keyed, BEARER, input=[]).status_code == 400
    assert ask(keyed, {"X-Api-Key": OTHER}).status_code == 200
    assert ask(keyed, {}).status_code == 401
    text = ask(keyed, {}, "/metrics", "GET").text
    counts = re.findall(r'bei_key_requests_total{key="(\w+)",status="(\d+)"} (\S+)', text)
    assert sorted(counts) == [("crawler", "200", "1.0"), ("search", "200", "1.0"), ("search", "400", "1.0")]
    assert f'bei_requests_total{{route="{ROUTE}",status="401"}} 1.0' in text


def test_labels_stay_few_however_many_names_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_LABELS", 3)
    keys, source = ring(KeySpec("a", ("1",)), KeySpec("b", ("2",)))
    source[:] = [KeySpec(name, (name,)) for name in "bcde"]
    asyncio.run(keys.reload())
    assert {key.name: key.label for key in keys._by_digest.values()} == {
        **{"b": "b", "c": "c"},
        **{"d": "others", "e": "others"},
    }


def test_a_short_key_is_warned_of_by_name(caplog: pytest.LogCaptureFixture) -> None:
    ring(KeySpec("weak", ("hunter2",)), KeySpec("strong", (SECRET,)))
    assert "the API key weak has fewer than 16 characters" in caplog.text
    assert "strong has" not in caplog.text
    assert "hunter2" not in caplog.text


def test_keys_are_nowhere_to_be_read(keyed: App, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    texts = [ask(keyed, BEARER, path, "GET").text for path in ("/info", "/openapi.json", "/metrics", "/v1/models")]
    texts += [ask(keyed, {"Authorization": f"Bearer {SECRET}x"}).text, caplog.text]
    assert keyed.keys is not None
    texts += [repr(vars(keyed.keys)), *(repr(vars(key)) for key in keyed.keys._by_digest.values())]
    for text in texts:
        assert SECRET not in text
        assert OTHER not in text


def test_the_openapi_page_says_how_to_send_a_key_and_which_routes_need_none(keyed: App, app: App) -> None:
    page = ask(keyed, BEARER, "/openapi.json", "GET").json()
    assert set(page["components"]["securitySchemes"]) == {"bearer", "x-api-key", "api-key"}
    assert page["security"] == [{"bearer": []}, {"x-api-key": []}, {"api-key": []}]
    without = {path for path, item in page["paths"].items() if item.get("get", {}).get("security") == []}
    assert without == {*PROBES, *METRICS}
    assert {"401", "403", "429"} <= set(page["paths"][ROUTE]["post"]["responses"])
    assert "401" in page["paths"]["/info"]["get"]["responses"]
    assert "401" in page["paths"]["/vllm/ping"]["post"]["responses"]
    assert "401" not in page["paths"]["/health"]["get"]["responses"]
    keyless = app.get("/openapi.json").json()
    assert "security" not in keyless
    assert "401" not in keyless["paths"][ROUTE]["post"]["responses"]
