"""gRPC's clients: Triton's, and stubs with TEI's names, made of what reflection says; health, several front ends."""

from __future__ import annotations

import re
import signal
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import pytest
import tritonclient.grpc as triton
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from tritonclient.utils import InferenceServerException

from bei.server.grpc.messages import FILES, pool
from tests.clients.conftest import TOO_LONG, Expected, post
from tests.e2e.kinds import LABELS, MODELS, QUERY, TEXTS, TOLERANCE
from tests.e2e.process import DEADLINE_S, Server, serve, wait_until
from tests.support.builds import build_artifact
from tests.support.zoo import save_case

row = pytest.mark.client_call

FOLDER = Path(__file__).parents[2] / "bei" / "server" / "grpc"


def address_of(server: Server) -> str:
    """The port of gRPC, which the log names."""
    (found,) = {match[1] for line in server.log if (match := re.search(r"listening on grpc://(\S+)", line))}
    return found


@pytest.fixture
def address(server: Server) -> str:
    return address_of(server)


@pytest.fixture
def client(address: str) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(address) as client:
        yield client


def inputs_of(texts: list[Any]) -> list[Any]:
    tensor = np.array(texts, object)
    given = triton.InferInput("text", list(tensor.shape), "BYTES")
    given.set_data_from_numpy(tensor)
    return [given]


@row(
    "tritonclient", "Open Inference Protocol", "gRPC", "is_server_live, is_server_ready, is_model_ready, get_*_metadata"
)
def test_triton_sees_the_models(client: triton.InferenceServerClient) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("embedder")
    assert client.get_server_metadata().name == "bei"
    (output,) = client.get_model_metadata("embedder").outputs
    assert (output.name, output.datatype) == ("embedding", "FP32")


@row(
    "tritonclient",
    "Open Inference Protocol",
    "gRPC",
    "infer: an embedder, a classifier, a reranker; errors: no such model",
)
def test_triton_infers(client: triton.InferenceServerClient, expected: Expected) -> None:
    expected.check_vectors(client.infer("embedder", inputs_of(TEXTS)).as_numpy("embedding"))
    short = client.infer("embedder", inputs_of(TEXTS), parameters={"dimensions": 8}, request_id="a")
    expected.check_vectors(short.as_numpy("embedding"), "short")
    assert short.get_response().id == "a"
    found = client.infer("classifier", inputs_of(TEXTS), outputs=[triton.InferRequestedOutput("scores")])
    np.testing.assert_allclose(found.as_numpy("scores"), expected.labels, atol=TOLERANCE)
    pairs = inputs_of([[QUERY, text] for text in TEXTS])
    np.testing.assert_allclose(client.infer("reranker", pairs).as_numpy("scores"), expected.scores, atol=TOLERANCE)
    with pytest.raises(InferenceServerException, match="Model 'other' is not served here") as caught:
        client.infer("other", inputs_of(TEXTS))
    assert caught.value.status() == "StatusCode.NOT_FOUND"
    with pytest.raises(InferenceServerException, match="48"):
        client.infer("embedder", inputs_of([TOO_LONG]), parameters={"truncate": False})


