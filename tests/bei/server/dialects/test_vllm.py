"""vLLM's bytes of ``/pooling``: the numbers of its JSON, and a header that says where each value is."""

from __future__ import annotations

import base64
import json
import time
from typing import Any

import httpx
import numpy as np
import pytest

from bei.engine.fake import FakeEngine
from tests.bei.server.app import App, check_error
from tests.bei.server.conftest import MakeApp
from tests.bei.server.kinds import answer, post
from tests.support.artifacts import LIMITS

TEXTS = ["cat", "the cats", "hello world"]
KINDS = {"embed": "embedder", "classify": "classifier", "token_embed": "colbert", "token_classify": "ner"}


def pooled(app: App, path: str, task: str, **fields: Any) -> httpx.Response:
    body = {"input": TEXTS, "model": KINDS[task], "task": task, **fields}
    response = post(app, path, **body)
    assert response.status_code == 200, response.text
    return response


@pytest.mark.parametrize("task", KINDS)
@pytest.mark.parametrize("mount", ["", "/vllm"])
def test_each_value_lies_where_the_header_says(kinds: App, mount: str, task: str) -> None:
    expected = pooled(kinds, f"{mount}/pooling", task).json()
    response = pooled(kinds, f"{mount}/pooling", task, encoding_format="bytes", endianness="little")
    assert response.headers["content-type"] == "application/octet-stream"
    described = json.loads(response.headers["metadata"])
    assert list(described) == ["id", "created", "model", "data", "usage"]
    assert (described["model"], described["usage"]) == (expected["model"], expected["usage"])
    for one, value in zip(described["data"], expected["data"], strict=True):
        assert (one["index"], one["embed_dtype"], one["endianness"]) == (value["index"], "float32", "little")
        numbers = np.frombuffer(response.content[one["start"] : one["end"]], "<f4").reshape(one["shape"])
        np.testing.assert_array_equal(numbers, np.array(value["data"], np.float32))
    assert described["data"][-1]["end"] == len(response.content)


@pytest.mark.parametrize("task", KINDS)
def test_bytes_only_are_not_described(kinds: App, task: str) -> None:
    described, bare = (pooled(kinds, "/pooling", task, encoding_format=form) for form in ("bytes", "bytes_only"))
    assert bare.content == described.content
    assert "metadata" not in bare.headers
    assert "x-bei-shape" not in bare.headers


def test_bytes_are_given_whatever_the_client_accepts(kinds: App) -> None:
    body = json.dumps({"input": "cat", "model": "embedder", "encoding_format": "bytes"})
    for accepted in ("*/*", "application/json", "application/octet-stream", "application/msgpack"):
        response = kinds.run(kinds.client.post("/pooling", content=body, headers={"accept": accepted}))
        assert response.headers["content-type"] == "application/octet-stream"
        assert len(response.content) == 8 * 4


def test_a_header_describes_so_many_inputs_as_clients_read(make_app: MakeApp) -> None:
    app = make_app(FakeEngine(LIMITS))
    texts = ["cat"] * 400
    response = post(app, "/pooling", input=texts, encoding_format="bytes")
    assert len(response.headers["metadata"]) < 65_536 - len("metadata: ")
    refused = post(app, "/pooling", input=[*texts, "cat"], encoding_format="bytes")
    check_error(refused, 400, "ask for bytes_only", param="encoding_format")
    many = post(app, "/pooling", input=texts * 40, encoding_format="bytes_only")
    assert len(many.content) == 16_000 * 8 * 4
    assert many.content == response.content[: 8 * 4] * 16_000


@pytest.mark.parametrize("fields", [{"endianness": "big"}, {"embed_dtype": "float16"}, {"encoding_format": "octets"}])
def test_other_bytes_are_refused(kinds: App, fields: dict[str, str]) -> None:
    check_error(post(kinds, "/pooling", input="cat", model="embedder", **fields), 400, param=next(iter(fields)))


def test_texts_that_were_cut_are_named(kinds: App) -> None:
    asked = {"input": ["cat", "cat " * 40], "model": "embedder", "encoding_format": "bytes_only"}
    assert post(kinds, "/pooling", **asked).headers["x-truncated-inputs"] == "1"
    assert answer(kinds, "/pooling", **{**asked, "encoding_format": "float"})["data"][1]["index"] == 1


@pytest.mark.parametrize("fields", [{"truncation": True}, {"truncate": True}, {"truncate_prompt_tokens": -1}])
def test_under_its_mount_texts_are_cut_where_the_request_asks_in_any_server_s_word(
    kinds: App, fields: dict[str, object]
) -> None:
    asked = {"input": "cat " * 40, "model": "embedder"}
    assert post(kinds, "/vllm/v1/embeddings", **asked).status_code == 400
    assert post(kinds, "/vllm/v1/embeddings", **asked, **fields).headers["x-truncated-inputs"] == "0"


def test_numbers_in_json_are_float32_whatever_embed_dtype_says(kinds: App) -> None:
    """It is of base64 in vLLM; numbers were rounded to float16."""
    asked = {"input": TEXTS, "model": "embedder"}
    plain = answer(kinds, "/vllm/v1/embeddings", **asked)
    for form in ({}, {"encoding_format": "float"}):
        assert answer(kinds, "/vllm/v1/embeddings", **asked, **form, embed_dtype="float16")["data"] == plain["data"]
    coded = answer(kinds, "/vllm/v1/embeddings", **asked, encoding_format="base64", embed_dtype="float16")["data"]
    halves = [np.frombuffer(base64.b64decode(one["embedding"]), "<f2") for one in coded]
    expected = [np.array(one["embedding"], np.float32).astype(np.float16) for one in plain["data"]]
    np.testing.assert_array_equal(halves, expected)


def test_embeddings_have_an_id_and_a_time_of_their_own(kinds: App) -> None:
    first, second = (answer(kinds, "/vllm/v1/embeddings", input="cat", model="embedder") for _ in range(2))
    assert first["id"] != second["id"]
    assert first["id"].startswith("embd-")
    assert abs(first["created"] - time.time()) < 60
