"""The lines of a batch against a stand-in for the application: order, refusals, bounds, and ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bei.errors import EngineDeadError
from bei.server.batches import runner as module
from bei.server.batches.answer_files import AnswerFiles, Checkpoint
from bei.server.batches.in_process import LineAnswer
from bei.server.batches.lines import LineProblem, RequestLine
from bei.server.batches.runner import Ask, LineRunner
from tests.support.engines import DEADLINE_S
from tests.support.services import run_async

OK = LineAnswer(200, "r", b"{}")


def lines_of(number: int) -> Iterator[RequestLine]:
    return (RequestLine(place, place * 10, f"c{place}", "/embed", b"{}") for place in range(1, number + 1))


def written(folder: Path) -> list[str]:
    """The ids of the answers, in their order."""
    return [json.loads(line)["custom_id"] for line in (folder / "output").read_text().splitlines()]


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits for long."""
    monkeypatch.setattr(module, "_WAITS_S", (0.0, 0.0))
    monkeypatch.setattr(module, "_APART_S", 0.0)


def run(
    folder: Path, ask: Ask, number: int, on_made: Callable[[LineRunner], object] = lambda _: None
) -> tuple[bool, Checkpoint]:
    """Run so many lines. Returns whether it is all, and what was committed."""
    kept = [Checkpoint()]

    async def test() -> bool:
        with AnswerFiles(folder / "output", folder / "errors", Checkpoint(), kept.append) as files:
            made = LineRunner(ask, files)
            on_made(made)
            return await asyncio.wait_for(made.run(lines_of(number)), DEADLINE_S)

    found: list[bool] = []

    async def kept_result() -> None:
        found.append(await test())

    run_async(kept_result)
    return found[0], kept[-1]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=60))
@settings(max_examples=20)
def test_results_are_written_in_the_order_of_the_input_whatever_comes_first(
    tmp_path_factory: pytest.TempPathFactory, turns: list[int]
) -> None:
    folder = tmp_path_factory.mktemp("run")

    async def ask(line: RequestLine) -> LineAnswer:
        for _ in range(turns[line.number - 1]):
            await asyncio.sleep(0)
        return OK

    is_whole, reached = run(folder, ask, len(turns))
    assert is_whole
    assert (reached.num_lines, reached.completed) == (len(turns), len(turns))
    assert written(folder) == [f"c{number}" for number in range(1, len(turns) + 1)]


def test_a_refused_line_is_asked_again_and_new_ones_wait_meanwhile(tmp_path: Path) -> None:
    asked: list[int] = []

    async def ask(line: RequestLine) -> LineAnswer:
        asked.append(line.number)
        await asyncio.sleep(0)
        return LineAnswer(429, "r", b"{}", 0.05) if line.number == 1 and asked.count(1) < 4 else OK

    assert run(tmp_path, ask, 400)[0]
    assert asked.count(1) == 4
    assert len(written(tmp_path)) == 400
    fourth = [place for place, number in enumerate(asked) if number == 1][3]
    assert fourth <= module._MOST_LINES + 3  # the lines that were under way with it, and no others


def test_no_more_lines_are_under_way_than_allowed_nor_more_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MOST_LINES", 5)
    now, most = 0, 0

    async def ask(_: RequestLine) -> LineAnswer:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0)
        now -= 1
        return OK

    assert run(tmp_path, ask, 60)[0]
    assert most == 5
    monkeypatch.setattr(module, "_MOST_BODY_BYTES", 3)  # two bodies
    most = 0
    (tmp_path / "other").mkdir()
    assert run(tmp_path / "other", ask, 60)[0]
    assert most == 2


def test_results_behind_a_slow_line_wait_in_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_WAITING_LINES", 20)
    first = asyncio.Event()
    asked: list[int] = []

    def let_go() -> None:
        asked.append(0)
        first.set()

    async def ask(line: RequestLine) -> LineAnswer:
        asked.append(line.number)
        if line.number == 1:
            await first.wait()
        elif len(asked) == 20:
            asyncio.get_running_loop().call_later(0.05, let_go)
        return OK

    assert run(tmp_path, ask, 100)[0]
    assert asked.index(0) == 20
    assert len(written(tmp_path)) == 100


def test_a_stop_lets_what_is_under_way_end_and_begins_no_more(tmp_path: Path) -> None:
    made: list[LineRunner] = []

    async def ask(line: RequestLine) -> LineAnswer:
        if line.number == 10:
            made[0].stop()
        await asyncio.sleep(0)
        return OK

    is_whole, reached = run(tmp_path, ask, 5_000, made.append)
    assert not is_whole
    assert 10 <= reached.num_lines < 5_000
    assert written(tmp_path) == [f"c{number}" for number in range(1, reached.num_lines + 1)]


@pytest.mark.parametrize("refusal", [LineAnswer(429, "r", b"{}", 3_600.0), LineAnswer(503, "r", b"{}")])
def test_a_stop_does_not_wait_for_lines_that_are_refused(
    tmp_path: Path, refusal: LineAnswer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_WAITS_S", (3_600.0,))
    made: list[LineRunner] = []

    async def ask(line: RequestLine) -> LineAnswer:
        if line.number < 3:
            return OK
        asyncio.get_running_loop().call_later(0.01, made[0].stop)
        return refusal

    is_whole, reached = run(tmp_path, ask, 50, made.append)
    assert (is_whole, reached.num_lines) == (False, 2)


def test_an_engine_that_is_dead_ends_the_run_with_what_it_says(tmp_path: Path) -> None:
    async def ask(line: RequestLine) -> LineAnswer:
        return OK if line.number < 3 else LineAnswer(503, "r", b'{"error":{"message":"the device is gone"}}')

    with pytest.raises(EngineDeadError, match="the device is gone"):
        run(tmp_path, ask, 50)
    assert written(tmp_path) == ["c1", "c2"]


def test_a_line_that_is_no_request_asks_nobody(tmp_path: Path) -> None:
    asked: list[RequestLine] = []

    async def ask(line: RequestLine) -> LineAnswer:
        asked.append(line)
        return OK

    async def test() -> None:
        bad = RequestLine(1, 10, None, problem=LineProblem("invalid_json_line", "no JSON"))
        with AnswerFiles(tmp_path / "output", tmp_path / "errors", Checkpoint(), lambda _: None) as files:
            assert await LineRunner(ask, files, is_numbered=True).run(iter([bad]))

    run_async(test)
    error = json.loads((tmp_path / "errors").read_text())["error"]
    assert asked == []
    assert error == {"code": "invalid_json_line", "message": "no JSON", "line": 1}