class Stub:
    """A client that knows names only, and asks the server for the rest."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel
        self._pool = descriptor_pool.DescriptorPool(ProtoReflectionDescriptorDatabase(channel))

    def message(self, name: str, **fields: Any) -> Any:
        return message_factory.GetMessageClass(self._pool.FindMessageTypeByName(name))(**fields)

    def method(self, service: str, name: str) -> Any:
        method = self._pool.FindServiceByName(service).methods_by_name[name]
        kind = ("unary", "stream")[method.client_streaming], ("unary", "stream")[method.server_streaming]
        answer = message_factory.GetMessageClass(method.output_type)
        make = getattr(self._channel, "_".join(kind))
        return make(f"/{service}/{name}", lambda request: request.SerializeToString(), answer.FromString)


@pytest.fixture
def stub(address: str) -> Iterator[Stub]:
    with grpc.insecure_channel(address) as channel:
        yield Stub(channel)


@row("grpcio", "TEI", "gRPC", "Embed.Embed, .EmbedStream; Predict.Predict; Rerank.Rerank; Tokenize.Tokenize; Info.Info")
def test_tei_s_services_by_reflection(server: Server, stub: Stub, expected: Expected) -> None:
    asked = [stub.message("tei.v1.EmbedRequest", inputs=text, truncate=True) for text in TEXTS]
    embed = stub.method("tei.v1.Embed", "Embed")
    expected.check_vectors([embed(request, timeout=DEADLINE_S).embeddings for request in asked])
    stream = stub.method("tei.v1.Embed", "EmbedStream")
    expected.check_vectors([found.embeddings for found in stream(iter(asked), timeout=DEADLINE_S)])
    ranked = stub.method("tei.v1.Rerank", "Rerank")(
        stub.message("tei.v1.RerankRequest", query=QUERY, texts=TEXTS, truncate=True)
    )
    scores = {rank.index: rank.score for rank in ranked.ranks}
    np.testing.assert_allclose([scores[index] for index in range(len(TEXTS))], expected.scores, atol=TOLERANCE)
    predict, metadata = stub.method("tei.v1.Predict", "Predict"), [("x-bei-model", "classifier")]
    for text, labels in zip(TEXTS, expected.labels, strict=True):
        found = predict(
            stub.message("tei.v1.PredictRequest", inputs=text, truncate=True), metadata=metadata
        ).predictions
        by_label = {one.label: one.score for one in found}
        np.testing.assert_allclose([by_label[label] for label in LABELS], labels, atol=TOLERANCE)
    request = stub.message("tei.v1.EncodeRequest", inputs=TEXTS[0], add_special_tokens=True)
    tokens = stub.method("tei.v1.Tokenize", "Tokenize")(request, metadata=[("x-bei-model", "embedder")]).tokens
    (over_http,) = post(server, "/tokenize", inputs=TEXTS[0], model="embedder")
    assert [token.id for token in tokens] == [token["id"] for token in over_http]
    info = stub.method("tei.v1.Info", "Info")(
        stub.message("tei.v1.InfoRequest"), metadata=[("x-bei-model", "embedder")]
    )
    assert info.max_input_length == 48
    with pytest.raises(grpc.RpcError, match="48") as caught:
        embed(stub.message("tei.v1.EmbedRequest", inputs=TOO_LONG))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@row("grpcio-health-checking", "gRPC health", "gRPC", "Health.Check, as grpc_health_probe calls it")
def test_health(address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        health = health_pb2_grpc.HealthStub(channel)

        def is_serving() -> bool:
            found = health.Check(health_pb2.HealthCheckRequest(service="tei.v1.Embed"), timeout=DEADLINE_S)
            return bool(found.status == health_pb2.HealthCheckResponse.SERVING)

        wait_until(is_serving, "it serves")


@row("grpcio-tools", "gRPC", "bei/server/grpc", "protoc reads tei.proto and inference.proto")
@pytest.mark.parametrize("name", FILES)
def test_the_descriptions_are_those_that_protoc_reads(name: str, tmp_path: Path) -> None:
    protoc = pytest.importorskip("grpc_tools.protoc")
    out = tmp_path / "out"
    assert protoc.main(["protoc", f"-I{FOLDER}", f"--descriptor_set_out={out}", str(FOLDER / name)]) == 0
    (made,) = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file

    def settled(file: Any) -> Any:
        """As the pool has it, with all types found."""
        pool = descriptor_pool.DescriptorPool()
        found = descriptor_pb2.FileDescriptorProto()
        pool.AddSerializedFile(file.SerializeToString())
        pool.FindFileByName(file.name).CopyToProto(found)
        for field in (one for message in _messages(found.message_type) for one in message.field):
            field.ClearField("json_name")
        return found

    assert settled(_description(name)) == settled(made)


def _description(name: str) -> Any:
    """As the server has it."""
    found = descriptor_pb2.FileDescriptorProto()
    pool().FindFileByName(f"bei/{name}").CopyToProto(found)
    found.name = name
    return found


def _messages(found: Any) -> Iterator[Any]:
    for message in found:
        yield message
        yield from _messages(message.nested_type)


@row("tritonclient", "Open Inference Protocol", "gRPC", "the numbers of its messages' fields")
def test_triton_s_client_has_the_numbers_that_are_served() -> None:
    """Of what both have: Triton's description has more messages."""
    from tritonclient.grpc import service_pb2

    mine = _description("inference.proto")
    theirs = service_pb2.DESCRIPTOR.message_types_by_name
    for message in mine.message_type:
        known = theirs[message.name].fields_by_name
        assert {field.name: field.number for field in message.field if field.name in known} == {
            field.name: known[field.name].number for field in message.field if field.name in known
        }
        assert {field.name for field in message.field} - {*known} <= {"properties"}


@pytest.fixture
def fronts(tmp_path: Path, env: Mapping[str, str], home: Path) -> Iterator[Server]:
    """A server of two front ends, each of which listens."""
    path = build_artifact(
        save_case(tmp_path / "c", MODELS["embedder"]), tmp_path / "built", name="embedder", reference="engine"
    ).path
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with serve([path, "--http-workers", "2", "--grpc-port", port, "--alias", "other-name"], env, home) as server:
        server.grpc = f"127.0.0.1:{port}"  # type: ignore[attr-defined]
        yield server


@row("grpcio", "Open Inference Protocol", "gRPC", "ModelInfer of several front ends: one is killed; SIGTERM")
def test_a_front_end_that_is_killed_is_missed_by_no_new_call(fronts: Server) -> None:
    def embed() -> int:
        """Over a connection of its own."""
        options = [("grpc.use_local_subchannel_pool", 1)]
        with grpc.insecure_channel(fronts.grpc, options) as channel:  # type: ignore[attr-defined]
            stub = Stub(channel)
            request = stub.message("inference.ModelInferRequest", model_name="other-name")
            tensor = request.inputs.add(name="text", datatype="BYTES", shape=[1])
            tensor.contents.bytes_contents.append(b"hello")
            answer = stub.method("inference.GRPCInferenceService", "ModelInfer")(request, timeout=DEADLINE_S)
            return len(answer.raw_output_contents[0])

    assert {embed() for _ in range(20)} == {32 * 4}
    children = {process.cmdline()[-1]: process for process in psutil.Process(fronts.pid).children()}
    killed = children["front-0"]
    killed.kill()
    killed.wait(DEADLINE_S)
    assert {embed() for _ in range(20)} == {32 * 4}
    fronts.send_signal(signal.SIGTERM)
    assert fronts.wait_exit() == 0
