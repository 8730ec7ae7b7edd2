"""TCP and unix sockets: bound at the start, listening once the models are loaded. Until then clients are refused."""

from __future__ import annotations

import logging
import os
import socket
import stat
from pathlib import Path

from bei.artifact.certificate.record import Certificate
from bei.artifact.manifest import Manifest
from bei.config.settings import ServeConfig
from bei.errors import ConfigError

log = logging.getLogger(__name__)

_BACKLOG = 2048

# On Linux a sockaddr_un holds 108 bytes of path, of which the last is a null byte.
_MOST_PATH_BYTES = 107


def bind_tcp(host: str, port: int) -> socket.socket:
    """A socket bound to the address, not listening yet. Raises ConfigError if the address is not available."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise ConfigError(f"Cannot listen on {host} port {port} ({error}): choose another --host or --port.") from error
    return listener


def listen_tcp(listener: socket.socket) -> None:
    """Start to listen. Raises ConfigError."""
    try:
        listener.listen(_BACKLOG)
    except OSError as error:
        host, port = listener.getsockname()[:2]
        raise ConfigError(f"Cannot listen on {host} port {port} ({error}): choose another --port.") from error


class UnixSocket:
    """A unix socket at ``path``, with the permissions ``mode`` (octal digits). Its file exists while it listens.

    Raises ConfigError if the path cannot be used. A socket that a killed server has left there is replaced.
    """

    def __init__(self, path: str, mode: str) -> None:
        self.path = Path(path).expanduser()
        self._mode = int(mode, 8)
        self._identity: tuple[int, ...] | None = None
        self._is_left_over()

    def listen(self) -> socket.socket:
        """Create the socket and listen. Raises ConfigError, also if another server has taken the path by now."""
        if self._is_left_over():
            log.warning("removing %s: no server listens there any more", self.path)
            self.path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        umask = os.umask(0o177)  # nobody else may connect before the permissions are right
        try:
            listener.bind(str(self.path))
            self.path.chmod(self._mode)
            listener.listen(_BACKLOG)
            self._identity = self._found()
        except OSError as error:
            listener.close()
            raise self._error(error.strerror or str(error)) from error
        finally:
            os.umask(umask)
        return listener

    def remove(self) -> None:
        """Delete the file, unless another server has replaced it by its own."""
        if self._identity is not None and self._found() == self._identity:
            self.path.unlink(missing_ok=True)

    def _is_left_over(self) -> bool:
        """True if no process listens on the socket at the path, False if nothing is there. Else raises ConfigError."""
        if len(os.fsencode(self.path)) > _MOST_PATH_BYTES:
            raise self._error(f"it has more than {_MOST_PATH_BYTES} bytes")
        if not self.path.parent.is_dir():
            raise self._error("there is no such folder")
        try:
            kind = self.path.lstat().st_mode
        except FileNotFoundError:
            return False
        except OSError as error:
            raise self._error(error.strerror or str(error)) from error
        if not stat.S_ISSOCK(kind):
            raise self._error("it exists and is not a socket")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(1.0)
            try:
                probe.connect(str(self.path))
            except ConnectionRefusedError:
                return True
            except OSError as error:
                raise self._error(error.strerror or str(error)) from error
        raise self._error("another server listens there")

    def _found(self) -> tuple[int, ...] | None:
        """The file's identity. Inode numbers are reused, so the time of the last change is a part of it."""
        try:
            found = self.path.lstat()
        except OSError:
            return None
        return found.st_dev, found.st_ino, found.st_ctime_ns

    def _error(self, reason: str) -> ConfigError:
        return ConfigError(f"Cannot listen on {self.path} ({reason}): choose another --uds.")


class Sockets:
    """The sockets that ``config`` asks for, bound. Raises ConfigError if an address is not available."""

    def __init__(self, config: ServeConfig) -> None:
        self._scheme = "http" if config.tls_cert is None else "https"
        self._pages = ("ui", "docs") if config.ui else ("docs",)
        self._tcp = bind_tcp(config.host, config.port) if config.listens_on_tcp else None
        self._uds = None if config.uds is None else UnixSocket(config.uds, config.uds_mode)
        self._listening: list[socket.socket] = []

    def listen(self) -> list[socket.socket]:
        """Start to listen; returns the sockets. Raises ConfigError."""
        if self._tcp is not None:
            listen_tcp(self._tcp)
            self._listening.append(self._tcp)
        if self._uds is not None:
            self._listening.append(self._uds.listen())
        return self._listening

    def log_addresses(self) -> None:
        if self._tcp is not None:
            host, port = self._tcp.getsockname()[:2]
            address = f"{self._scheme}://{f'[{host}]' if ':' in host else host}:{port}"
            log.info("listening on %s", address)
            log.info("for browsers: %s", ", ".join(f"{address}/{page}" for page in self._pages))
        if self._uds is not None:
            log.info("listening on unix:%s", self._uds.path)

    def close(self) -> None:
        """Stop listening, and delete the file of the unix socket. May be called twice."""
        for listener in (*self._listening, *(() if self._tcp is None else (self._tcp,))):
            listener.close()
        if self._uds is not None:
            self._uds.remove()


def log_served(manifest: Manifest, certificate: Certificate) -> None:
    """Log that a model answers requests from now on."""
    level = logging.INFO if certificate.passed else logging.WARNING
    how = f"{manifest.target}, {manifest.precision}"
    log.log(level, "serving %s (%s); verification: %s", manifest.name, how, certificate.verdict)
