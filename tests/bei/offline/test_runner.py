"""How a call reads its inputs: when chunks are given, and how many images are in flight."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

from bei.offline.input_checks import text_or_image
from bei.offline.method import ListCollector, Method, WindowResult
from bei.offline.runner import _RunningCall

_IMAGE_BYTES = 50 * 3 * 32**2  # of ViT-B/32


Answer: TypeAlias = "Future[WindowResult[str]]"


def call_of(source: Any, answers: list[Answer]) -> _RunningCall[Any, Any, Any]:
    """A call with chunks of four, whose answers are in ``answers``, not computed."""

    def submit(_: object) -> Answer:
        answers.append(Future())
        return answers[-1]

    manifest = SimpleNamespace(image_tower=SimpleNamespace(image_bytes=_IMAGE_BYTES))
    service = SimpleNamespace(manifest=manifest, estimated_lengths=lambda inputs, **_: [3] * len(inputs))
    runner: Any = SimpleNamespace(service=service, thread=SimpleNamespace(submit=submit))
    run: Any = None  # nothing is computed
    method = Method(name="embed", options={}, check=text_or_image, run=run, collector=ListCollector[str])
    return _RunningCall(runner, method, source, "bulk", 4)


def test_a_chunk_that_is_computed_does_not_wait_for_the_next_one() -> None:
    read = 0
    answers: list[Answer] = []

    def source() -> Iterator[str]:
        """While it waits for an input, what is under way is computed."""
        nonlocal read
        read = 0
        while True:
            read += 1
            while answers:
                answers.pop().set_result(WindowResult("part", 1, [], {}))
            yield "a text"

    async def live() -> AsyncIterator[str]:
        for text in source():
            yield text

    async def seen() -> list[tuple[int, int]]:
        chunks = call_of(live(), answers).async_chunks()
        return [((await anext(chunks)).start, read) for _ in range(2)]

    expected = [(0, 5), (4, 9)]
    assert [(chunk.start, read) for chunk in islice(call_of(source(), answers).chunks(), 2)] == expected
    answers.clear()
    assert asyncio.run(seen()) == expected


def test_images_in_flight_are_bounded_by_their_bytes_and_paths_are_not_read_for_it() -> None:
    cutter = call_of([], [])._cutter
    largest = cutter._bounds.tokens
    for given, held, num_inputs in ((Path("none.png"), 0, 4), (bytes(4_000_000), 4_000_000, 2)):
        window = None
        while window is None:
            window = cutter.add(given)
        assert len(window.inputs) == num_inputs
        assert window.num_tokens == len(window.inputs) * ((held + _IMAGE_BYTES) * largest // (64 << 20))
