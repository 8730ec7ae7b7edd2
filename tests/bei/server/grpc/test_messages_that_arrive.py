"""Messages that arrive: their keys, the memory that they take, and the thread that reads them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from bei.engine.fake import FakeEngine
from bei.server.grpc import calls, inference_service
from bei.server.grpc.messages import field_head
from bei.server.http import memory_budgets
from bei.service.service import InferenceService
from tests.bei.server.conftest import MakeApp
from tests.bei.server.grpc.served import DEADLINE_S, Serve, inference, tei
from tests.support.artifacts import LIMITS
from tests.support.engines import GatedEngine

EMBED = "/tei.v1.Embed/Embed"
INFER = "/inference.GRPCInferenceService/ModelInfer"
KEY, OTHER = "0123456789abcdef", "fedcba9876543210"
CODE = grpc.StatusCode
LONG = 100_000  # bytes, which are read in a thread


def tensor_of(*texts: str) -> Any:
    request = inference("ModelInferRequest", model_name="tiny")
    contents = request.inputs.add(name="text", datatype="BYTES", shape=[len(texts)]).contents
    contents.bytes_contents.extend([text.encode() for text in texts])
    request.parameters["truncate"].bool_param = True
    return request


@pytest.mark.parametrize("left", [f"other: {OTHER}\n", f"search: {OTHER}\n"], ids=["a name", "a secret"])
def test_a_key_that_is_taken_back_ends_an_open_stream(
    left: str, make_app: MakeApp, serve: Serve, tmp_path: Path
) -> None:
    """The key of a stream's first message was that of all, as long as the stream was open."""
    file = tmp_path / "keys.yaml"
    file.write_text(f"search: {KEY}\nother: {OTHER}\n" if left.startswith("other") else f"search: {KEY}\n")
    app = make_app(FakeEngine(LIMITS), api_keys_file=str(file))
    served = serve(app)
    request = tei("EmbedRequest", inputs="cat").SerializeToString()

    async def asked() -> grpc.StatusCode:
        call = served.channel.stream_stream(f"{EMBED}Stream")(metadata=[("api-key", KEY)], timeout=DEADLINE_S)
        for _ in range(2):
            await call.write(request)
            assert await call.read()
        file.write_text(left)
        assert app.keys is not None
        await app.keys.reload()
        await call.write(request)
        with pytest.raises(grpc.aio.AioRpcError, match="none of this server's") as caught:
            await call.read()
        found: grpc.StatusCode = caught.value.code()
        return found

    assert app.run(asked()) is CODE.UNAUTHENTICATED


