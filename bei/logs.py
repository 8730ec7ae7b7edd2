"""The form of the log: lines for people, or a JSON object a line for programs. Both to standard error."""

from __future__ import annotations

import json
import logging
import sys
from datetime import datetime, timezone

# What a record has in the place of its message, a dict of names and values: ``log.info(text, extra={FIELDS: {...}})``.
FIELDS = "bei_fields"

_TEXT = "%(asctime)s %(levelname)s %(message)s"


class JsonFormatter(logging.Formatter):
    """An object a record: ``time`` (UTC), ``level``, ``logger``, ``message`` or its fields, and ``exception``."""

    def format(self, record: logging.LogRecord) -> str:
        """ASCII, in one line whatever is in it."""
        time = datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds")
        line = {"time": time, "level": record.levelname.lower(), "logger": record.name}
        line |= getattr(record, FIELDS, None) or {"message": record.getMessage()}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure(form: str) -> None:
    """Begin to log, from INFO on. uvicorn says the same as we do at that level, so of it from WARNING on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else logging.Formatter(_TEXT))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    for name in ("uvicorn", "uvicorn.error"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.captureWarnings(form == "json")
