"""The soak's traffic asks every route."""

from __future__ import annotations

from bei.config.settings import ServeConfig
from bei.server.app import inference_routes
from benchmarks.soak_traffic import MODELS, requests
from tests.bei.server.dialects.wire import has_path

# Its models are the zoo's, none of which finds spans for labels; decisions are not part of its traffic.
_NOT_SERVED = {"/v1/extract", "/v1/extract/{model:path}", "/v1/decisions", "/v1/systemone"}


def test_every_route_that_asks_a_model_is_asked() -> None:
    asked = {action.path for action in requests(MODELS)}
    routes = {route.path for route in inference_routes(ServeConfig())}
    assert {route for route in routes if not any(has_path(route, path) for path in asked)} == _NOT_SERVED
