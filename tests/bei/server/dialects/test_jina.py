"""Jina's documents: objects with parts are read where the body is, off the event loop where it is long."""

from __future__ import annotations

import json

import pytest

from bei.errors import InvalidRequestError
from bei.image.source import ImageInput, MixedInput
from bei.server.dialects.jina import DIALECT


def parsed(*documents: object) -> list[object]:
    (route,) = (route for route in DIALECT.routes if route.path.endswith("/rerank"))
    _, found = route.parse(json.dumps({"query": "q", "documents": documents}).encode())
    return [*found]


def test_documents_are_read_where_the_body_is() -> None:
    """200,000 parts in the handler kept all other requests waiting."""
    text, image = {"type": "text", "text": "a"}, {"image": "aGk="}
    documents = parsed("a", {"text": "b", "id": 7}, {"content": [text, text]}, {**image}, {"content": [text, image]})
    assert documents[:3] == ["a", "b", "a\na"]
    assert isinstance(documents[3], ImageInput)
    assert documents[3].place == 3
    assert isinstance(documents[4], MixedInput)


def test_a_text_beside_a_content_is_refused() -> None:
    """The images of the content were dropped without a word."""
    with pytest.raises(InvalidRequestError, match="documents has text beside content: send all"):
        parsed({"text": "a", "content": [{"image": "aGk="}]})
