"""Files and batches of an application in this process, as clients of several keys ask for them."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from tests.bei.server.app import App
from tests.support.engines import DEADLINE_S

ENDED = ("completed", "failed", "expired", "cancelled")
KEYS = {"one": "0123456789abcdef", "other": "fedcba9876543210"}


def line(custom_id: str, text: str = "hello", url: str = "/v1/embeddings") -> bytes:
    body = {"input": text}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body}).encode() + b"\n"


def lines(number: int) -> bytes:
    """Texts of their own, every tenth empty, which is an error."""
    return b"".join(line(f"c{n}", f"hello {n}" if n % 10 else "") for n in range(number))


def execute(folder: Path, query: str, *values: object) -> None:
    """Behind the server's back."""
    connection = sqlite3.connect(folder / "batches.sqlite3")
    connection.execute(query, values)
    connection.commit()
    connection.close()


class Clients:
    """Asks ``app``, as the client of a key where it is named."""

    def __init__(self, app: App) -> None:
        self.app = app

    def ask(self, method: str, path: str, key: str | None = None, **given: Any) -> httpx.Response:
        """Any request."""
        headers = {"authorization": f"Bearer {KEYS[key]}"} if key else {}
        headers |= given.pop("headers", {})
        found: httpx.Response = self.app.run(self.app.client.request(method, path, headers=headers, **given))
        return found

    def upload(self, content: bytes, key: str | None = None, fields: Mapping[str, str] | None = None) -> httpx.Response:
        """A file."""
        data = {"purpose": "batch"} if fields is None else {**fields}
        return self.ask("POST", "/v1/files", key, files={"file": ("in.jsonl", content)}, data=data)

    def create(self, content: bytes, key: str | None = None, **fields: object) -> httpx.Response:
        """A batch of a new file."""
        asked = {
            "input_file_id": self.upload(content, key).json()["id"],
            "endpoint": "/v1/embeddings",
            "completion_window": "24h",
        }
        return self.ask("POST", "/v1/batches", key, json={**asked, **fields})

    def batch(self, batch_id: str, key: str | None = None) -> dict[str, Any]:
        """As it is now."""
        found: dict[str, Any] = self.ask("GET", f"/v1/batches/{batch_id}", key).json()
        return found

    def ended(self, batch_id: str, key: str | None = None, until: tuple[str, ...] = ENDED) -> dict[str, Any]:
        """As it is in the end, or in one of other states."""

        async def wait() -> dict[str, Any]:
            headers = {"authorization": f"Bearer {KEYS[key]}"} if key else {}
            while True:
                found = (await self.app.client.get(f"/v1/batches/{batch_id}", headers=headers)).json()
                if found["status"] in until:
                    return dict(found)
                await asyncio.sleep(0.005)

        result: dict[str, Any] = self.app.run(asyncio.wait_for(wait(), DEADLINE_S))
        return result

    def content(self, file_id: str | None, key: str | None = None) -> list[dict[str, Any]]:
        """The lines of a file; none of none."""
        if file_id is None:
            return []
        return [json.loads(one) for one in self.ask("GET", f"/v1/files/{file_id}/content", key).text.splitlines()]

    def ids(self, batch: Mapping[str, Any], key: str | None = None) -> list[str]:
        """The ids of all lines of both files."""
        both = self.content(batch["output_file_id"], key) + self.content(batch["error_file_id"], key)
        return [one["custom_id"] for one in both]
