"""Log formats: text for people, or one JSON object a line for programs. Both go to standard error."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import sys
from datetime import datetime, timezone

# The key of structured fields that replace the message in JSON: ``log.info(text, extra={FIELDS: {...}})``.
FIELDS = "bei_fields"

_TEXT = "%(asctime)s %(levelname)s %(message)s"

# The kernel writes at most this many bytes to a pipe atomically (POSIX guarantees 512); longer writes of several
# processes may interleave.
_WHOLE_BYTES = 4096


class JsonFormatter(logging.Formatter):
    """Formats a record as an object: ``time`` (UTC), ``level``, ``logger``, ``process`` if it has a name, ``message``
    or its fields, and ``exception``."""

    def __init__(self, process: str = "") -> None:
        super().__init__()
        self._process = {"process": process} if process else {}

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds")
        line = {"time": time, "level": record.levelname.lower(), "logger": record.name, **self._process}
        line |= getattr(record, FIELDS, None) or {"message": record.getMessage()}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class SharedStream(logging.Handler):
    """A handler that writes whole records to a standard error shared by several processes.

    Records beyond the kernel's atomic size are written under a lock shared by all processes of this installation.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lock_file = os.open(__file__, os.O_RDONLY | os.O_CLOEXEC)

    def emit(self, record: logging.LogRecord) -> None:
        """Write ``record``. Characters that the terminal's encoding lacks are escaped."""
        try:
            line = self.format(record) + "\n"
            data = line.encode(sys.stderr.encoding or "utf-8", "backslashreplace")
            fcntl.flock(self._lock_file, fcntl.LOCK_SH if len(data) <= _WHOLE_BYTES else fcntl.LOCK_EX)
            try:
                _write(data)
            finally:
                fcntl.flock(self._lock_file, fcntl.LOCK_UN)
        except Exception:  # as in logging's own handlers: a failed log line must not fail its caller
            self.handleError(record)


def _write(data: bytes) -> None:
    while data:
        data = data[os.write(2, data) :]


def configure(form: str, process: str = "") -> None:
    """Configure logging from INFO on (uvicorn from WARNING on: its INFO lines repeat ours).

    ``process``: the name of this process, if the server has several.
    """
    handler = SharedStream() if process else logging.StreamHandler(sys.stderr)
    text = _TEXT.replace("%(message)s", f"{process}: %(message)s") if process else _TEXT
    handler.setFormatter(JsonFormatter(process) if form == "json" else logging.Formatter(text))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    for name in ("uvicorn", "uvicorn.error"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.captureWarnings(form == "json")
