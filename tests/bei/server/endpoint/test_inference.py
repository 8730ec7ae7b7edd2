"""What routes of vectors share."""

from __future__ import annotations

import pytest

from bei.server.endpoint import inference
from tests.bei.server.app import App, check_error

LONG = "0123456789"


@pytest.mark.parametrize("path", ["/v1/embeddings", "/embed"])
def test_a_prompt_is_not_copied_in_front_of_more_inputs_than_there_is_room_for(
    path: str, app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inference, "_MOST_PROMPT_CHARS", 10 * len(LONG))
    field = "input" if path.startswith("/v1") else "inputs"
    body = {field: ["a"] * 10, "prompt": LONG}
    assert app.run(app.client.post(path, json=body)).status_code == 200
    response = app.run(app.client.post(path, json={**body, field: ["a"] * 11}))
    check_error(response, 400, "A prompt of 10 characters in front of 11 inputs", param="prompt")
