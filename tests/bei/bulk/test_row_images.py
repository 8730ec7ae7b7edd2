"""Images of rows, in every form of files, are what ``bei.Model`` reads."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest

from bei.bulk.row_images import row_input
from bei.bulk.sources.rows import Columns, WithImage
from bei.errors import BeiError

A, B = b"a file", b"another"
URL = "data:image/png;base64," + base64.b64encode(A).decode()


@pytest.mark.parametrize(
    ("value", "read"),
    [
        ("a text", "a text"),
        ([1, 2], [1, 2]),
        (["a", "b"], ["a", "b"]),
        (URL, URL),  # a text: no column is said to hold images
        (A, A),
        ({"bytes": A, "path": None}, A),
        ({"bytes": None, "path": "/pages/1.png"}, Path("/pages/1.png")),
        ([A], A),
        ([A, {"bytes": B}], {"content": [A, B]}),
        ({"text": "a", "image": A}, {"content": [A, "a"]}),
        ({"text": "", "image": A}, {"content": [A, ""]}),
        ({"text": "a", "image": None}, "a"),
        ({"text": "a", "image": []}, "a"),
        ({"text": None, "image": A}, A),
        ({"text": None, "image": None}, None),
        ({"text": "a", "image": [A, B]}, {"content": [A, B, "a"]}),
        (WithImage("a", URL), {"content": [A, "a"]}),
        (WithImage("a", [URL, "/pages/1.png", B]), {"content": [A, Path("/pages/1.png"), B, "a"]}),
        (WithImage(None, [URL, URL]), {"content": [A, A]}),
        (WithImage("a", None), "a"),
        (WithImage("a", ""), "a"),  # of CSV
        (WithImage(None, []), None),
    ],
)
def test_a_row_is_read_with_its_images_before_its_text(value: object, read: Any) -> None:
    assert row_input(value, 0) == read


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ([A, "a text"], "^image 1 of inputs 7 has str in the place of an image"),
        ([A, None], "^image 1 of inputs 7 has null in the place of an image"),
        ({"text": "a", "image": URL}, "has str in the place of an image"),
        ({"text": [1, 2], "image": None}, "has list beside its image"),
        (WithImage(None, [1, 2]), "has int in the place of an image"),
        (WithImage("a", {"bytes": None, "path": None}), "has null in the place of an image"),
        (WithImage("a", {"url": "/a.png"}), "has dict in the place of an image"),
        (WithImage("a", "pages/1.png"), "'pages/1.png' in the place of an image: give a data URL"),
        (WithImage("a", {"bytes": None, "path": "1.png"}), "file's whole path"),
        (WithImage("a", "/a\0b"), "file's whole path"),
        (WithImage("a", "/9j/" + "A" * 5000), "^inputs 7 has '/9j/A{56}' in the place of an image"),  # a JPEG's base64
        (WithImage("a", ["", URL]), "^image 0 of inputs 7 has '' in the place of an image"),
        (WithImage("a", "data:text/plain;base64,AAAA"), "which is no image"),
        (WithImage("a", "data:image/png;base64,A"), "is not base64"),
    ],
)
def test_what_is_no_image_is_an_error_of_its_row(value: object, named: str) -> None:
    with pytest.raises(BeiError, match=named):
        row_input(value, 7)


def test_one_column_of_both_names_holds_images_alone() -> None:
    alone, both = Columns("page", image="page"), Columns("caption", image="page")
    assert (alone.read, alone.inputs([[A]])) == (("page",), [WithImage(None, A)])
    twice = Columns("a", query="a")  # a query that is its document
    assert (twice.read, twice.inputs([["b"], ["b"]])) == (("a", "a"), [("b", "b")])
    assert (both.read, both.inputs([["a"], [A]])) == (("caption", "page"), [WithImage("a", A)])
