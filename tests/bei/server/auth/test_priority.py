"""A request's lane and deadline: the headers, and what comes of them over HTTP."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bei.engine.fake import FakeEngine
from bei.errors import InvalidRequestError
from bei.server.auth.priority import Urgency, urgency_of
from tests.bei.server.app import ROUTE, App, check_error
from tests.bei.server.conftest import MakeApp
from tests.support.artifacts import LIMITS
from tests.support.engines import GatedEngine, sequences_of
from tests.support.services import entered

DEADLINES = ("request-timeout-ms", "request-deadline-ms", "x-request-timeout")


def urgency(**headers: str) -> Urgency:
    return urgency_of([(name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in headers.items()])


def left_s(found: Urgency) -> float:
    assert found.deadline_s is not None
    return found.deadline_s - time.monotonic()


def is_in(seconds: float, found: Urgency, began_s: float) -> bool:
    """Whether the deadline is so many seconds after a moment between ``began_s`` and now, as two clocks tell it."""
    assert found.deadline_s is not None
    return began_s - 0.1 <= found.deadline_s - seconds <= time.monotonic() + 0.1


def test_without_headers_a_request_says_nothing() -> None:
    assert urgency(host="bei", x_other="1") == Urgency(None, None)


@pytest.mark.parametrize(("value", "lane"), [("interactive", "interactive"), ("bulk", "bulk"), (" Bulk ", "bulk")])
def test_the_lane_is_named_in_any_case(value: str, lane: str) -> None:
    assert urgency(x_bei_lane=value).lane == lane


@pytest.mark.parametrize("value", ["", "fast", "bulk,interactive", "b\xfclk"])
def test_an_unknown_lane_is_refused_by_name(value: str) -> None:
    with pytest.raises(InvalidRequestError, match="x-bei-lane must be interactive or bulk") as caught:
        urgency(x_bei_lane=value)
    assert caught.value.param == "x-bei-lane"


@given(st.integers(100, 10**9))
def test_each_header_means_the_same_moment(milliseconds: int) -> None:
    began_s = time.monotonic()
    ways = (
        urgency(request_timeout_ms=str(milliseconds)),
        urgency(request_deadline_ms=str(time.time() * 1000 + milliseconds)),
        urgency(x_request_timeout=str(milliseconds / 1000)),
    )
    for found in ways:
        assert is_in(milliseconds / 1000, found, began_s)


def test_a_deadline_in_the_past_is_a_deadline() -> None:
    assert left_s(urgency(request_deadline_ms="0")) < -1e6
    assert left_s(urgency(request_timeout_ms="0")) <= 0


@given(st.lists(st.tuples(st.sampled_from(DEADLINES), st.integers(1, 10**6)), min_size=1, max_size=5))
def test_of_several_deadlines_the_earliest_counts(drawn: list[tuple[str, int]]) -> None:
    def value(name: str, seconds: int) -> str:
        if name == "request-deadline-ms":
            return str((time.time() + seconds) * 1000)
        return str(seconds * 1000 if name == "request-timeout-ms" else seconds)

    began_s = time.monotonic()
    found = urgency_of([(name.encode(), value(name, seconds).encode()) for name, seconds in drawn])
    assert is_in(min(seconds for _, seconds in drawn), found, began_s)


@pytest.mark.parametrize("name", DEADLINES)
@pytest.mark.parametrize("value", ["", "soon", "-1", "nan", "inf", "1e999", "1;2", "0x10", "\xb2"])
def test_what_is_no_number_from_0_on_is_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"{name} must be a number from 0 on") as caught:
        urgency_of([(name.encode(), value.encode("latin-1"))])
    assert caught.value.param == name


# Over HTTP


def post(app: App, headers: Mapping[str, str], *inputs: list[int]) -> httpx.Response:
    return app.run(sending(app, headers, *inputs))  # type: ignore[no-any-return]


async def sending(app: App, headers: Mapping[str, str], *inputs: list[int]) -> httpx.Response:
    return await app.client.post(ROUTE, content=json.dumps({"input": inputs}), headers=headers)


@pytest.mark.parametrize("name", [*DEADLINES, "x-bei-lane"])
def test_a_wrong_header_is_a_400_that_names_it(app: App, name: str) -> None:
    check_error(post(app, {name: "soon"}, [1]), 400, name, param=name)


@pytest.mark.parametrize(
    "header", [{"Request-Timeout-Ms": "60000"}, {"X-Request-Timeout": "60"}, {"X-Bei-Lane": "bulk"}]
)
def test_a_request_in_time_is_answered(app: App, header: dict[str, str]) -> None:
    assert post(app, header, [1]).status_code == 200


@pytest.mark.parametrize("header", [{"X-Request-Timeout": "1e308"}, {"Request-Deadline-Ms": "9e15"}])
def test_a_deadline_beyond_all_clocks_is_no_problem(app: App, header: dict[str, str]) -> None:
    assert post(app, header, [1]).status_code == 200


@pytest.mark.parametrize("header", [{"X-Request-Timeout": "0"}, {"Request-Deadline-Ms": "1"}])
def test_a_deadline_that_has_passed_already_is_a_504_and_nothing_runs(
    make_app: MakeApp, header: dict[str, str]
) -> None:
    engine = FakeEngine(LIMITS)
    message = check_error(post(make_app(engine), header, [1]), 504, "too long for a deadline", code="deadline_exceeded")
    assert "allow more time" in message
    assert engine.batches == []


Test = Callable[[App, GatedEngine], Any]


def behind_a_running_step(make_app: MakeApp, test: Test, **settings: object) -> GatedEngine:
    """Run ``test`` while a request of the token 1 is on the engine; it must open the gate itself."""
    engine = GatedEngine(LIMITS)
    app = make_app(engine, **settings)

    async def work() -> None:
        first = asyncio.ensure_future(sending(app, {}, [1]))
        await entered(engine)
        await test(app, engine)
        engine.open()
        assert (await first).status_code == 200

    app.run(work())
    return engine


def test_a_deadline_that_passes_while_a_request_waits_is_a_504_with_the_time_it_waited(make_app: MakeApp) -> None:
    async def test(app: App, engine: GatedEngine) -> None:
        response = await sending(app, {"Request-Timeout-Ms": "2000"}, [2], [3])
        message = check_error(response, 504, "The deadline passed after", code="deadline_exceeded")
        waited = re.search(r"after (\d+\.\d{3}) s", message)
        assert waited is not None
        assert float(waited[1]) >= 0.45

    engine = behind_a_running_step(make_app, test)
    assert [sequences_of(batch) for batch in engine.batches] == [[[1]]]  # what was late never ran


def test_a_deadline_that_the_queue_does_not_allow_is_a_429_with_a_time_to_come_back(make_app: MakeApp) -> None:
    async def test(app: App, engine: GatedEngine) -> None:
        (service,) = app.models
        service._admission._costs.follow(1e-3)  # seconds of waiting: the request comes long before its deadline
        inputs = [[10 + value % 100] * 15 + [value // 100] for value in range(1000)]
        queued = asyncio.ensure_future(sending(app, {"X-Bei-Lane": "bulk"}, *inputs))
        while not service._port.stats().lanes["bulk"].num_sequences:  # noqa: ASYNC110
            await asyncio.sleep(0)
        wait_s = service._admission.wait_s("bulk")
        header = {"X-Bei-Lane": "bulk", "X-Request-Timeout": str(wait_s / 2)}
        response = await sending(app, header, [2])
        check_error(response, 429, "deadline", code="overloaded")
        assert int(response.headers["retry-after"]) >= 1
        assert float(response.headers["retry-after-ms"]) <= 1200 * wait_s + 200
        engine.open()
        assert (await queued).status_code == 200

    behind_a_running_step(make_app, test)


@pytest.mark.parametrize("header", [{}, {"X-Bei-Lane": "bulk"}, {"X-Bei-Lane": "interactive"}])
def test_the_lane_of_the_header_is_the_lane_of_the_request(make_app: MakeApp, header: dict[str, str]) -> None:
    async def test(app: App, engine: GatedEngine) -> None:
        (service,) = app.models
        waiting = [
            asyncio.ensure_future(sending(app, header, [2])),
            asyncio.ensure_future(sending(app, header, *([3, value] for value in range(20)))),
        ]
        lanes = service._port.stats().lanes
        while sum(lane.num_sequences for lane in lanes.values()) < 21:
            await asyncio.sleep(0)
            lanes = service._port.stats().lanes
        found = {lane: stats.num_sequences for lane, stats in lanes.items() if stats.num_sequences}
        named = header.get("X-Bei-Lane")
        assert found == ({named: 21} if named else {"interactive": 1, "bulk": 20})
        engine.open()
        assert [(await answer).status_code for answer in waiting] == [200, 200]

    behind_a_running_step(make_app, test)
