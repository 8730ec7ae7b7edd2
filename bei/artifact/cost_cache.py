"""Stores measurements between starts: a JSON file each in ``<cache_dir>/costs/``, named by the conditions they hold
for.

An unreadable file counts as missing; without a writable folder, costs are measured again at each start. The log reports
both; neither stops a server.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from bei.utils.untrusted_files import read_bounded

log = logging.getLogger(__name__)

FOLDER = "costs"


class CostCache:
    """Measurements below ``cache_dir``."""

    def __init__(self, cache_dir: Path) -> None:
        self._is_nowhere = False
        try:
            self._folder = cache_dir.expanduser() / FOLDER
        except RuntimeError:  # no home directory: store nothing, and do not create a folder called "~"
            self._folder, self._is_nowhere = cache_dir / FOLDER, True

    def path(self, name: str, key: Mapping[str, Any]) -> Path:
        """The file of the measurement ``name`` for ``key`` (plain data)."""
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
        return self._folder / f"{re.sub(r'[^A-Za-z0-9._-]+', '-', name)}-{digest[:24]}.json"

    def read(self, name: str, key: Mapping[str, Any]) -> Any:
        """The data written for ``key``; None: missing or unreadable."""
        path = self.path(name, key)
        if self._is_nowhere:
            return None
        try:
            content = json.loads(read_bounded(path))
            if content["key"] != key:
                raise ValueError("it was measured with another engine")
            data = content["data"]
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            log.warning("%s cannot be used (%s) and is ignored", path, error)
            return None
        with suppress(OSError):  # bei cache prune removes the least recently used first
            os.utime(path)
        return data

    def write(self, name: str, key: Mapping[str, Any], data: Any) -> Path | None:
        """Store ``data`` (plain data) for ``key`` atomically; None, and a warning, on failure."""
        path = self.path(name, key)
        if self._is_nowhere:
            log.warning("cannot keep measured costs in %s, as no HOME is set: see --cache-dir", self._folder)
            return None
        temporary: str | None = None
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self._folder, suffix=".partial", delete=False) as file:
                temporary = file.name
                json.dump({"key": key, "data": data}, file, indent=1)
            os.replace(temporary, path)
        except OSError as error:
            log.warning("cannot keep measured costs in %s (%s): the next start measures again", self._folder, error)
            if temporary is not None:
                Path(temporary).unlink(missing_ok=True)
            return None
        return path
