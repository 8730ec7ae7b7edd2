"""Keys of an ASGI scope under which parts of the server leave what others need of a request."""

from __future__ import annotations

from typing import Final

SCOPE_API_KEY: Final = "bei.key"  # auth.keys.Key; absent where the server asks for none
SCOPE_ENDPOINT: Final = "bei.endpoint"  # endpoint.route.Endpoint; absent where the framework answers
SCOPE_BODY: Final = "bei.body"  # http.body_memory.Body
SCOPE_REQUEST_ID: Final = "bei.request_id"  # str
SCOPE_RECORD: Final = "bei.record"  # telemetry.request_record.RequestRecord
