"""What every call passes through: keys, lanes, deadlines, statuses, metadata, limits, health, reflection, the drain."""

from __future__ import annotations

import asyncio
import hashlib
import random
import re
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from bei import errors
from bei.cli import main
from bei.engine.fake import FakeEngine
from bei.errors import BeiError, ConfigError
from bei.server.grpc import messages
from bei.server.grpc.calls import code_of, error_metadata
from bei.server.grpc.messages import FILES, pool, services
from tests.bei.server.conftest import MakeApp
from tests.bei.server.dialects.wire import ERRORS
from tests.bei.server.grpc.served import DEADLINE_S, Serve, inference, tei
from tests.support.artifacts import LIMITS
from tests.support.engines import GatedEngine

EMBED = "/tei.v1.Embed/Embed"
KEY = "0123456789abcdef"
CODE = grpc.StatusCode


def test_every_error_has_a_status(make_app: MakeApp) -> None:
    expected = {
        errors.UnauthorizedError: CODE.UNAUTHENTICATED,
        errors.ForbiddenError: CODE.PERMISSION_DENIED,
        errors.ModelNotFoundError: CODE.NOT_FOUND,
        errors.TaskNotSupportedError: CODE.UNIMPLEMENTED,
        errors.OverloadedError: CODE.RESOURCE_EXHAUSTED,
        errors.RateLimitedError: CODE.RESOURCE_EXHAUSTED,
        errors.DeadlineExceededError: CODE.DEADLINE_EXCEEDED,
        errors.ShuttingDownError: CODE.UNAVAILABLE,
        errors.EngineDeadError: CODE.UNAVAILABLE,
        errors.EngineError: CODE.INTERNAL,
        errors.InvalidRequestError: CODE.INVALID_ARGUMENT,
        errors.InputTooLongError: CODE.INVALID_ARGUMENT,
        BeiError: CODE.INTERNAL,
    }
    assert {cls: code_of(error) for error in ERRORS for cls in expected if type(error) is cls} == expected
    assert dict(error_metadata(errors.OverloadedError("full", 1.5))) == {
        "bei-code": "overloaded",
        "retry-after": "2",
        "retry-after-ms": "1500",
    }
    assert ("bei-param", "input") in error_metadata(errors.InvalidRequestError("wrong", "input"))


@pytest.mark.parametrize("name", ["authorization", "x-api-key", "api-key"])
def test_keys(make_app: MakeApp, serve: Serve, name: str) -> None:
    served = serve(make_app(FakeEngine(LIMITS), api_keys=(f"search:{KEY}",)))
    request = tei("EmbedRequest", inputs="cat")
    value = f"Bearer {KEY}" if name == "authorization" else KEY
    assert served.call(EMBED, request, [(name, value)])[0].embeddings
    for metadata, code in ((None, "unauthorized"), ([(name, "another")], "invalid_api_key")):
        error = served.error(EMBED, request, metadata)
        assert (error.code(), dict(error.trailing_metadata())["bei-code"]) == (CODE.UNAUTHENTICATED, code)
    assert len(served.stream(f"{EMBED}Stream", [request] * 3, [(name, value)])) == 3
    with pytest.raises(grpc.aio.AioRpcError, match="asks for an API key"):
        served.stream(f"{EMBED}Stream", [request])
    live = served.call("/inference.GRPCInferenceService/ServerLive", inference("ServerLiveRequest"))[0]
    assert live.live  # as probes over HTTP, without one


