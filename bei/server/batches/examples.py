"""Examples of files and batches for /openapi.json: one batch, with its file and its answers."""

from __future__ import annotations

import json
from typing import Any, Final

from bei.server.endpoint.examples import CREATED, HEX, TEXTS, UUID
from bei.server.routes.openai_embeddings import ANSWER_EXAMPLE

_ENDPOINT: Final = "/v1/embeddings"
_INPUT_ID: Final = f"file-{HEX}"
_OUTPUT_ID: Final = f"file-{HEX[::-1]}"
_BATCH_ID: Final = f"batch_{HEX}"
_MONTH_S, _DAY_S = 30 * 86_400, 86_400

_LINE: Final = json.dumps({"custom_id": "1", "method": "POST", "url": _ENDPOINT, "body": {"input": TEXTS}}) + "\n"
UPLOAD: Final = {"file": _LINE, "purpose": "batch"}
FILE: Final[dict[str, Any]] = {
    "id": _INPUT_ID,
    "object": "file",
    "bytes": len(_LINE),
    "created_at": CREATED,
    "expires_at": CREATED + _MONTH_S,
    "filename": "in.jsonl",
    "purpose": "batch",
    "status": "processed",
}
DELETED_FILE: Final = {"id": _INPUT_ID, "object": "file", "deleted": True}

_RESPONSE: Final = {"status_code": 200, "request_id": UUID, "body": ANSWER_EXAMPLE}
ANSWERS: Final = json.dumps({"id": f"batch_req_{HEX}", "custom_id": "1", "response": _RESPONSE, "error": None}) + "\n"

CREATE_BATCH: Final = {"input_file_id": _INPUT_ID, "endpoint": _ENDPOINT, "completion_window": "24h"}
NEW_BATCH: Final[dict[str, Any]] = {
    "id": _BATCH_ID,
    "object": "batch",
    "endpoint": _ENDPOINT,
    "errors": None,
    "input_file_id": _INPUT_ID,
    "completion_window": "24h",
    "status": "validating",
    "output_file_id": None,
    "error_file_id": None,
    "created_at": CREATED,
    "in_progress_at": None,
    "expires_at": CREATED + _DAY_S,
    "finalizing_at": None,
    "completed_at": None,
    "failed_at": None,
    "expired_at": None,
    "cancelling_at": None,
    "cancelled_at": None,
    "request_counts": {"total": 0, "completed": 0, "failed": 0},
    "metadata": None,
}
BATCH: Final = {
    **NEW_BATCH,
    "status": "completed",
    "output_file_id": _OUTPUT_ID,
    "in_progress_at": CREATED + 1,
    "finalizing_at": CREATED + 2,
    "completed_at": CREATED + 2,
    "request_counts": {"total": 1, "completed": 1, "failed": 0},
}
CANCELLED_BATCH: Final = {**NEW_BATCH, "status": "cancelling", "cancelling_at": CREATED + 1}


def listed(entry: dict[str, Any]) -> dict[str, Any]:
    """A page that has ``entry`` alone."""
    return {"object": "list", "data": [entry], "first_id": entry["id"], "last_id": entry["id"], "has_more": False}
