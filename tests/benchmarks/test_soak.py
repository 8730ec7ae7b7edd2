"""The soak's traffic asks every route."""

from __future__ import annotations

from bei.config.settings import ServeConfig
from bei.server.app import inference_routes
from benchmarks import soak_models
from benchmarks.soak_traffic import requests

TASKS = ("EMBED", "EMBED_TOKENS", "EMBED_SPARSE", "RERANK", "CLASSIFY", "CLASSIFY_TOKENS")


def test_every_route_that_asks_a_model_is_asked() -> None:
    models = {getattr(soak_models, task): task for task in TASKS}
    asked = {action.path for action in requests(models)}
    assert {route.path for route in inference_routes(ServeConfig())} - asked == set()
