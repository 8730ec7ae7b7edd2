"""The measured server: URL, TLS, headers. API keys are never stored."""

from __future__ import annotations

import http.client
import os
import re
import ssl
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from bei.cli.bench.bounded_http import BoundedResponse
from bei.errors import ConfigError
from bei.utils.named_files import MOST_AUTHORITIES_BYTES, MOST_KEY_BYTES, check_named, named_text

_KEY_HEADERS = frozenset(("authorization", "api-key", "x-api-key", "proxy-authorization", "cookie"))
_OWN_HEADERS = frozenset(("host", "content-length", "content-type", "transfer-encoding", "connection", "expect"))


class BenchTarget(msgspec.Struct, frozen=True):
    """A server. ``prefix``: the path of its URL, without a slash at the end."""

    name: str
    is_https: bool
    host: str
    port: int
    prefix: str = ""

    @property
    def url(self) -> str:
        """The URL as displayed and stored."""
        return f"{'https' if self.is_https else 'http'}://{self.authority}{self.prefix}"

    @property
    def authority(self) -> str:
        """The value of the header ``host``."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        is_usual = self.port == (443 if self.is_https else 80)
        return host if is_usual else f"{host}:{self.port}"

    def request(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        tls: ssl.SSLContext | None,
        timeout_s: float,
        most_bytes: int,
        body: bytes = b"",
    ) -> tuple[int, bytes, str]:
        """Send a request over a new connection. Returns status, body and header ``server``. ``path``: the whole path.
        ``timeout_s``: from now to the end of the answer, which may have ``most_bytes``, headers included.

        Raises OSError, HTTPException, AnswerTooLongError.
        """
        deadline_s = time.monotonic() + timeout_s
        connection = (
            http.client.HTTPSConnection(self.host, self.port, timeout=timeout_s, context=tls)
            if self.is_https
            else http.client.HTTPConnection(self.host, self.port, timeout=timeout_s)
        )
        connection.response_class = partial(  # type: ignore[assignment]
            BoundedResponse, deadline_s=deadline_s, most_bytes=most_bytes
        )
        try:
            connection.request(method, path, body or None, dict(headers))
            answer = connection.getresponse()
            return answer.status, answer.read(), answer.getheader("server", "")
        finally:
            connection.close()

    def path(self, route: str) -> str:
        """``route`` appended to the prefix, without their common part (``/v1`` and ``/v1/embeddings``; the whole
        route)."""
        prefix, parts = self.prefix.split("/")[1:], route.split("/")[1:]
        shared = max(n for n in range(min(len(prefix), len(parts)) + 1) if not n or prefix[-n:] == parts[:n])
        return "/" + "/".join([*prefix, *parts[shared:]])


class TlsPlan(msgspec.Struct, frozen=True):
    """TLS files. ``insecure``: certificates are not verified."""

    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    insecure: bool = False

    def context_for(self, target: BenchTarget) -> ssl.SSLContext | None:
        """The TLS context of an HTTPS target, else None. Raises ConfigError for unusable files."""
        if not target.is_https:
            return None
        for flag, file, most in (
            ("--tls-ca", self.ca, MOST_AUTHORITIES_BYTES),
            ("--tls-cert", self.cert, MOST_KEY_BYTES),
            ("--tls-key", self.key, MOST_KEY_BYTES),
        ):
            if file is not None:
                check_named(flag, file, most)  # OpenSSL reads what it is given
        try:
            context = ssl.create_default_context(cafile=self.ca)
            if self.cert is not None:
                context.load_cert_chain(self.cert, self.key)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"TLS cannot be set up with these files: {error}.") from error
        if self.insecure:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context


def target_of(text: str, number: int = 1) -> BenchTarget:
    """The target for ``http://host:port/prefix`` or ``NAME=URL``. Raises ConfigError."""
    name, url = re.fullmatch(r"(?:([A-Za-z0-9][\w.-]{0,31})=)?(.*)", text, re.DOTALL).groups()  # type: ignore[union-attr]
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"{url!r} is no URL: {error}.") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"A server must be given as http://HOST:PORT or https://HOST:PORT, not {url!r}.")
    if parts.username is not None or parts.password is not None:
        raise ConfigError("Put no password into the URL: --api-key-env or --api-key-file.")
    if parts.query or parts.fragment:
        raise ConfigError(f"The URL must end with its path, without '?' and '#': {parts.scheme}://{parts.netloc}...")
    if re.search(r"[^\x21-\x7e]", url):
        raise ConfigError("The URL has characters that must be escaped (%20).")
    is_https = parts.scheme == "https"
    prefix = parts.path.rstrip("/")
    return BenchTarget(name or f"server {number}", is_https, parts.hostname, port or (443 if is_https else 80), prefix)


def key_of(variable: str | None, file: Path | None) -> str | None:
    """The API key from an environment variable or a file. Raises ConfigError, without any part of it."""
    if variable is not None and file is not None:
        raise ConfigError("--api-key-env and --api-key-file: give one.")
    if variable is not None:
        key, where = os.environ.get(variable, "").strip(), f"The environment variable {variable}"
    elif file is not None:
        key, where = named_text("The API key", file, MOST_KEY_BYTES).strip(), str(file)
    else:
        return None
    if not re.fullmatch(r"[\x21-\x7e]+", key):
        raise ConfigError(f"{where} holds no API key: one line of printable ASCII without spaces.")
    return key


def headers_of(given: Sequence[str], key: str | None) -> dict[str, str]:
    """Headers of all requests. Raises ConfigError."""
    headers: dict[str, str] = {"authorization": f"Bearer {key}"} if key is not None else {}
    for text in given:
        name, colon, value = text.partition(":")
        name, value = name.strip().lower(), value.strip()
        if not colon or not re.fullmatch(r"[!#$%&'*+.^_`|~0-9a-z-]+", name) or re.search(r"[^\x20-\x7e]", value):
            raise ConfigError("--header must be 'NAME: VALUE' in ASCII.")
        if name in _KEY_HEADERS:
            raise ConfigError(f"--header {name}: keys are given with --api-key-env or --api-key-file.")
        if name in _OWN_HEADERS or name in headers:
            raise ConfigError(f"--header {name} cannot be set, or is there twice.")
        headers[name] = value
    return headers


def shown_command(arguments: Sequence[str]) -> list[str]:
    """The command without values of headers, which may be secret."""
    shown: list[str] = []
    for place, argument in enumerate(arguments):
        if (place and arguments[place - 1] == "--header") or argument.startswith("--header="):
            shown.append(argument.partition(":")[0] + ": ...")
        else:
            shown.append(argument)
    return shown


def merged_headers(headers: Mapping[str, str], lane: str | None) -> dict[str, str]:
    """The headers of a load with this lane."""
    return {**headers, **({"x-bei-lane": lane} if lane else {})}
