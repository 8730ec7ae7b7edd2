"""Base64 is read in pieces, as the whole is."""

from __future__ import annotations

import base64
import os
from pathlib import Path
from unittest import mock

import PIL.Image
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from bei.errors import InvalidImageError
from bei.image import source
from bei.image.source import ImageInput, MadeOnce

HEAD = "data:image/png;base64,"


def by_the_library(value: str) -> bytes | None:
    try:
        return base64.b64decode(value, validate=True)
    except ValueError:
        return None


@given(
    st.text("AQ=+/", max_size=30)
    | st.text("AQ=+/-\n \xe9", max_size=30)
    | st.binary().map(base64.b64encode).map(bytes.decode)
)
@example("QQ==QUJD" * 2)
@example("QUI=QUJDQUJD")
@pytest.mark.parametrize("head", ["", HEAD])
def test_pieces_give_what_the_whole_gives(head: str, value: str) -> None:
    assume(head or not value.startswith("//"))  # of URLs, and of no image
    with mock.patch.object(source, "_PIECE_CHARS", 8):
        expected = by_the_library(value)
        if expected is None:
            with pytest.raises(InvalidImageError, match="is not base64"):
                ImageInput(head + value).file_bytes()
        else:
            assert ImageInput(head + value).file_bytes() == expected


def test_a_large_file_is_read_whole() -> None:
    content = bytes(range(256)) * 4_000
    for head in ("", HEAD):
        assert ImageInput(head + base64.b64encode(content).decode()).file_bytes() == content


def test_inputs_are_equal_by_their_content_and_opened_images_to_themselves() -> None:
    opened, alike = PIL.Image.new("RGB", (2, 2)), PIL.Image.new("RGB", (2, 2))
    given = [ImageInput(b"a"), ImageInput(b"a"), ImageInput("a"), ImageInput(b"a", "query"), ImageInput(Path("a"))]
    given += [ImageInput(opened), ImageInput(opened), ImageInput(alike)]
    assert [*dict.fromkeys(given)] == [given[place] for place in (0, 2, 3, 4, 5, 7)]
    assert ImageInput(b"a") != b"a"


def test_an_image_that_several_inputs_have_is_made_once_also_where_it_cannot_be_read() -> None:
    """A host that does not answer was asked again for each document, by each thread that waited for the first."""
    calls = []

    def make() -> int:
        calls.append(1)
        raise InvalidImageError("An image is broken.", "query")

    once = MadeOnce[int]()
    errors = []
    for _ in range(3):
        with pytest.raises(InvalidImageError, match="is broken") as caught:
            once.of(make)
        errors.append(caught.value)
    assert len(calls) == 1
    assert {error.param for error in errors} == {"query"}
    assert len({*map(id, errors)}) == 3
    made = MadeOnce[list[int]]()
    assert made.of(lambda: [1]) is made.of(lambda: [2])


def test_a_pipe_is_no_image(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.png")
    with pytest.raises(InvalidImageError, match="it is no file"):
        _ = ImageInput(tmp_path / "a.png").num_bytes
