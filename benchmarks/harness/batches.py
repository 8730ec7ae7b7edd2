"""A batch of a server's own (``/v1/batches``), running while something else is measured."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import httpx

_ROUTE = "/v1/embeddings"
_CHANGES_S = 60.0
_POLL_S = 0.1


@contextmanager
def running_batch(port: int, requests: Sequence[str]) -> Iterator[None]:
    """A batch of ``requests``, bodies of embeddings, from its first answers on; cancelled at the end of the block.

    Raises RuntimeError where it does not run, or has ended before the block has.
    """
    lines = [f'{{"custom_id":"{n}","method":"POST","url":"{_ROUTE}","body":{body}}}' for n, body in enumerate(requests)]
    with httpx.Client(base_url=f"http://127.0.0.1:{port}/v1", timeout=_CHANGES_S) as client:

        def asked(path: str, **content: object) -> dict[str, object]:
            answer = client.post(path, **content)  # type: ignore[arg-type]
            found: dict[str, object] = answer.raise_for_status().json()
            return found

        file = asked("/files", files={"file": ("in.jsonl", "\n".join(lines))}, data={"purpose": "batch"})
        fields = {"input_file_id": file["id"], "endpoint": _ROUTE, "completion_window": "1h"}
        path = f"/batches/{asked('/batches', json=fields)['id']}"
        _wait(client, path, "in_progress")
        yield
        if client.get(path).json()["status"] != "in_progress":
            raise RuntimeError(f"the batch of {len(requests)} requests has ended too early: it needs more of them")
        asked(f"{path}/cancel")
        _wait(client, path, "cancelled")


def _wait(client: httpx.Client, path: str, status: str) -> None:
    """Until the batch has that status; where it shall be in progress, until lines have been answered too."""
    give_up_s = time.monotonic() + _CHANGES_S
    while time.monotonic() < give_up_s:
        found = client.get(path).json()
        if found["status"] == status and (status != "in_progress" or found["request_counts"]["completed"]):
            return
        time.sleep(_POLL_S)
    raise RuntimeError(f"the batch is not {status} after {_CHANGES_S:.0f} s: {json.dumps(found)}")
