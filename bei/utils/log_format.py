"""The form of the log: lines for people, or a JSON object a line for programs. Both to standard error."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import sys
from datetime import datetime, timezone

# What a record has in the place of its message, a dict of names and values: ``log.info(text, extra={FIELDS: {...}})``.
FIELDS = "bei_fields"

_TEXT = "%(asctime)s %(levelname)s %(message)s"

# Of one write to a pipe the kernel makes one piece up to this size (POSIX's least is 512): of longer ones lines of
# other processes may come in between.
_WHOLE_BYTES = 4096


class JsonFormatter(logging.Formatter):
    """An object a record: ``time`` (UTC), ``level``, ``logger``, ``process`` if it has a name, ``message`` or its
    fields, and ``exception``."""

    def __init__(self, process: str = "") -> None:
        super().__init__()
        self._process = {"process": process} if process else {}

    def format(self, record: logging.LogRecord) -> str:
        """ASCII, in one line whatever is in it."""
        time = datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds")
        line = {"time": time, "level": record.levelname.lower(), "logger": record.name, **self._process}
        line |= getattr(record, FIELDS, None) or {"message": record.getMessage()}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class SharedStream(logging.Handler):
    """Writes to standard error, which several processes have: each record whole.

    What the kernel would not keep whole is written while no other process writes, by a lock that all processes of this
    installation have.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lock_file = os.open(__file__, os.O_RDONLY | os.O_CLOEXEC)

    def emit(self, record: logging.LogRecord) -> None:
        """Write ``record``. What the terminal's encoding lacks is written as an escape."""
        try:
            line = self.format(record) + "\n"
            data = line.encode(sys.stderr.encoding or "utf-8", "backslashreplace")
            fcntl.flock(self._lock_file, fcntl.LOCK_SH if len(data) <= _WHOLE_BYTES else fcntl.LOCK_EX)
            try:
                _write(data)
            finally:
                fcntl.flock(self._lock_file, fcntl.LOCK_UN)
        except Exception:  # as logging's own handlers: a line that cannot be written must not fail who wrote it
            self.handleError(record)


def _write(data: bytes) -> None:
    while data:
        data = data[os.write(2, data) :]


def configure(form: str, process: str = "") -> None:
    """Begin to log, from INFO on. uvicorn says the same as we do at that level, so of it from WARNING on.

    ``process``: the name of this one, where a server has several.
    """
    handler = SharedStream() if process else logging.StreamHandler(sys.stderr)
    text = _TEXT.replace("%(message)s", f"{process}: %(message)s") if process else _TEXT
    handler.setFormatter(JsonFormatter(process) if form == "json" else logging.Formatter(text))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    for name in ("uvicorn", "uvicorn.error"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.captureWarnings(form == "json")