def test_the_rate_of_a_key_counts_every_message(make_app: MakeApp, serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(f"slow: {{key: {KEY}, requests_per_second: 2}}")
    served = serve(make_app(FakeEngine(LIMITS), api_keys_file=str(file)))
    with pytest.raises(grpc.aio.AioRpcError, match="may send 2 requests a second") as caught:
        served.in_turn(f"{EMBED}Stream", [tei("EmbedRequest", inputs="cat")] * 60, [("api-key", KEY)])
    assert caught.value.code() is CODE.RESOURCE_EXHAUSTED
    assert int(dict(caught.value.trailing_metadata() or ())["retry-after-ms"]) > 0


def test_lanes(make_app: MakeApp, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    app = make_app(FakeEngine(LIMITS))
    served, request = serve(app), tei("EmbedRequest", inputs="cat")
    lanes: list[Any] = []
    monkeypatch.setattr(app.metrics, "request", lambda *values: lanes.append((values[0], values[1], values[4])))
    for metadata in (None, [("x-bei-lane", "bulk")]):
        served.call(EMBED, request, metadata)
    for metadata in (None, [("x-bei-lane", "interactive")]):
        served.stream(f"{EMBED}Stream", [request], metadata)
    stream = f"{EMBED}Stream"
    assert lanes == [
        (EMBED, 200, "interactive"),
        (EMBED, 200, "bulk"),
        (stream, 200, "bulk"),
        (stream, 200, "interactive"),
    ]
    error = served.error(EMBED, request, [("x-bei-lane", "bulk"), ("x-bei-lane", "interactive")])
    assert (error.code(), dict(error.trailing_metadata())["bei-param"]) == (CODE.INVALID_ARGUMENT, "x-bei-lane")
    error = served.error(EMBED, request, [("x-bei-lane", "fast")])
    assert (error.code(), dict(error.trailing_metadata())["bei-param"]) == (CODE.INVALID_ARGUMENT, "x-bei-lane")


def test_a_deadline_ends_a_call_and_what_waits_is_not_run(make_app: MakeApp, serve: Serve) -> None:
    engine = GatedEngine(LIMITS)
    app = make_app(engine)
    served = serve(app, watches=False)

    async def late() -> None:
        running = asyncio.ensure_future(served._call(EMBED, tei("EmbedRequest", inputs="cat"), None, DEADLINE_S))
        await asyncio.get_running_loop().run_in_executor(None, engine.wait_entered)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await served._call(EMBED, tei("EmbedRequest", inputs="hello"), None, 0.2)
        assert caught.value.code() is CODE.DEADLINE_EXCEEDED
        metadata = [("request-timeout-ms", "100")]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await served._call(EMBED, tei("EmbedRequest", inputs="the"), metadata, DEADLINE_S)
        assert caught.value.code() is CODE.DEADLINE_EXCEEDED
        engine.open()
        await running

    app.run(late())
    assert len(engine.batches) == 1


def test_a_report_stands_in_metadata(make_app: MakeApp, serve: Serve) -> None:
    served = serve(make_app(FakeEngine(LIMITS)))
    asked = [("x-bei-report", "true")]
    request = tei("EmbedRequest", inputs="the cat " * 20, truncate=True)
    _, metadata = served.call(EMBED, request, asked)
    assert '"truncated":true' in metadata["x-bei-report"].replace(" ", "")
    found, metadata = served.call(EMBED, tei("EmbedRequest", inputs=""), asked)
    assert (len(found.embeddings), "is an empty text" in metadata["x-bei-report"]) == (0, True)
    for path, message in (("/tei.v1.Info/Info", "InfoRequest"), ("/tei.v1.Predict/Predict", "PredictRequest")):
        assert "is for calls of one text" in (served.error(path, tei(message), asked).details() or "")


def test_request_ids_and_server_timing(make_app: MakeApp, serve: Serve) -> None:
    served = serve(make_app(FakeEngine(LIMITS)), server_timing=True)
    _, metadata = served.call(EMBED, tei("EmbedRequest", inputs="cat"), [("x-request-id", "mine")])
    assert metadata["x-request-id"] == "mine"
    assert "inference;dur=" in metadata["server-timing"]
    error = served.error(EMBED, tei("EmbedRequest"), [("x-request-id", "mine")])
    assert dict(error.trailing_metadata())["x-request-id"] == "mine"


def test_limits_of_messages(make_app: MakeApp, serve: Serve) -> None:
    served = serve(make_app(FakeEngine(LIMITS)), payload_limit=1_000, answer_limit=1_000)
    error = served.error(EMBED, tei("EmbedRequest", inputs="x" * 2_000, truncate=True))
    assert error.code() is CODE.RESOURCE_EXHAUSTED
    assert served.call(EMBED, tei("EmbedRequest", inputs="x" * 900, truncate=True))[0].embeddings
    tensor = inference("ModelInferRequest", model_name="tiny")
    tensor.inputs.add(name="text", datatype="BYTES", shape=[30]).contents.bytes_contents.extend([b"a"] * 30)
    error = served.error("/inference.GRPCInferenceService/ModelInfer", tensor)
    assert (error.code(), dict(error.trailing_metadata())["bei-code"]) == (CODE.RESOURCE_EXHAUSTED, "answer_too_large")


def test_limits_may_be_larger_than_the_library_s(make_app: MakeApp, serve: Serve) -> None:
    """The server did not start."""
    limits = dict.fromkeys(("answer_limit", "answer_memory", "payload_limit", "body_memory"), 3_000_000_000)
    served = serve(make_app(FakeEngine(LIMITS)), **limits, keep_alive_timeout=3_600.0)
    assert served.call(EMBED, tei("EmbedRequest", inputs="cat"))[0].embeddings


def test_a_client_that_takes_no_answers_is_not_read_ahead_of(make_app: MakeApp, serve: Serve) -> None:
    engine = GatedEngine(LIMITS)
    app = make_app(engine)
    served = serve(app, watches=False)
    sent = 0

    async def flood() -> None:
        nonlocal sent

        async def given() -> AsyncIterator[bytes]:
            nonlocal sent
            for index in range(5_000):
                sent += 1
                yield tei("EmbedRequest", inputs=f"cat {index} " * 1_000, truncate=True).SerializeToString()

        call = served.channel.stream_stream(f"{EMBED}Stream")(given(), timeout=DEADLINE_S)
        await asyncio.get_running_loop().run_in_executor(None, engine.wait_entered)
        await asyncio.sleep(0.5)
        (service,) = app.models
        assert service.num_open <= 64
        assert sent < 5_000
        call.cancel()
        engine.open()

    app.run(flood())


def test_a_large_answer_is_counted_until_it_is_taken(make_app: MakeApp, serve: Serve) -> None:
    app = make_app(FakeEngine(LIMITS))
    served, path = serve(app), "/tei.v1.Tokenize/Tokenize"
    request = tei("EncodeRequest", inputs="the cat " * 8_000).SerializeToString()
    large = [("grpc.max_receive_message_length", -1)]

    def held() -> int:
        return served.answers.held

    async def taken_late() -> float:
        """How many answers are held for a client that takes none, of 30."""
        async with grpc.aio.insecure_channel(f"127.0.0.1:{served.server.port}", large) as channel:
            size = len(await channel.unary_unary(path)(request, timeout=DEADLINE_S))
            assert size > 256_000
            while held():  # noqa: ASYNC110 - a client has its answer a moment before the server knows
                await asyncio.sleep(0.01)
            call = channel.stream_stream(f"{path}Stream")(timeout=3 * DEADLINE_S)
            for _ in range(30):
                await call.write(request)
            while not held() or held() % size:  # noqa: ASYNC110, some are on their way
                await asyncio.sleep(0.1)
            num_held = held() / size
            await call.done_writing()
            assert len([len(content) async for content in call]) == 30
        return num_held

    assert 1 <= app.run(taken_late()) <= 15
    while served.answers.held:
        app.run(asyncio.sleep(0.01))


def test_who_leaves_takes_back_what_waits(make_app: MakeApp, serve: Serve) -> None:
    engine = GatedEngine(LIMITS)
    app = make_app(engine)
    served = serve(app, watches=False)

    async def leave() -> None:
        running = asyncio.ensure_future(served._call(EMBED, tei("EmbedRequest", inputs="cat"), None, DEADLINE_S))
        await asyncio.get_running_loop().run_in_executor(None, engine.wait_entered)
        waiting = served.channel.unary_unary(EMBED)(tei("EmbedRequest", inputs="hello").SerializeToString())
        (service,) = app.models
        while service.num_waiting < 1:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        waiting.cancel()
        while service.num_waiting:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        engine.open()
        await running

    app.run(leave())
    assert len(engine.batches) == 1


def test_health_follows_the_probes_and_the_drain(make_app: MakeApp, serve: Serve) -> None:
    app = make_app(FakeEngine(LIMITS))
    served = serve(app)
    status = health_pb2.HealthCheckResponse

    async def check(service: str) -> Any:
        stub = health_pb2_grpc.HealthStub(served.channel)
        return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status

    async def scenario() -> None:
        while await check("") != status.SERVING:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        for service in services():
            assert await check(service.full_name) == status.SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await check("nothing")
        assert caught.value.code() is CODE.NOT_FOUND

    app.run(scenario())
    app.models.begin_drain()
    error = served.error(EMBED, tei("EmbedRequest", inputs="cat"))
    assert (error.code(), dict(error.trailing_metadata())["bei-code"]) == (CODE.UNAVAILABLE, "shutting_down")


def test_reflection_lists_the_services_and_their_files(make_app: MakeApp, serve: Serve) -> None:
    app = make_app(FakeEngine(LIMITS))
    served = serve(app)

    async def ask(**request: Any) -> Any:
        async def given() -> AsyncIterator[Any]:
            yield reflection_pb2.ServerReflectionRequest(**request)

        stub = reflection_pb2_grpc.ServerReflectionStub(served.channel)
        return [one async for one in stub.ServerReflectionInfo(given())][0]  # noqa: RUF015

    listed = app.run(ask(list_services="")).list_services_response.service
    names = {service.full_name for service in services()}
    assert {one.name for one in listed} == names | {"grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
    (file,) = app.run(ask(file_containing_symbol="tei.v1.Embed")).file_descriptor_response.file_descriptor_proto
    assert file == pool().FindFileByName("bei/tei.proto").serialized_pb


def test_a_stream_without_messages_gives_its_place_to_others(make_app: MakeApp, serve: Serve) -> None:
    """After an answer, or without any; reflection's too."""
    served = serve(make_app(FakeEngine(LIMITS)), max_connections=1, keep_alive_timeout=0.3)
    cat = tei("EmbedRequest", inputs="cat")
    question = reflection_pb2.ServerReflectionRequest(list_services="")
    reflection = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"

    async def idle(path: str, messages: list[Any]) -> grpc.aio.AioRpcError:
        call = served.channel.stream_stream(path)(timeout=DEADLINE_S)
        for one in messages:
            await call.write(one.SerializeToString())
            assert await call.read()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        return caught.value

    streams: list[tuple[str, list[Any]]] = [(f"{EMBED}Stream", []), (f"{EMBED}Stream", [cat] * 2), (reflection, [])]
    for path, sent in [*streams, (reflection, [question])]:
        error = served.app.run(idle(path, sent))
        assert (error.code(), "keep_alive_timeout" in error.details()) == (CODE.DEADLINE_EXCEEDED, True), path
        assert dict(error.trailing_metadata())["bei-code"] == "request_timeout"
        assert served.call(EMBED, cat)[0].embeddings


def test_a_call_whose_message_does_not_come_gives_its_place_to_others(make_app: MakeApp, serve: Serve) -> None:
    served = serve(make_app(FakeEngine(LIMITS)), max_connections=1, body_timeout=0.3)
    health = "/grpc.health.v1.Health"

    async def silent(path: str, *, ends: bool) -> grpc.aio.AioRpcError:
        call = served.channel.stream_stream(path)(timeout=DEADLINE_S)
        if ends:
            await call.done_writing()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        return caught.value

    for path in (EMBED, "/inference.GRPCInferenceService/ServerLive", f"{health}/Check", f"{health}/Watch"):
        for ends, code, words in (
            (False, CODE.DEADLINE_EXCEEDED, "within 0.3 s (body_timeout)"),
            (True, CODE.INVALID_ARGUMENT, "has no message"),
        ):
            error = served.app.run(silent(path, ends=ends))
            assert (error.code(), words in error.details()) == (code, True), path
            assert served.call(EMBED, tei("EmbedRequest", inputs="cat"))[0].embeddings


def test_a_stream_whose_message_is_under_way_is_not_idle(make_app: MakeApp, serve: Serve) -> None:
    engine = GatedEngine(LIMITS)
    served = serve(make_app(engine), watches=False, keep_alive_timeout=0.3)

    async def slow() -> Any:
        call = served.channel.stream_stream(f"{EMBED}Stream")(timeout=DEADLINE_S)
        await call.write(tei("EmbedRequest", inputs="cat").SerializeToString())
        await asyncio.sleep(1)
        engine.open()
        return await call.read()

    assert served.app.run(slow()) is not grpc.aio.EOF


@pytest.mark.parametrize(("most", "watching"), [(5, 2), (2, 1), (1, 1)])
def test_calls_that_watch_the_health_leave_places_to_others(
    most: int, watching: int, make_app: MakeApp, serve: Serve
) -> None:
    """At a limit of one call, one that watched was the only one."""
    served = serve(make_app(FakeEngine(LIMITS)), max_connections=most)

    async def watched() -> grpc.aio.AioRpcError:
        stub = health_pb2_grpc.HealthStub(served.channel)
        calls = [stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(watching)]
        for call in calls:
            assert (await call.read()).status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Watch(health_pb2.HealthCheckRequest()).read()
        await served._call(EMBED, tei("EmbedRequest", inputs="cat"), None, DEADLINE_S)
        calls[0].cancel()
        while True:  # until the server knows
            last = stub.Watch(health_pb2.HealthCheckRequest())
            with suppress(grpc.aio.AioRpcError):
                assert await last.read()
                return caught.value

    error = served.app.run(watched())
    assert f"{watching} calls watch the health already" in str(error.details())
    assert (error.code(), "ask with Check" in error.details()) == (CODE.RESOURCE_EXHAUSTED, True)


# The texts that descriptors.binpb was made of: where one was changed, make it anew (``bei.server.grpc.messages``), and
# compare it with what protoc makes (tests/clients/test_grpc.py).
MADE_OF = {
    "tei.proto": "6a9e9cc4e0312c103ea4237aba13265da27269f68ad50f9b28af3056051ba27c",
    "inference.proto": "db098940c64fe10ead831d0ef1a85762387125452e93f78b390eac42dba444ac",
}


def _numbered(messages: Iterable[Any]) -> Iterator[tuple[str, int]]:
    """Fields and values of enums, but those of the entries of maps, which stand in no text."""
    for message in messages:
        if not message.options.map_entry:
            yield from ((field.name, field.number) for field in message.field)
            yield from ((value.name, value.number) for enum in message.enum_type for value in enum.value)
            yield from _numbered(message.nested_type)


@pytest.mark.parametrize("name", FILES)
def test_the_descriptors_are_those_of_the_proto_file(name: str) -> None:
    content = (Path(messages.__file__).parent / name).read_bytes()
    assert hashlib.sha256(content).hexdigest() == MADE_OF[name]
    file = descriptor_pb2.FileDescriptorProto()
    pool().FindFileByName(f"bei/{name}").CopyToProto(file)
    found = [*_numbered(file.message_type), *((one.name, one.number) for enum in file.enum_type for one in enum.value)]
    written = re.findall(r"(\w+) = (\d+);", content.decode())
    assert Counter(found) == Counter((field, int(number)) for field, number in written)
    methods = [method.name for service in file.service for method in service.method]
    assert methods == re.findall(r"rpc (\w+)", content.decode())


def test_a_port_that_is_taken_ends_the_start(make_app: MakeApp, serve: Serve) -> None:
    served = serve(make_app(FakeEngine(LIMITS)))
    with pytest.raises(ConfigError, match="choose another --grpc-port"):
        main._serve({"grpc_port": served.server.port, "port": 0, "models": ["x"]})


@pytest.mark.slow
def test_ten_thousand_messages_of_anything(make_app: MakeApp, serve: Serve) -> None:
    """Bytes at random, and good messages with bytes changed: an answer or an error of the client, never another."""
    app = make_app(FakeEngine(LIMITS))
    served, source = serve(app), random.Random(7)
    tensor = inference("ModelInferRequest", model_name="tiny", id="a")
    tensor.inputs.add(name="text", datatype="BYTES", shape=[2]).contents.bytes_contents.extend([b"cat", b"the"])
    tensor.parameters["dimensions"].int64_param = 3
    good = {
        EMBED: tei("EmbedRequest", inputs="the cat", truncate=True, dimensions=3),
        "/tei.v1.Rerank/Rerank": tei("RerankRequest", query="a", texts=["b", "c"]),
        "/tei.v1.Tokenize/Tokenize": tei("EncodeRequest", inputs="the cat"),
        "/tei.v1.Tokenize/Decode": tei("DecodeRequest", ids=[1, 2, 3]),
        "/tei.v1.Predict/PredictPair": tei("PredictPairRequest", inputs=["a", "b"]),
        "/inference.GRPCInferenceService/ModelInfer": tensor,
        "/inference.GRPCInferenceService/ModelMetadata": inference("ModelMetadataRequest", name="tiny"),
    }
    allowed = {CODE.INVALID_ARGUMENT, CODE.NOT_FOUND, CODE.UNIMPLEMENTED, CODE.RESOURCE_EXHAUSTED}

    def changed(content: bytes) -> bytes:
        if source.random() < 0.3:
            return source.randbytes(source.randrange(40))
        found = bytearray(content)
        for _ in range(source.randrange(1, 4)):
            found[source.randrange(len(found))] = source.randrange(256)
        return bytes(found)

    async def send(path: str, content: bytes) -> grpc.StatusCode:
        try:
            await served.channel.unary_unary(path)(content, timeout=DEADLINE_S)
        except grpc.aio.AioRpcError as error:
            return error.code()
        return CODE.OK

    async def fuzz() -> set[grpc.StatusCode]:
        seen: set[grpc.StatusCode] = set()
        for _ in range(100):
            paths = source.choices([*good], k=100)
            sent = [send(path, changed(good[path].SerializeToString())) for path in paths]
            seen |= {*await asyncio.gather(*sent)}
        return seen

    seen = app.loop.run_until_complete(asyncio.wait_for(fuzz(), 300))
    assert seen - allowed == {CODE.OK}
    assert served.call(EMBED, good[EMBED])[0].embeddings
