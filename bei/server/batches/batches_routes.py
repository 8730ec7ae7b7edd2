"""``/v1/batches``: files of requests that the server answers when it has time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Annotated

import msgspec
from msgspec import Meta
from starlette.requests import Request

from bei.config.settings import ServeConfig
from bei.errors import (
    ConfigError,
    ConflictError,
    DiskFullError,
    InvalidRequestError,
    MalformedRequestError,
    ObjectNotFoundError,
    PayloadTooLargeError,
    QuotaExceededError,
    RecordUnreadableError,
    RouteNotFoundError,
)
from bei.server.batches import examples
from bei.server.batches.client_fields import ExpiresAfter, opened, owner_of, page_of
from bei.server.batches.records import BatchList, BatchObject, BatchRecord, batch_object, new_id
from bei.server.batches.store import LIFETIME_S, BatchStore
from bei.server.endpoint.get_responses import RequestBody, answers
from bei.server.endpoint.parse import BYTE_ORDER_MARK, parser, read
from bei.server.http.responses import read_body
from bei.server.http.routing import ApiRouter
from bei.utils.units import parsed_duration

_MOST_LISTED, _LISTED = 100, 20
# Completion windows: from a second, for whoever has little, to as long as files are kept.
_LEAST_WINDOW_S = 1


class CreateBatch(msgspec.Struct):
    """``completion_window``: as 24h, up to 30d. ``metadata``: up to 16 texts of the client's own."""

    input_file_id: Annotated[str, Meta(max_length=100)]
    endpoint: Annotated[str, Meta(max_length=2_000)]
    completion_window: Annotated[str, Meta(max_length=20)]
    metadata: (
        Annotated[dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)]
        | None
    ) = None
    output_expires_after: ExpiresAfter | None = None


def batches_router(store: BatchStore | None, config: ServeConfig, asks_model: Callable[[str], bool]) -> ApiRouter:
    """The routes; ``store`` None: they answer that there are none. ``asks_model``: True for a URL without the server's
    part whose route answers the lines of a batch."""
    router = ApiRouter()

    @router.post("/v1/batches", summary="Answer a file of requests")
    @answers(
        *(RouteNotFoundError, MalformedRequestError, InvalidRequestError, ObjectNotFoundError, QuotaExceededError),
        *(PayloadTooLargeError, DiskFullError),
        request=RequestBody(CreateBatch, example=examples.CREATE_BATCH),
        example=examples.NEW_BATCH,
    )
    async def create_batch(request: Request) -> BatchObject:
        """Bulk work: single queries go first. Lines are validated, then answered, each once, by `endpoint`, which is
        any route that asks a model. Needs the setting batch_dir."""
        found = opened(store, request)
        content = await read_body(request, config.payload_limit)
        asked: CreateBatch = (await read(_parse, content.removeprefix(BYTE_ORDER_MARK))).request
        if not asks_model(asked.endpoint):
            message = f"endpoint {asked.endpoint[:100]!r} is no route that asks a model: see /openapi.json."
            raise InvalidRequestError(message, "endpoint")
        record = _record(asked, owner_of(request))
        await asyncio.to_thread(found.add_batch, record)
        return batch_object(record)

    @router.get("/v1/batches", summary="List batches")
    @answers(RouteNotFoundError, InvalidRequestError, example=examples.listed(examples.BATCH))
    async def list_batches(request: Request, limit: str | None = None, after: str | None = None) -> BatchList:
        """Those of the request's API key, the newest first."""
        found, page = opened(store, request), page_of(limit, after, _MOST_LISTED, _LISTED)
        records, has_more = await asyncio.to_thread(found.batches, owner_of(request), page)
        data = [batch_object(record) for record in records]
        first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
        return {"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": has_more}

    @router.get("/v1/batches/{batch_id}", summary="Describe a batch")
    @answers(RouteNotFoundError, ObjectNotFoundError, RecordUnreadableError, example=examples.BATCH)
    async def get_batch(request: Request, batch_id: str) -> BatchObject:
        """One of the request's API key. `output_file_id` and `error_file_id` are there once it has ended."""
        return batch_object(await asyncio.to_thread(opened(store, request).batch, owner_of(request), batch_id))

    @router.post("/v1/batches/{batch_id}/cancel", summary="Cancel a batch")
    @answers(
        *(RouteNotFoundError, ObjectNotFoundError, ConflictError, RecordUnreadableError),
        example=examples.CANCELLED_BATCH,
    )
    async def cancel_batch(request: Request, batch_id: str) -> BatchObject:
        """Lines under way end; the others get the error `batch_cancelled`."""
        found = opened(store, request)
        return batch_object(await asyncio.to_thread(found.change, owner_of(request), batch_id, _cancel))

    return router


def _record(asked: CreateBatch, owner: str) -> BatchRecord:
    now_s = int(time.time())
    return BatchRecord(
        new_id("batch_"),
        owner,
        asked.endpoint,
        asked.input_file_id,
        asked.completion_window,
        now_s + _window_s(asked.completion_window),
        LIFETIME_S if asked.output_expires_after is None else asked.output_expires_after.seconds,
        asked.metadata,
        "validating",
        {"validating": now_s},
        new_id("file-"),
        new_id("file-"),
    )


def _window_s(text: str) -> int:
    """Raises InvalidRequestError."""
    try:
        seconds = parsed_duration("completion_window", text)
    except ConfigError as error:
        raise InvalidRequestError(str(error), "completion_window") from None
    if not _LEAST_WINDOW_S <= seconds <= LIFETIME_S:
        raise InvalidRequestError("completion_window must be from 1s to 30d.", "completion_window")
    return int(seconds)


def _cancel(batch: BatchRecord) -> None:
    """Once more changes nothing. Raises ConflictError for one that has ended."""
    if batch.status != "cancelling":
        batch.move("cancelling", int(time.time()))


_parse = parser(CreateBatch)
