"""URLs of images: off by default; where hosts are named, only these, at public addresses, within size and time."""

from __future__ import annotations

import http.server
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from bei.errors import InvalidImageError
from bei.image import fetch
from bei.image.decode import ImageLimits, decoded
from bei.image.fetch import Address, ImageFetcher, is_public
from bei.image.source import ImageInput
from tests.support.two_towers import png

HOSTS = ("images.example.com", "*.cdn.example.com")
FILE = png()


class Handler(http.server.BaseHTTPRequestHandler):
    """A host that redirects, lies about lengths, is slow, or answers the file."""

    asked: ClassVar[list[tuple[str, str]]] = []

    def log_message(self, format: str, *args: Any) -> None: ...

    def do_GET(self) -> None:
        Handler.asked.append((self.headers["Host"], self.path))
        kind = self.path.strip("/").partition("?")[0]
        if kind == "drip":
            self.drip()
        elif kind.startswith("to="):
            self.answer(302, b"", Location=kind.removeprefix("to=").replace("|", "/"))
        elif kind == "endless":
            self.send_response(200)
            self.end_headers()
            while True:
                self.wfile.write(bytes(1 << 16))
        elif kind == "short":
            self.answer(200, FILE[:20], **{"Content-Length": str(len(FILE))})
        elif kind == "gzip":
            self.answer(200, FILE, **{"Content-Encoding": "gzip"})
        else:
            self.answer(200 if kind == "cat.png" else 404, FILE)

    def answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def drip(self) -> None:
        """A header, byte by byte."""
        for byte in b"HTTP/1.1 200 OK\r\nX: " + b"y" * 600:
            self.wfile.write(bytes([byte]))
            time.sleep(0.05)


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.handle_error = lambda *_: None  # type: ignore[method-assign]  # clients that leave
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port
    server.shutdown()
    server.server_close()


@pytest.fixture
def fetcher(port: int, monkeypatch: pytest.MonkeyPatch) -> ImageFetcher:
    """All names lead to the host of this test, whose address counts as public."""
    monkeypatch.setattr(fetch, "is_public", lambda address: address == "127.0.0.1" or is_public(address))
    Handler.asked.clear()
    return ImageFetcher(HOSTS, 100_000, 1.0, lambda host, _: [Address(socket.AF_INET, ("127.0.0.1", port))])


def test_a_named_hosts_image_is_read(fetcher: ImageFetcher) -> None:
    limits = ImageLimits(100_000, 1_000_000, fetcher)
    for url in ("http://images.example.com/cat.png", "HTTP://A.cdn.example.com:80/cat.png?x=1#part"):
        assert decoded(ImageInput(url), limits).size == (40, 30)
    assert Handler.asked == [("images.example.com", "/cat.png"), ("a.cdn.example.com", "/cat.png?x=1")]


def test_the_usual_port_is_not_in_the_host_header(fetcher: ImageFetcher, monkeypatch: pytest.MonkeyPatch) -> None:
    connected = ImageFetcher._connected

    def unencrypted(self: ImageFetcher, addresses: list[Address], host: str, scheme: str, ends: float) -> socket.socket:
        return connected(self, addresses, host, "http", ends)

    monkeypatch.setattr(ImageFetcher, "_connected", unencrypted)
    assert fetcher.fetch("https://images.example.com/cat.png?signed=1", "input") == FILE
    assert Handler.asked == [("images.example.com", "/cat.png?signed=1")]


REFUSED = [
    "http://example.com/cat.png",
    "http://cdn.example.com/cat.png",
    "http://images.example.com.evil.org/cat.png",
    "http://evil.org/images.example.com",
    "http://evil.org#@images.example.com/",
    "http://images.example.com@evil.org/",
    "http://user:key@images.example.com/cat.png",
    "http://images.example.com:8080/cat.png",
    "http://images.example.com:80:80/",
    "http://images.example.com\\@evil.org/",
    "http://images.example.com\t/cat.png",
    "http://images.example.com/\r\nHost: evil.org",
    "http://127.0.0.1/",
    "http://2130706433/",
    "http://0x7f.1/",
    "http://0177.0.0.1/",
    "http://[::1]/",
    "http://[::ffff:127.0.0.1]/",
    "http://localhost/",
    "http://①②⑦.⓪.⓪.①/",
    "http://xn--evil.cdn.example.com.",
    "ftp://images.example.com/cat.png",
    "file:///etc/passwd",
    "gopher://images.example.com/",
    "//images.example.com/cat.png",
    "http:///cat.png",
    "http://",
    "http://*.cdn.example.com/cat.png",
    "http://images.example.com/" + "a" * 3000,
]


