"""Variables of clouds are settings of a server: over those of its image, under flags."""

from __future__ import annotations

import pytest

from bei.config.settings import ServeConfig
from bei.config.sources import load
from bei.errors import ConfigError
from bei_build.config import BuildConfig

VERTEX = {
    "AIP_MODE": "PREDICTION",
    "AIP_HTTP_PORT": "8080",
    "AIP_HEALTH_ROUTE": "/v1/endpoints/7/deployedModels/8",
    "AIP_PREDICT_ROUTE": "/v1/endpoints/7/deployedModels/8:predict",
}


def test_a_cloud_says_where_it_asks() -> None:
    config = load(ServeConfig, {}, env={"BEI_PORT": "8000", **VERTEX})
    assert (config.port, config.health_path, config.predict_path) == (
        8080,
        "/v1/endpoints/7/deployedModels/8",
        "/v1/endpoints/7/deployedModels/8:predict",
    )
    assert load(ServeConfig, {}, env={"BEI_PORT": "8000", "SAGEMAKER_BIND_TO_PORT": "9000"}).port == 9000
    assert load(ServeConfig, {"port": 1234}, env=VERTEX).port == 1234
    assert load(ServeConfig, {}, env={"AIP_HTTP_PORT": ""}).port == 8000


def test_a_build_in_a_cloud_has_none_of_these_settings() -> None:
    assert load(BuildConfig, {"model": "x"}, env=VERTEX).model == "x"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("AIP_HEALTH_ROUTE", "health"),
        ("AIP_PREDICT_ROUTE", "/a b"),
        ("AIP_PREDICT_ROUTE", "/"),
        ("AIP_PREDICT_ROUTE", "/a/"),
        ("AIP_PREDICT_ROUTE", "/a?b"),
        ("AIP_PREDICT_ROUTE", VERTEX["AIP_HEALTH_ROUTE"]),
        ("AIP_HTTP_PORT", "eighty"),
    ],
)
def test_what_cannot_be_a_path_or_a_port_is_refused_by_name(name: str, value: str) -> None:
    setting = {"AIP_HEALTH_ROUTE": "health_path", "AIP_PREDICT_ROUTE": "predict_path", "AIP_HTTP_PORT": "port"}[name]
    with pytest.raises(ConfigError, match=setting):
        load(ServeConfig, {}, env={**VERTEX, name: value})
