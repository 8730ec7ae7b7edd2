"""Images by URL, from the hosts that a setting names. Off unless it names some.

Every address that a name resolves to must be a public one, and the connection goes to an address that was checked, not
to the name again; each redirect is checked like the first URL. No proxy of the environment is used.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple
from urllib.parse import SplitResult, urljoin, urlsplit

from bei.errors import InvalidImageError

_PORTS = {"http": 80, "https": 443}
_MOST_REDIRECTS = 3
_MOST_URL_CHARS = 2048
_REDIRECTS = (301, 302, 303, 307, 308)
_CHUNK_BYTES = 1 << 16
# RFC 1123, 2.1: letters, digits and hyphens. No address in any of its spellings ends in such a label of letters.
_NAME = re.compile(r"(?:[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?\.)+[a-z][a-z0-9-]{0,61}[a-z0-9]")
# RFC 6052 and 3056: addresses that carry an IPv4 address, which a gateway would reach.
_NAT64, _6TO4 = ipaddress.ip_network("64:ff9b::/96"), ipaddress.ip_network("2002::/16")


class Address(NamedTuple):
    """What a name resolved to: the family of the socket, and its address."""

    family: int
    socket_address: tuple[object, ...]


@dataclass(frozen=True)
class ImageFetcher:
    """``hosts``: names (``images.example.com``), or all names below one (``*.example.com``). ``max_bytes`` of a file.
    ``seconds`` for all of a fetch, redirects included. Used in threads that decode images."""

    hosts: tuple[str, ...]
    max_bytes: int
    seconds: float
    resolve: Callable[[str, int], Iterable[Address]] = lambda host, port: resolved(host, port)

    def fetch(self, url: str, param: str) -> bytes:
        """The bytes behind ``url``. Raises InvalidImageError."""
        ends = time.monotonic() + self.seconds
        for _ in range(_MOST_REDIRECTS + 1):
            parts = self._checked(url, param)
            try:
                found = self._get(parts, ends, param)
            except (OSError, http.client.HTTPException, ValueError) as error:  # also TLS errors, and time-outs
                raise _refused(f"cannot be fetched ({type(error).__name__})", param) from error
            if isinstance(found, bytes):
                return found
            url = urljoin(url, found)
        raise _refused(f"has more than {_MOST_REDIRECTS} redirects", param)

    def _checked(self, url: str, param: str) -> SplitResult:
        """The parts of an URL that may be fetched. Raises InvalidImageError."""
        if len(url) > _MOST_URL_CHARS or not url.isascii() or any(char <= " " or char == "\\" for char in url):
            raise _refused("is no plain URL: send ASCII without spaces, as a browser encodes it", param)
        try:
            parts = urlsplit(url)
            host, port = (parts.hostname or "").removesuffix("."), parts.port
        except ValueError:
            raise _refused("is no URL", param) from None
        if parts.scheme not in _PORTS or port not in (None, _PORTS[parts.scheme]) or "@" in parts.netloc:
            raise _refused("must be https://name/path, without a user and of the usual port", param)
        if not _NAME.fullmatch(host) or not self._is_allowed(host):
            raise _refused("is of a host that the setting image_url_hosts does not name", param)
        return parts._replace(netloc=host)

    def _is_allowed(self, host: str) -> bool:
        return any(host == allowed or (allowed[:2] == "*." and host.endswith(allowed[1:])) for allowed in self.hosts)

    def _get(self, parts: SplitResult, ends: float, param: str) -> bytes | str:
        """The file, or where a redirect points to. Raises OSError, HTTPException, InvalidImageError."""
        host, port = parts.netloc, _PORTS[parts.scheme]
        addresses = list(self.resolve(host, port))
        if not addresses or not all(is_public(str(address.socket_address[0])) for address in addresses):
            raise _refused("is of a host with an address that is not public", param)
        connection = http.client.HTTPConnection(host, port)
        connection.sock = sock = self._connected(addresses, host, parts.scheme, ends)
        # A socket's own time limit is that of one read: headers could come byte by byte.
        alarm = threading.Timer(_left(ends), _shut, [sock])
        alarm.start()
        try:
            path = f"{parts.path or '/'}{'?' if parts.query else ''}{parts.query}"
            # Host without the port: http.client takes 80 for the usual one, and signed URLs are signed without it.
            headers = {"Host": host, "Accept": "image/*", "Accept-Encoding": "identity"}
            connection.request("GET", path, headers=headers)
            with connection.getresponse() as answer:
                if answer.status in _REDIRECTS:
                    return answer.headers.get("Location") or ""
                if answer.status != http.client.OK:
                    raise _refused(f"answers {answer.status}", param)
                return self._read(answer, ends, param)
        finally:
            alarm.cancel()
            connection.close()

    def _connected(self, addresses: list[Address], host: str, scheme: str, ends: float) -> socket.socket:
        """A connection to the first address that takes one. Raises OSError."""
        failure: OSError = TimeoutError()
        for address in addresses:
            plain = socket.socket(address.family, socket.SOCK_STREAM)
            try:
                plain.settimeout(_left(ends))
                plain.connect(address.socket_address)
                return plain if scheme == "http" else self._tls.wrap_socket(plain, server_hostname=host)
            except OSError as error:
                plain.close()
                failure = error
        raise failure

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        return ssl.create_default_context()

    def _read(self, answer: http.client.HTTPResponse, ends: float, param: str) -> bytes:
        """The body. Raises OSError, InvalidImageError for more than ``max_bytes``."""
        if answer.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise _refused("answers a compressed file, which was not asked for", param)
        found = bytearray()
        while part := answer.read1(_CHUNK_BYTES):
            found += part
            if len(found) > self.max_bytes:
                raise _refused(f"has more than {self.max_bytes:,} bytes", param)
        _left(ends)  # at the end of the time the connection was shut, which looks like its end
        if answer.length:  # of Content-Length, not read
            raise ConnectionError
        return bytes(found)


def resolved(host: str, port: int) -> list[Address]:
    """All addresses of ``host``. Raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [Address(family, address) for family, _, _, _, address in found]


def is_public(address: str) -> bool:
    """True for an address of the public internet, also inside of the IPv6 forms that carry an IPv4 address."""
    try:
        found: ipaddress.IPv4Address | ipaddress.IPv6Address = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(found, ipaddress.IPv6Address):
        if found in _NAT64:
            found = ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)
        elif found in _6TO4:
            found = ipaddress.IPv4Address(int(found) >> 80 & 0xFFFFFFFF)
        else:
            found = found.ipv4_mapped or found
    return found.is_global and not (found.is_multicast or found.is_reserved or found.is_unspecified)


def _shut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it is closed
        sock.shutdown(socket.SHUT_RDWR)


def _left(ends: float) -> float:
    """Seconds until ``ends``. Raises TimeoutError."""
    left = ends - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _refused(what: str, param: str) -> InvalidImageError:
    return InvalidImageError(f"The URL of an image {what}.", param)
