"""Network settings that are invalid or exclude each other are refused by name."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from bei.config.settings import ServeConfig
from bei.config.sources import load
from bei.errors import ConfigError

KEYS = {"api_keys": ("0123456789abcdef",)}
TLS = {"tls_cert": "c", "tls_key": "k"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tcp": False}, "tcp false leaves nothing to listen on"),
        ({"uds_mode": "600"}, "uds_mode needs uds"),
        ({"uds": "s", "uds_mode": "0660"}, "uds_mode must be three octal digits"),
        ({"uds": "s", "uds_mode": "888"}, "uds_mode must be three octal digits"),
        ({"tls_cert": "c"}, "tls_cert and tls_key belong together"),
        ({"tls_key": "k"}, "tls_cert and tls_key belong together"),
        ({"tls_client_ca": "a"}, "tls_client_ca needs TLS"),
        ({**TLS, "uds": "s"}, "tls_cert is for TCP"),
        ({"api_keys": ()}, "everybody would be let in"),
        ({"metrics_need_key": True}, "metrics_need_key needs keys"),
        *(
            ({"image_url_hosts": (host,)}, "is no name of a host")
            for host in (
                "*",
                "*.com",
                "localhost",
                "https://a.example",
                "a.example:80",
                "A.example",
                "1.2.3.4",
                "[::1]",
            )
        ),
        ({"cors_credentials": True}, "cors_credentials is for pages of cors_origins"),
        ({"cors_origins": ("*",), "cors_credentials": True}, "exclude each other"),
        ({"cors_origins": ("*", "https://a.example")}, "name it alone"),
        *(
            ({"cors_origins": (origin,)}, "is no origin")
            for origin in (
                "a.example",
                "https://a.example/",
                "https://a.example/x",
                "null",
                "https://*.example",
                "https://",
            )
        ),
        ({"log_inputs": True}, "log_inputs is for the lines of access_log"),
        *(
            ({"root_path": path}, "root_path must begin with /")
            for path in ("/", "x", "/x/", "//x", "/x y", "/x?y", "/é")
        ),
        *(({"root_path": path}, "has . or ..") for path in ("/a/../b", "/..", "/./a", "/a/.")),
        *(
            ({"root_path": path}, "begins as paths of routes do")
            for path in ("/v1", "/tei", "/v1/x", "/health", "/docs")
        ),
        ({"log_format": "xml"}, "log_format must be one of text, json"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServeConfig(**settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"uds": "s"},
        {"uds": "s", "uds_mode": "600", "tcp": True},
        {"uds": "s", "tcp": True, **TLS, "tls_client_ca": "a"},
        {**KEYS, "metrics_need_key": True},
        {"cors_origins": ("*",)},
        {"image_url_hosts": ("a.example", "*.b.example", "c-d.e1.example")},
        {"cors_origins": ("https://a.example", "http://localhost:3000", "chrome-extension://abc", "HTTPS://B.example")},
        {"cors_origins": ("https://a.example",), "cors_credentials": True},
        {"access_log": True, "log_inputs": True},
        {"root_path": "/embed-api"},
        {"root_path": "/a/v1/b_c.d~e"},
    ],
)
def test_what_goes_together_is_accepted(settings: dict[str, Any]) -> None:
    ServeConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "listens"),
    [({}, True), ({"uds": "s"}, False), ({"uds": "s", "tcp": True}, True), ({"uds": "s", "tcp": False}, False)],
)
def test_tcp_is_listened_on_unless_there_is_a_unix_socket(settings: dict[str, Any], listens: bool) -> None:
    assert ServeConfig(**settings).listens_on_tcp is listens


SECRET = "s3cr3t-0123456789abcdef"


def test_keys_come_from_the_environment_and_are_not_shown() -> None:
    config = load(ServeConfig, {}, env={"BEI_API_KEYS": f"a:{SECRET},b:other"})
    assert config.api_keys == (f"a:{SECRET}", "b:other")
    assert SECRET not in repr(config)


def test_a_variable_that_is_empty_does_not_open_the_server() -> None:
    for value in ("", ",", " "):
        with pytest.raises(ConfigError, match="everybody would be let in"):
            load(ServeConfig, {}, env={"BEI_API_KEYS": value})


@pytest.mark.parametrize(
    "content", [f"api_keys: {{a: {SECRET}}}", f"api_keys: [{{a: {SECRET}}}]", "api_keys: 12345678"]
)
def test_keys_of_a_wrong_form_are_not_quoted(tmp_path: Any, content: str) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError) as caught:
        load(ServeConfig, {}, str(file), env={})
    assert str(caught.value) == "Setting 'api_keys' (file) must be a list of texts."


def test_a_misspelt_variable_of_keys_is_an_error_without_its_value() -> None:
    with pytest.raises(ConfigError, match="Did you mean BEI_API_KEYS") as caught:
        load(ServeConfig, {}, env={"BEI_API_KEY": SECRET})
    assert SECRET not in str(caught.value)


def test_secrets_have_no_flag_and_no_default() -> None:
    secrets = [field for field in dataclasses.fields(ServeConfig) if field.metadata.get("secret")]
    assert [field.name for field in secrets] == ["api_keys"]
    assert all(field.metadata.get("file_only") and not field.repr and field.default is None for field in secrets)
