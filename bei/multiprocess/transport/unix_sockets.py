"""Unix sockets between the processes of a server, which leave nothing behind: their files are gone once they are bound.

A descriptor of the file (``O_PATH``) still leads to it, as ``/proc/self/fd/N``. So only processes that were given the
descriptor can connect, and nothing has to be removed, whoever is killed.
"""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path

from bei.errors import ConfigError

_BACKLOG = 128


class Endpoint:
    """A socket that listens, and the descriptor ``address`` that leads to it. Who connects before somebody accepts
    waits. The supervisor's; children get duplicates.

    Raises ConfigError where there is no folder for temporary files.
    """

    def __init__(self) -> None:
        try:
            with tempfile.TemporaryDirectory(prefix="bei-") as folder:  # of mode 700
                path = os.path.join(folder, "socket")
                self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                self.listener.bind(path)
                self.listener.listen(_BACKLOG)
                self.address = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(
                f"Processes of the server need a folder for temporary files (TMPDIR) to make their sockets: {error}."
            ) from error

    def close(self) -> None:
        """Give both descriptors back."""
        self.listener.close()
        os.close(self.address)


def path_of(address: int) -> Path:
    """What this process connects to in order to reach the endpoint of the descriptor ``address``."""
    return Path(f"/proc/self/fd/{address}")
