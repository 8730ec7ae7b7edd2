"""Callers on event loops and in many threads: results, errors, cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest

from bei import Model, Report
from bei.errors import EmptyInputError, InvalidRequestError, ShuttingDownError
from tests.bei.offline.conftest import OpenModel
from tests.bei.offline.given import expected, own_threads, texts
from tests.e2e.process import wait_until
from tests.support.artifacts import LIMITS
from tests.support.engines import GatedEngine
from tests.support.services import entered, run_async


def nothing_is_left(model: Model) -> bool:
    """True if no request is open and no sequence waits."""
    service = model._runner.service
    return service.num_open == 0 and service.num_waiting == 0


def test_a_running_event_loop_may_call_either_form(model: Model) -> None:
    given = texts(1500)

    async def test() -> None:
        vectors = await model.aembed(given)
        np.testing.assert_allclose(vectors, expected(given), rtol=1e-6)
        np.testing.assert_array_equal(model.embed(given), vectors)  # as in a notebook

    run_async(test)


def test_the_loop_goes_on_while_a_call_waits(open_model: OpenModel) -> None:
    engine = GatedEngine(LIMITS)
    model = open_model(engine)

    async def test() -> None:
        calls = [asyncio.ensure_future(model.aembed(texts(count))) for count in (1, 20, 600)]
        await entered(engine)
        assert not any(call.done() for call in calls)
        engine.open()
        for vectors, count in zip(await asyncio.gather(*calls), (1, 20, 600), strict=True):
            np.testing.assert_allclose(vectors, expected(texts(count)), rtol=1e-6)

    run_async(test)


def test_asynchronous_streams_read_either_kind_of_source(model: Model) -> None:
    given = texts(500)

    async def source() -> AsyncIterator[str]:
        for text in given:
            await asyncio.sleep(0)
            yield text

    async def test() -> None:
        for inputs in (given, iter(given), source()):
            report = Report()
            chunks = [chunk async for chunk in model.aembed_iter(inputs, chunk_size=200, report=report)]
            assert [chunk.start for chunk in chunks] == [0, 200, 400]
            assert report.num_inputs == 500
            found = np.concatenate([chunk.results for chunk in chunks])
            np.testing.assert_allclose(found, expected(given), rtol=1e-6)

    run_async(test)


@pytest.mark.parametrize("count", [1, 600, 6000])
def test_work_that_is_cancelled_is_given_back(open_model: OpenModel, count: int) -> None:
    engine = GatedEngine(LIMITS)
    model = open_model(engine)

    async def test() -> None:
        call = asyncio.ensure_future(model.aembed(texts(count)))
        await entered(engine)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await asyncio.get_running_loop().run_in_executor(
            None, wait_until, lambda: nothing_is_left(model), "all of it is given back"
        )
        engine.open()
        assert (await model.aembed(["cat"])).shape == (1, 8)

    run_async(test)


def test_a_stream_that_is_left_gives_back_what_it_had(open_model: OpenModel) -> None:
    engine = GatedEngine(LIMITS)
    model = open_model(engine)
    engine.open()

    async def test() -> None:
        stream = model.aembed_iter(texts(6000))
        async with aclosing(stream):  # type: ignore[type-var]
            async for chunk in stream:
                assert chunk.start == 0
                break
        await asyncio.get_running_loop().run_in_executor(
            None, wait_until, lambda: nothing_is_left(model), "all of it is given back"
        )

    run_async(test)


def test_errors_are_those_of_the_other_form(model: Model) -> None:
    async def test() -> None:
        for wrong in ([], ["a", ""], [*texts(1200), ""]):
            with pytest.raises(EmptyInputError):
                await model.aembed(wrong)
        with pytest.raises(InvalidRequestError, match="dimensions"):
            await model.aembed(["a"], dimensions=99)

    run_async(test)


def test_a_model_is_an_asynchronous_context_too(open_model: OpenModel) -> None:
    engine = GatedEngine(LIMITS)

    async def test() -> None:
        async with open_model(engine) as model:
            call = asyncio.ensure_future(model.aembed(texts(600)))
            await entered(engine)
            asyncio.get_running_loop().call_later(0.01, engine.open)
        with pytest.raises(ShuttingDownError, match="closed"):
            await call
        assert not own_threads()

    run_async(test)


def test_many_threads_share_a_model(model: Model) -> None:
    def call(number: int) -> tuple[list[str], Any]:
        given = texts(1 + 37 * number % 400)[-1 - number % 30 :]
        return given, model.embed(given)

    with ThreadPoolExecutor(16) as threads:
        for given, vectors in threads.map(call, range(100)):
            np.testing.assert_allclose(vectors, expected(given), rtol=1e-6)


def test_every_method_has_its_twin() -> None:
    methods = {name for name in vars(Model) if not name.startswith("_")} - {"name", "manifest", "certificate"}
    synchronous = {name for name in methods if f"a{name}" in methods}
    of_the_library = {"encode", "encode_query", "encode_document", "similarity", "similarity_pairwise"}  # has none
    assert methods - synchronous - of_the_library == {f"a{name}" for name in synchronous}
