"""``/v1/files``: inputs of batches, and their answers, of each API key alone."""

from __future__ import annotations

import asyncio
import os
import re
import time
from contextlib import ExitStack, suppress
from typing import Annotated, ClassVar, Literal

import msgspec
import orjson
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.types import Receive, Scope, Send

from bei.errors import (
    BeiError,
    ConflictError,
    DiskFullError,
    EncodingNotSupportedError,
    InvalidRequestError,
    ObjectNotFoundError,
    OverloadedError,
    PayloadTooLargeError,
    QuotaExceededError,
    RecordUnreadableError,
    RouteNotFoundError,
)
from bei.server.batches import examples
from bei.server.batches.answer_files import write_all
from bei.server.batches.client_fields import LEAST_LIFETIME_S, opened, owner_of, page_of
from bei.server.batches.form_data import MULTIPART, FormData
from bei.server.batches.records import DeletedFile, FileList, FileObject, FileRecord, Purpose, file_object, new_id
from bei.server.batches.store import LIFETIME_S, BatchStore, Page
from bei.server.endpoint.field_schema import Limits
from bei.server.endpoint.get_responses import RequestBody, answers
from bei.server.http.errors import JSON
from bei.server.http.routing import ApiRouter
from bei.utils.file_lock import acquire
from bei.utils.full_disk import naming_full_disk

JSON_LINES = "application/jsonl"

_MOST_LISTED = 10_000
_PURPOSES: dict[str, Purpose] = {"batch": "batch", "batch_output": "batch_output"}

# Fields of the form that may stand in two ways: as OpenAI's client writes tables, and as JSON has them.
_SECONDS, _ANCHOR = "expires_after[seconds]", "expires_after[anchor]"
_FIELDS = {"purpose", _SECONDS, _ANCHOR}

# Of a Range header: from a byte on, up to another, or the last ones.
_RANGE = re.compile(rb"([0-9]{1,100})-([0-9]{0,100})|-[0-9]{1,100}")


# For /openapi.json alone: FormData reads the form, and _take_fields its fields.
class FileUpload(msgspec.Struct, forbid_unknown_fields=True):
    """A form: the file, `batch` as its purpose, and how long it is kept (30 days)."""

    _limits: ClassVar[Limits] = (
        {
            "description": "Of `expires_after` both fields or none.",
            "anyOf": [{"required": [_ANCHOR, _SECONDS]}, {"maxProperties": 2}],
        },
    )

    file: Annotated[str, Meta(extra_json_schema={"format": "binary"})]
    purpose: Literal["batch"]
    anchor: Literal["created_at"] | msgspec.UnsetType = msgspec.field(default=msgspec.UNSET, name=_ANCHOR)
    seconds: Annotated[int, Meta(ge=LEAST_LIFETIME_S, le=LIFETIME_S)] | msgspec.UnsetType = msgspec.field(
        default=msgspec.UNSET, name=_SECONDS
    )


def files_router(store: BatchStore | None, most_bytes: int) -> ApiRouter:
    """The routes; ``store`` None: they answer that there are none. ``most_bytes``: of one file."""
    router = ApiRouter()

    @router.post("/v1/files", summary="Upload the input of a batch")
    @answers(
        *(RouteNotFoundError, InvalidRequestError, PayloadTooLargeError, QuotaExceededError, OverloadedError),
        *(EncodingNotSupportedError, DiskFullError),
        request=RequestBody(FileUpload, MULTIPART, examples.UPLOAD),
        example=examples.FILE,
    )
    async def upload_file(request: Request) -> FileObject:
        """JSON lines, each a request with custom_id, method, url and body. Needs the setting batch_dir."""
        return await _uploaded(opened(store, request), request, most_bytes)

    @router.get("/v1/files", summary="List files")
    @answers(*(RouteNotFoundError, InvalidRequestError), bodies={200: FileList}, example=examples.listed(examples.FILE))
    async def list_files(
        request: Request,
        purpose: str | None = None,
        limit: str | None = None,
        order: str | None = None,
        after: str | None = None,
    ) -> Response:
        """Those of the request's API key, the newest first."""
        found = opened(store, request)
        if purpose is not None and purpose not in _PURPOSES:
            raise InvalidRequestError(f"purpose must be {' or '.join(_PURPOSES)}, not {purpose[:20]!r}.", "purpose")
        page = page_of(limit, after, _MOST_LISTED, _MOST_LISTED, order)
        of_purpose = None if purpose is None else _PURPOSES[purpose]
        content = await asyncio.to_thread(_listed, found, owner_of(request), page, of_purpose)
        return Response(content, media_type=JSON)

    @router.get("/v1/files/{file_id}", summary="Describe a file")
    @answers(RouteNotFoundError, ObjectNotFoundError, RecordUnreadableError, example=examples.FILE)
    async def get_file(request: Request, file_id: str) -> FileObject:
        """One of the request's API key."""
        return file_object(await asyncio.to_thread(opened(store, request).file, owner_of(request), file_id))

    @router.get("/v1/files/{file_id}/content", summary="Download a file")
    @answers(
        *(RouteNotFoundError, ObjectNotFoundError, RecordUnreadableError),
        bodies={200: str},
        example=examples.ANSWERS,
        media_type=JSON_LINES,
    )
    async def get_content(request: Request, file_id: str) -> Response:
        """As it was uploaded, or the answers of a batch."""
        found = opened(store, request)
        record = await asyncio.to_thread(found.file, owner_of(request), file_id)
        if not await asyncio.to_thread(found.content(record.id).is_file):
            raise ObjectNotFoundError(f"The content of {record.id} is gone: delete the file.")
        return _Content(found.content(record.id), media_type=JSON_LINES, filename=record.filename)

    @router.on(("DELETE",), "/v1/files/{file_id}", summary="Delete a file")
    @answers(RouteNotFoundError, ObjectNotFoundError, ConflictError, example=examples.DELETED_FILE)
    async def delete_file(request: Request, file_id: str) -> DeletedFile:
        """One that no unfinished batch reads."""
        await asyncio.to_thread(opened(store, request).delete_file, owner_of(request), file_id)
        return {"id": file_id, "object": "file", "deleted": True}

    return router


