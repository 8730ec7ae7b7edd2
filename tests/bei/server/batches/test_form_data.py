"""A form that arrives in pieces of any size is read as the whole one, and its file never exceeds its limit."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message

from bei.errors import InvalidRequestError, PayloadTooLargeError
from bei.server.batches.form_data import FormData

HEAD = b'--e\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--e\r\nContent-Disposition: form-data; '
HEAD += b'name="file"; filename="in.jsonl"\r\nContent-Type: application/jsonl\r\n\r\n'
END = b"\r\n--e--\r\n"


def read(pieces: Sequence[bytes], most: int = 1_000, *, is_whole: bool = True) -> tuple[FormData, list[bytes]]:
    """What is read of a body that comes in ``pieces``, the last of which says that it is the last one."""
    left = [*pieces]

    async def receive() -> Message:
        if not left:
            return {"type": "http.disconnect"}
        piece = left.pop(0)
        return {"type": "http.request", "body": piece, "more_body": bool(left) or not is_whole}

    written: list[bytes] = []

    async def write(content: bytes) -> None:
        written.append(content)

    scope = {"type": "http", "headers": [(b"content-type", b"multipart/form-data; boundary=e")]}
    form = FormData(Request(scope, receive), {"purpose", "expires_after[anchor]"}, most, write)
    asyncio.run(form.read())
    return form, written


@given(st.binary(max_size=200), st.lists(st.integers(0, 450), max_size=6))
def test_pieces_of_any_size_are_the_whole_form(content: bytes, cuts: list[int]) -> None:
    body = HEAD + content + END
    if b"--e" in content:
        return  # no client chooses such a boundary
    places = [0, *sorted(min(cut, len(body)) for cut in cuts), len(body)]
    form, written = read([body[start:end] for start, end in itertools.pairwise(places)])
    assert (b"".join(written), form.num_bytes, form.filename) == (content, len(content), "in.jsonl")
    assert form.fields == {"purpose": "batch"}


@pytest.mark.parametrize("size", [1_001, 50_000, 300_000])
def test_a_file_is_refused_before_a_byte_too_many_is_written(size: int) -> None:
    with pytest.raises(PayloadTooLargeError, match="batch_file_limit"):
        read([HEAD + b"x" * size + END])
    assert read([HEAD + b"x" * 1_000 + END])[0].num_bytes == 1_000


def test_a_client_that_leaves_is_no_end_of_the_form() -> None:
    with pytest.raises(ClientDisconnect):
        read([HEAD + b"xxx"], is_whole=False)
    with pytest.raises(InvalidRequestError, match="too early"):
        read([HEAD + b"xxx"])


def part(disposition: str, content: str = "") -> bytes:
    return f"--e\r\nContent-Disposition: form-data; {disposition}\r\n\r\n{content}\r\n".encode()


@pytest.mark.parametrize("disposition", ['name="other"', 'name=""', 'filename="x"'])
def test_an_unknown_field_is_refused_as_it_begins_and_nothing_behind_it_is_read(disposition: str) -> None:
    with pytest.raises(InvalidRequestError, match="unknown field"):  # and not that the client leaves
        read([part(disposition)], is_whole=False)


def test_empty_fields_are_not_kept_however_many_come() -> None:
    """A file's limit of them stopped the event loop for minutes, and their memory counted in no budget."""
    with pytest.raises(InvalidRequestError, match="the field purpose twice"):
        read([part('name="purpose"') * 2], is_whole=False)


@pytest.mark.parametrize(
    "parts",
    [
        [part('name="purpose"', "x" * 6_000), part('name="expires_after[anchor]"', "x" * 4_000)],
        [part(f'name="purpose"; x="{"x" * 4_000}"'), part(f'name="file"; x="{"x" * 4_000}"'), part("x" * 4_000)],
    ],
    ids=["values", "headers"],
)
def test_values_of_fields_and_headers_of_all_parts_are_bounded_together(parts: list[bytes]) -> None:
    with pytest.raises(InvalidRequestError, match="fields beside the file are too long"):
        read([b"".join(parts)], is_whole=False)