@pytest.mark.parametrize("url", REFUSED)
def test_other_hosts_and_tricks_are_refused_before_anything_is_asked(url: str, fetcher: ImageFetcher) -> None:
    with pytest.raises(InvalidImageError) as caught:
        fetcher.fetch(url, "input")
    if "xn--" in url:  # a name below one that is allowed: asked, and not found
        assert "404" in str(caught.value)
    else:
        assert not Handler.asked


@pytest.mark.parametrize(
    "target", ["http:||127.0.0.1|", "http:||evil.org|cat.png", "file:|||etc|passwd", "||evil.org|", "http:||[::1]|", ""]
)
def test_every_redirect_is_checked(target: str, fetcher: ImageFetcher) -> None:
    with pytest.raises(InvalidImageError):
        fetcher.fetch(f"http://images.example.com/to={target}", "input")
    assert {host for host, _ in Handler.asked} == {"images.example.com"}


def test_redirects_are_followed_a_few_times(fetcher: ImageFetcher) -> None:
    assert fetcher.fetch("http://images.example.com/to=||a.cdn.example.com|cat.png", "input") == FILE
    with pytest.raises(InvalidImageError, match="more than 3 redirects"):
        fetcher.fetch("http://images.example.com/to=", "input")


PRIVATE = [
    *("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.0.1", "169.254.169.254", "100.64.0.1", "0.0.0.0"),
    *("224.0.0.1", "255.255.255.255", "240.0.0.1", "192.0.2.1", "198.18.0.1"),
    *("::1", "::", "fe80::1%eth0", "fc00::1", "fd00:ec2::254", "ff02::1", "::ffff:10.0.0.1", "64:ff9b::a00:1"),
    *("2002:a00:1::", "2002:7f00:1::", "2001:db8::1", "no address"),
]


@pytest.mark.parametrize("address", PRIVATE)
def test_no_address_but_a_public_one_is_asked(address: str) -> None:
    assert not is_public(address)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    public = Address(socket.AF_INET, ("93.184.216.34", 80))

    def resolve(host: str, port: int) -> list[Address]:
        return [public, Address(family, (address, port))]  # one of two is enough to refuse

    with pytest.raises(InvalidImageError, match="not public"):
        ImageFetcher(HOSTS, 100, 1.0, resolve).fetch("http://images.example.com/", "input")


def test_public_addresses_are_known() -> None:
    assert all(is_public(one) for one in ("93.184.216.34", "2606:2800:220:1::1", "64:ff9b::5db8:d822"))


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("endless", "more than 100,000 bytes"),
        ("short", "cannot be fetched"),
        ("gzip", "compressed"),
        ("none", "answers 404"),
        ("drip", "cannot be fetched"),
    ],
)
def test_size_and_time_are_bounded(path: str, said: str, fetcher: ImageFetcher) -> None:
    began = time.monotonic()
    with pytest.raises(InvalidImageError, match=said):
        fetcher.fetch(f"http://images.example.com/{path}", "input")
    assert time.monotonic() - began < 10


def test_a_name_that_does_not_resolve_and_a_host_that_does_not_listen_are_errors(monkeypatch: Any) -> None:
    def unknown(host: str, port: int) -> list[Address]:
        raise socket.gaierror

    with pytest.raises(InvalidImageError, match="gaierror"):
        ImageFetcher(HOSTS, 100, 1.0, unknown).fetch("http://images.example.com/", "input")
    monkeypatch.setattr(fetch, "is_public", lambda address: True)
    closed = ImageFetcher(HOSTS, 100, 1.0, lambda host, port: [Address(socket.AF_INET, ("127.0.0.1", 9))])
    with pytest.raises(InvalidImageError, match="cannot be fetched"):
        closed.fetch("https://images.example.com/", "input")