def test_messages_count_until_they_are_admitted(make_app: MakeApp, serve: Serve) -> None:
    served = serve(make_app(FakeEngine(LIMITS)))
    served.bodies.limit = LONG  # of all together; of one the limit of messages is at most as large
    error = served.error(EMBED, tei("EmbedRequest", inputs="a" * 2 * LONG, truncate=True))
    assert (error.code(), dict(error.trailing_metadata())["bei-code"]) == (CODE.RESOURCE_EXHAUSTED, "overloaded")
    assert served.bodies.held == 0
    for _ in range(3):  # what is answered is given back
        assert served.call(EMBED, tei("EmbedRequest", inputs="a" * (LONG // 2), truncate=True))[0].embeddings
    assert served.bodies.held == 0


def test_what_is_admitted_is_given_back_before_it_is_answered(make_app: MakeApp, serve: Serve) -> None:
    engine = GatedEngine(LIMITS)
    served = serve(make_app(engine), watches=False)
    request = tei("EmbedRequest", inputs="a" * LONG, truncate=True).SerializeToString()

    async def held() -> int:
        call = served.channel.unary_unary(EMBED)(request, timeout=DEADLINE_S)
        await asyncio.get_running_loop().run_in_executor(None, engine.wait_entered)
        found = served.bodies.held
        engine.open()
        await call
        return found

    assert served.app.run(held()) == 0


def test_a_stream_that_is_gathered_counts_as_it_comes_and_yields_where_it_is_slow(
    make_app: MakeApp, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_budgets, "_GRACE_S", 0.0)  # at once
    served = serve(make_app(FakeEngine(LIMITS)), body_memory=4 * LONG, payload_limit=4 * LONG)
    part = tei("RerankStreamRequest", query="a", text="b" * LONG, truncate=True).SerializeToString()

    async def asked() -> tuple[int, bytes, grpc.StatusCode]:
        async def slowly() -> AsyncIterator[bytes]:
            yield part
            yield part
            await asyncio.Event().wait()

        slow = served.channel.stream_unary("/tei.v1.Rerank/RerankStream")(slowly(), timeout=DEADLINE_S)
        while served.bodies.held < 2 * len(part):  # noqa: ASYNC110 - they are on their way
            await asyncio.sleep(0.01)
        held = served.bodies.held
        await asyncio.sleep(0.2)  # less than 10 MB a second is slow
        large = tei("EmbedRequest", inputs="a" * 3 * LONG, truncate=True).SerializeToString()
        answer = await served.channel.unary_unary(EMBED)(large, timeout=DEADLINE_S)
        with pytest.raises(grpc.aio.AioRpcError, match="unfinished requests hold more than") as caught:
            await slow
        return held, answer, caught.value.code()

    held, answer, code = served.app.run(asked())
    assert held == 2 * len(part)
    assert answer
    assert code is CODE.RESOURCE_EXHAUSTED
    assert served.bodies.held == 0


def test_a_stream_that_is_gathered_has_the_time_of_a_body(make_app: MakeApp, serve: Serve) -> None:
    """A client that stalled kept its call and its messages for as long as it liked."""
    served = serve(make_app(FakeEngine(LIMITS)), body_timeout=0.2)
    request = tei("RerankStreamRequest", query="a", text="b" * 2_000, truncate=True).SerializeToString()

    async def asked(pause_s: float, number: int) -> bytes:
        async def slowly() -> AsyncIterator[bytes]:
            for _ in range(number):
                yield request
                await asyncio.sleep(pause_s)

        call = served.channel.stream_unary("/tei.v1.Rerank/RerankStream")(slowly(), timeout=DEADLINE_S)
        return bytes(await call)

    with pytest.raises(grpc.aio.AioRpcError, match="cannot rerank"):
        served.app.run(asked(0.05, 10))  # 0.5 s; 0.2 s more are allowed for each message
    with pytest.raises(grpc.aio.AioRpcError, match=r"within 0\.2 s and a second for every 10000 bytes") as caught:
        served.app.run(asked(DEADLINE_S, 2))
    assert caught.value.code() is CODE.DEADLINE_EXCEEDED
    assert served.bodies.held == 0


@pytest.mark.parametrize("has_keys", [False, True])
def test_without_keys_the_calls_of_a_connection_are_a_flow(
    has_keys: bool, make_app: MakeApp, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All clients were one flow, the server's own."""
    app = make_app(FakeEngine(LIMITS), api_keys=(f"search:{KEY}",) if has_keys else None)
    served = serve(app, watches=False)
    flows: list[int] = []
    admit = InferenceService.admit

    def noted(self: InferenceService, *args: Any, **given: Any) -> Any:
        flows.append(given["flow"])
        return admit(self, *args, **given)

    monkeypatch.setattr(InferenceService, "admit", noted)
    request = tei("EmbedRequest", inputs="cat").SerializeToString()
    metadata = [("api-key", KEY)] if has_keys else []

    async def asked() -> None:
        address = f"127.0.0.1:{served.server.port}"
        options = [("grpc.use_local_subchannel_pool", 1)]  # or both have one connection
        async with grpc.aio.insecure_channel(address, options) as other:
            for channel in (served.channel, other, served.channel, other):
                await channel.unary_unary(EMBED)(request, metadata=metadata, timeout=DEADLINE_S)

    app.run(asked())
    one, two = flows[:2]
    assert flows == [one, two, one, two]
    assert 0 not in flows
    assert (one == two) is has_keys


@pytest.mark.parametrize("is_long", [False, True])
def test_long_messages_are_read_and_large_answers_written_off_the_event_loop(
    is_long: bool, make_app: MakeApp, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: dict[str, threading.Thread] = {}

    def noted(name: str, function: Any) -> Any:
        def run(*args: Any) -> Any:
            threads[name] = threading.current_thread()
            return function(*args)

        return run

    monkeypatch.setattr(calls, "_parsed", noted("parsed", calls._parsed))
    monkeypatch.setattr(inference_service, "_inputs", noted("inputs", inference_service._inputs))
    monkeypatch.setattr(inference_service, "field_head", noted("written", field_head))
    if is_long:
        monkeypatch.setattr(inference_service, "INLINE_BYTES", 10)
    served = serve(make_app(FakeEngine(LIMITS)))
    expected = served.call(INFER, tensor_of("cat"))[0]
    found = served.call(INFER, tensor_of("cat " * (LONG if is_long else 1)))[0]
    assert [*found.outputs] == [*expected.outputs]
    assert len(found.raw_output_contents) == 1
    assert set(threads) == {"parsed", "inputs", "written"}
    assert {thread is threading.main_thread() for thread in threads.values()} == {not is_long}


def test_more_ids_than_a_text_may_have_are_refused_before_a_list_is_made_of_them(
    make_app: MakeApp, serve: Serve
) -> None:
    served = serve(make_app(FakeEngine(LIMITS)))
    error = served.error("/tei.v1.Tokenize/Decode", tei("DecodeRequest", ids=[5] * 65_537))
    assert "ids has 65537 token ids, the limit is 65536" in str(error.details())