class _Content(FileResponse):
    """A file, or the ranges of it that are asked for."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Where they cannot be read it is sent whole (RFC 9110, section 14.2): the framework would refuse."""
        ranges = [value for name, value in scope["headers"] if name == b"range"]
        if ranges and not (len(ranges) == 1 and _is_readable(ranges[0])):
            scope = {**scope, "headers": [header for header in scope["headers"] if header[0] != b"range"]}
        await super().__call__(scope, receive, send)


def _is_readable(ranges: bytes) -> bool:
    unit, _, given = ranges.partition(b"=")
    found = [_RANGE.fullmatch(one.strip(b" \t")) for one in given.split(b",")]
    return unit.strip().lower() == b"bytes" and all(
        one is not None and not (one[2] and int(one[1]) > int(one[2])) for one in found
    )


def _listed(store: BatchStore, owner: str, page: Page, purpose: Purpose | None) -> bytes:
    """A FileList in JSON: ten thousand files would keep the event loop waiting."""
    records, has_more = store.files(owner, page, purpose)
    data = [file_object(record) for record in records]
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    found: FileList = {"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": has_more}
    return orjson.dumps(found)


async def _uploaded(store: BatchStore, request: Request, most_bytes: int) -> FileObject:
    """The file of a form, on the disk: the process holds a lock on it until it is complete."""
    now_s = int(time.time())
    length = request.headers.get("content-length", "")
    reserved = min(int(length), most_bytes) if length.isdecimal() and len(length) < 20 else most_bytes
    record = FileRecord(new_id("file-"), owner_of(request), "batch", "", reserved, now_s, now_s + LIFETIME_S)
    path = store.content(record.id)
    with ExitStack() as stack:
        stack.enter_context(await asyncio.to_thread(acquire, path))
        try:
            await asyncio.to_thread(store.add_file, record)
            with path.open("wb", buffering=0) as file:

                def write(content: bytes) -> None:
                    with naming_full_disk(path.parent):
                        write_all(file, content)

                form = FormData(request, _FIELDS, most_bytes, lambda content: asyncio.to_thread(write, content))
                await form.read()
                _take_fields(form, record)
                await asyncio.to_thread(os.fsync, file.fileno())
            await asyncio.to_thread(store.finish_file, record)
        except BaseException:  # raised again: an upload that is broken off leaves nothing
            with suppress(BeiError, OSError):  # what is left is cleaned some time
                await asyncio.to_thread(store.drop_file, record.id)
            raise
    return file_object(record)


def _take_fields(form: FormData, record: FileRecord) -> None:
    """Raises InvalidRequestError."""
    fields = form.fields
    if form.filename is None:
        raise InvalidRequestError("The form has no file: send one in the field file.", "file")
    if fields.get("purpose") != "batch":
        raise InvalidRequestError(
            f"purpose must be batch, not {fields.get('purpose', '')[:50]!r}: nothing here uses others.",
            "purpose",
        )
    record.filename, record.num_bytes = form.filename or "file.jsonl", form.num_bytes
    if fields.keys() & {_SECONDS, _ANCHOR}:
        seconds = fields.get(_SECONDS, "")
        if fields.get(_ANCHOR) != "created_at":
            raise InvalidRequestError("The anchor of expires_after must be created_at.", "expires_after")
        if not (seconds.isdecimal() and len(seconds) < 10 and LEAST_LIFETIME_S <= int(seconds) <= LIFETIME_S):
            message = f"The seconds of expires_after must be a number from {LEAST_LIFETIME_S} to {LIFETIME_S}."
            raise InvalidRequestError(message, "expires_after")
        record.expires_s = record.created_s + int(seconds)
