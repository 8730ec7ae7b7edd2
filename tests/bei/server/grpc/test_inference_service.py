"""The Open Inference Protocol over gRPC: the numbers of its HTTP routes, as raw bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest

from bei import __version__
from bei.core import Float32Array
from tests.bei.server.app import App
from tests.bei.server.grpc.served import Grpc, inference
from tests.bei.server.kinds import LABELS, answer

SERVICE = "/inference.GRPCInferenceService"
TEXTS = ["cat", "the cat", "é😀"]


@pytest.fixture(scope="module")
def served(kinds: App) -> Iterator[Grpc]:
    served = Grpc(kinds, max_client_batch_size=8)
    yield served
    served.close()


def asked(model: str, texts: list[str], shape: list[int] | None = None, *, is_raw: bool = False, **fields: Any) -> Any:
    request = inference("ModelInferRequest", model_name=model, **fields)
    tensor = request.inputs.add(name="text", datatype="BYTES", shape=shape or [len(texts)])
    encoded = [text.encode() for text in texts]
    if is_raw:
        parts = [part for text in encoded for part in (len(text).to_bytes(4, "little"), text)]
        request.raw_input_contents.append(b"".join(parts))
    else:
        tensor.contents.bytes_contents.extend(encoded)
    return request


def numbers(found: Any, index: int = 0) -> Float32Array:
    array = np.frombuffer(found.raw_output_contents[index], "<f4")
    return array.reshape([*found.outputs[index].shape])


def over_http(kinds: App, model: str, texts: list[str], shape: list[int] | None = None, **fields: Any) -> Any:
    tensor = {"name": "text", "shape": shape or [len(texts)], "datatype": "BYTES", "data": texts}
    return answer(kinds, f"/oip/v2/models/{model}/infer", inputs=[tensor], **fields)["outputs"]


@pytest.mark.parametrize("is_raw", [False, True])
def test_the_numbers_are_those_of_http(served: Grpc, kinds: App, is_raw: bool) -> None:
    found, metadata = served.call(f"{SERVICE}/ModelInfer", asked("embedder", TEXTS, is_raw=is_raw, id="a1"))
    (output,) = over_http(kinds, "embedder", TEXTS)
    assert (found.model_name, found.id, found.outputs[0].name) == ("embedder", "a1", "embedding")
    np.testing.assert_array_equal(numbers(found).reshape(-1), np.array(output["data"], np.float32))
    assert "x-request-id" in metadata
    found, _ = served.call(f"{SERVICE}/ModelInfer", asked("classifier", TEXTS, is_raw=is_raw))
    scores, _ = over_http(kinds, "classifier", TEXTS)
    np.testing.assert_array_equal(numbers(found).reshape(-1), np.array(scores["data"], np.float32))
    assert found.raw_output_contents[1] == b"".join(len(one).to_bytes(4, "little") + one.encode() for one in LABELS)
    pairs, shape = ["cat", "hello", "cat", ""], [2, 2]
    found, _ = served.call(f"{SERVICE}/ModelInfer", asked("reranker", pairs, shape, is_raw=is_raw))
    (scores,) = over_http(kinds, "reranker", pairs, shape)
    np.testing.assert_array_equal(numbers(found), np.array(scores["data"], np.float32))


def test_parameters_and_outputs_are_those_of_http(served: Grpc, kinds: App) -> None:
    request = asked("embedder", TEXTS)
    request.parameters["dimensions"].int64_param = 3
    request.parameters["prompt_name"].string_param = "cats"
    request.parameters["normalize"].bool_param = True
    found, metadata = served.call(f"{SERVICE}/ModelInfer", request)
    parameters = {"dimensions": 3, "prompt_name": "cats", "normalize": True}
    (output,) = over_http(kinds, "embedder", TEXTS, parameters=parameters)
    np.testing.assert_array_equal(numbers(found).reshape(-1), np.array(output["data"], np.float32))
    assert "Matryoshka" in metadata["x-bei-warning"]
    request = asked("classifier", TEXTS)
    for name in ("labels", "scores"):
        request.outputs.add(name=name)
    found, _ = served.call(f"{SERVICE}/ModelInfer", request)
    assert [output.name for output in found.outputs] == ["labels", "scores"]


def test_the_tier_is_a_parameter(served: Grpc, kinds: App, monkeypatch: pytest.MonkeyPatch) -> None:
    lanes: list[Any] = []
    monkeypatch.setattr(kinds.metrics, "request", lambda *values: lanes.append(values[4]))
    for tier in ("flex", "priority"):
        request = asked("embedder", TEXTS)
        request.parameters["service_tier"].string_param = tier
        served.call(f"{SERVICE}/ModelInfer", request)
    assert lanes == ["bulk", "interactive"]


def wrong(**changes: Any) -> Any:
    request = asked("embedder", ["a"])
    for name, value in changes.items():
        setattr(request.inputs[0], name, value)
    return request


def with_contents(**others: list[int]) -> Any:
    request = asked("embedder", ["a"])
    for name, values in others.items():
        getattr(request.inputs[0].contents, name).extend(values)
    return request


def with_parameter(name: str, **value: Any) -> Any:
    request = asked("embedder", ["a"])
    request.parameters[name].SetInParent()
    for kind, one in value.items():
        setattr(request.parameters[name], kind, one)
    return request


@pytest.mark.parametrize(
    ("request_", "code", "message"),
    [
        (asked("nobody", ["a"]), "NOT_FOUND", "Served: embedder"),
        (asked("splade", ["a"]), "UNIMPLEMENTED", "splade can do: embed_sparse"),
        (asked("embedder", ["a"], model_version="1"), "INVALID_ARGUMENT", "have no versions here"),
        (asked("embedder", ["a", ""]), "INVALID_ARGUMENT", "inputs 1 is an empty text"),
        (asked("embedder", ["a"] * 9), "INVALID_ARGUMENT", "the limit is 8"),
        (asked("embedder", ["a"], [2]), "INVALID_ARGUMENT", "data has 1 texts, its shape says 2"),
        (asked("embedder", ["a"], [2], is_raw=True), "INVALID_ARGUMENT", "end within text 1 of 2"),
        (
            inference("ModelInferRequest", model_name="embedder"),
            "INVALID_ARGUMENT",
            "must have one tensor, text, not 0",
        ),
        (wrong(datatype="FP32"), "INVALID_ARGUMENT", "Invalid enum value 'FP32'"),
        (wrong(name="input_ids"), "INVALID_ARGUMENT", "Invalid enum value 'input_ids'"),
        (with_parameter("sequence_id", int64_param=5), "INVALID_ARGUMENT", "unknown field `sequence_id`"),
        (with_parameter("service_tier", int64_param=8), "INVALID_ARGUMENT", "service_tier must be auto, default"),
        (with_parameter("service_tier", bool_param=True), "INVALID_ARGUMENT", "service_tier must be auto, default"),
        (with_contents(int_contents=[1]), "INVALID_ARGUMENT", "contents have int_contents: send texts, in bytes_con"),
        (with_parameter("dimensions", int64_param=0), "INVALID_ARGUMENT", "Expected `int` >= 1"),
        (with_parameter("dimensions"), "INVALID_ARGUMENT", "The parameter 'dimensions' has no value"),
        (with_parameter("raw_scores", bool_param=True), "INVALID_ARGUMENT", "raw_scores means nothing to embedder"),
        (b"\xff\xff", "INVALID_ARGUMENT", "The message is not a inference.ModelInferRequest"),
    ],
)
def test_what_is_wrong_is_said(served: Grpc, request_: Any, code: str, message: str) -> None:
    error = served.error(f"{SERVICE}/ModelInfer", request_)
    assert error.code() is getattr(grpc.StatusCode, code)
    assert message in (error.details() or "")
    assert dict(error.trailing_metadata())["bei-code"]


def test_states_and_metadata(served: Grpc, kinds: App) -> None:
    assert served.call(f"{SERVICE}/ServerLive", inference("ServerLiveRequest"))[0].live
    assert served.call(f"{SERVICE}/ServerReady", inference("ServerReadyRequest"))[0].ready is False
    server, _ = served.call(f"{SERVICE}/ServerMetadata", inference("ServerMetadataRequest"))
    assert (server.name, server.version) == ("bei", __version__)
    model, _ = served.call(f"{SERVICE}/ModelMetadata", inference("ModelMetadataRequest", name="reranker"))
    expected = kinds.get("/oip/v2/models/reranker").json()
    assert (model.name, model.platform) == (expected["name"], expected["platform"])
    for side in ("inputs", "outputs"):
        found = [(one.name, one.datatype, [*one.shape]) for one in getattr(model, side)]
        assert found == [(one["name"], one["datatype"], one["shape"]) for one in expected[side]]
    for name, is_ready in (("embedder", True), ("reranker", False)):
        ready, _ = served.call(f"{SERVICE}/ModelReady", inference("ModelReadyRequest", name=name))
        assert ready.ready is is_ready
