"""URLs of servers, headers, and keys, which are never shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from bei.cli.bench.target import headers_of, key_of, shown_command, target_of
from bei.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "url", "path"),
    [
        ("http://a:8000", "http://a:8000", "/v1/embeddings"),
        ("http://a:8000/", "http://a:8000", "/v1/embeddings"),
        ("http://a:8000/v1", "http://a:8000/v1", "/v1/embeddings"),  # as OpenAI's clients have it
        ("http://a:8000/v1/embeddings", "http://a:8000/v1/embeddings", "/v1/embeddings"),
        ("https://a/vllm", "https://a/vllm", "/vllm/v1/embeddings"),
        ("http://[::1]:80/x/v1/", "http://[::1]/x/v1", "/x/v1/embeddings"),
    ],
)
def test_a_route_goes_behind_the_url_but_nothing_twice(text: str, url: str, path: str) -> None:
    target = target_of(text)
    assert (target.url, target.path("/v1/embeddings")) == (url, path)


def test_servers_have_names() -> None:
    assert target_of("http://a", 2).name == "server 2"
    named = target_of("peer=https://a.example:444/x")
    assert (named.name, named.host, named.port, named.is_https, named.prefix) == ("peer", "a.example", 444, True, "/x")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a:8000", "http://HOST"),
        ("ftp://a", "http://HOST"),
        ("http://", "http://HOST"),
        ("http://a:port", "no URL"),
        ("http://user:secret@a", "password"),
        ("http://a/?key=secret", "without '\\?'"),
        ("http://a/b c", "escaped"),
    ],
)
def test_what_is_no_server_is_refused_and_secrets_are_not_repeated(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        target_of(text)
    assert "secret" not in str(caught.value)


def test_keys_come_from_the_environment_or_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KEY", "sk-1")
    (tmp_path / "key").write_text("sk-2\n")
    assert key_of(None, None) is None
    assert key_of("KEY", None) == "sk-1"
    assert key_of(None, tmp_path / "key") == "sk-2"
    (tmp_path / "two").write_text("sk-3\nsk-4\n")
    for variable, file in (("KEY", tmp_path / "key"), ("MISSING", None), (None, tmp_path / "two"), (None, tmp_path)):
        with pytest.raises(ConfigError) as caught:
            key_of(variable, file)
        assert "sk-" not in str(caught.value)


def test_headers_are_sent_and_their_values_not_shown() -> None:
    assert headers_of(["X-A: b: c"], "k") == {"authorization": "Bearer k", "x-a": "b: c"}
    for wrong in ("x", "a b: c", "x: a\nb", "Authorization: Bearer k", "X-API-Key: k", "Host: a", "Cookie: a"):
        with pytest.raises(ConfigError):
            headers_of([wrong], None)
    with pytest.raises(ConfigError, match="twice"):
        headers_of(["a: b", "A: c"], None)
    command = ["bench", "http://a", "--header", "x-a: s3cret", "--header=x-b:s3cret", "--rate", "3"]
    shown = shown_command(command)
    assert not any("s3cret" in word for word in shown)
    assert shown == ["bench", "http://a", "--header", "x-a: ...", "--header=x-b: ...", "--rate", "3"]
