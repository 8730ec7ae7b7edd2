"""``/health``, ``/ready`` and ``/metrics``."""

from __future__ import annotations

from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from bei.engine.fake import FakeEngine
from tests.bei.server.app import App
from tests.bei.server.conftest import MakeApp
from tests.support.artifacts import LIMITS, save_artifact
from tests.support.engines import PickyEngine


def test_a_working_server_is_alive_and_ready(app: App) -> None:
    for path, status in (("/health", "alive"), ("/ready", "ready")):
        response = app.get(path)
        assert (response.status_code, response.json()) == (200, {"status": status})


def test_a_server_whose_threads_have_died_is_dead_and_names_the_model(make_app: MakeApp) -> None:
    app = make_app(FakeEngine(LIMITS))
    app.models.close()
    assert app.get("/health").status_code == 503
    assert app.get("/health").json() == {"status": "dead", "models": ["tiny"]}
    assert app.get("/ready").status_code == 503


def test_a_server_with_a_broken_engine_is_alive_but_not_ready(make_app: MakeApp) -> None:
    app = make_app(PickyEngine(LIMITS, lambda _: True))
    assert app.get("/health").status_code == 200
    response = app.get("/ready")
    assert response.status_code == 503
    assert response.json() == {
        "status": "not ready",
        "models": {"tiny": "The engine failed on this input; the server's log says why."},
    }


def test_one_model_with_a_wrong_canary_makes_the_server_not_ready(tmp_path: Path, make_app: MakeApp) -> None:
    wrong = save_artifact(tmp_path / "wrong", name="wrong", canary=[0, 0, 0, 0, 1, 0, 0, 0])
    app = make_app(FakeEngine(LIMITS), (wrong, FakeEngine(LIMITS)))
    response = app.get("/ready")
    assert response.status_code == 503
    assert list(response.json()["models"]) == ["wrong"]
    assert "Build the artifact again" in response.json()["models"]["wrong"]


def test_a_draining_server_is_alive_but_not_ready(make_app: MakeApp) -> None:
    app = make_app(FakeEngine(LIMITS))
    app.models.begin_drain()
    assert app.get("/health").status_code == 200
    assert app.get("/ready").status_code == 503


def test_the_metrics_count_what_was_done(make_app: MakeApp) -> None:
    app = make_app(FakeEngine(LIMITS))
    app.embed(input=[[1], [2, 3], [4]])
    app.embed(input="a " * 99)
    app.embed(input=[])
    app.get("/nowhere")
    response = app.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }
    assert samples["bei_requests_total", "/v1/embeddings", "200"] == 2
    assert samples["bei_requests_total", "/v1/embeddings", "400"] == 1
    assert samples["bei_requests_total", "unmatched", "404"] == 1
    assert samples["bei_request_seconds_count", "interactive", "tiny", "/v1/embeddings", "200"] == 2
    assert samples["bei_request_seconds_count", "", "", "/v1/embeddings", "400"] == 1
    assert samples["bei_inputs_total", "tiny"] == 4
    assert samples["bei_inputs_truncated_total", "tiny"] == 1
    assert samples["bei_queue_sequences", "bulk", "tiny"] == 0
    assert samples["bei_queue_tokens", "interactive", "tiny"] == 0
