"""A service whose model has two towers: which lane an image has, and what is known of the work of both."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families

from bei.artifact.image_processor import ImageProcessor, PixelBounds
from bei.artifact.image_sequence import ImageSequence
from bei.config.settings import ServeConfig
from bei.core import Encoding, ImagePatches, Limits
from bei.engine.fake import FakeEngine
from bei.errors import ShuttingDownError
from bei.image.decode import ImageLimits
from bei.image.encoder import ImageEncoder
from bei.image.source import ImageInput, ImagesInText
from bei.metrics.registry import Metrics
from bei.port import Item, Lane, Submission
from bei.scheduler.cost_model import CostModel
from bei.scheduler.device_gate import DeviceGate
from bei.service.admission import Demand
from bei.service.call import ModelRequest
from bei.service.decoding_turns import DecodingTurns
from bei.service.image_side import ImageSide
from bei.service.loader import LoadedTower, encoder_of, local_port, tower_port
from bei.service.pixel_memory import PixelMemory
from bei.service.pixel_port import PixelPort
from bei.service.readers import InputReaders
from bei.service.service import InferenceService
from tests.support.artifacts import LIMITS, save_artifact
from tests.support.engines import GatedEngine
from tests.support.services import entered, run_async
from tests.support.two_towers import data_url, png

COSTS = CostModel.assumed(LIMITS)
IMAGE = ImageInput(b"", "input")
LONG = "cat " * 100  # cut to 16 tokens


def page_side(bounds: PixelBounds | msgspec.UnsetType = msgspec.UNSET) -> ImageSide:
    """Of images with 1,030 tokens, as ColPali's have, or with ``bounds`` of as many as their sizes say."""
    processor = ImageProcessor(
        shortest_edge=None,
        resize=None if bounds else (448, 448),
        bounds=bounds,
        resample="bicubic",
        crop=None,
        rescale=1 / 255,
        mean=(0.5,) * 3,
        std=(0.5,) * 3,
    )
    merged = 2 if bounds else msgspec.UNSET
    sequence = ImageSequence(before=[1] * 3, token_id=2, after=[3] * 3, width=8, merged_side=merged)
    limits = ImageLimits(max_bytes=1_000_000, max_pixels=1_000_000)
    encoder = ImageEncoder(processor, (448, 448), 14, num_leading=0, limits=limits, sequence=sequence)
    return ImageSide(encoder, COSTS, (448, 448), COSTS, 8)


def two_towers(
    folder: Path,
    metrics: Metrics,
    texts: FakeEngine,
    images: FakeEngine,
    interactive_tokens: int = 1024,
    side: ImageSide | None = None,
) -> InferenceService:
    config = ServeConfig(tokenizer_threads=1, interactive_tokens=interactive_tokens)
    artifact, side, gate = save_artifact(folder / "tiny"), side or page_side(), DeviceGate()
    port = tower_port(local_port(texts, COSTS, config, gate), local_port(images, COSTS, config, gate), side)
    return InferenceService(artifact, encoder_of(artifact, config), config, metrics, port, COSTS, second=side)


@pytest.mark.parametrize(
    ("inputs", "lane"),
    [
        ([IMAGE], "interactive"),
        ([IMAGE, "cat"], "interactive"),
        ([IMAGE, LONG, LONG], "bulk"),
        ([IMAGE, IMAGE], "bulk"),
        ([LONG], "interactive"),
        ([LONG, LONG], "bulk"),
    ],
    ids=["image", "image-text", "image-texts", "images", "text", "texts"],
)
def test_one_image_is_interactive_however_many_tokens_it_has(
    inputs: list[str | ImageInput], lane: Lane, tmp_path: Path
) -> None:
    """A single page was bulk by default: its 1,030 tokens were more than the 1,024 of an interactive request."""

    async def test() -> None:
        service = two_towers(tmp_path, Metrics(), FakeEngine(LIMITS), FakeEngine(LIMITS), interactive_tokens=20)
        for admit in (service.admit, service.accept):
            with admit(inputs) as ticket:
                assert ticket.lane == lane
                assert ticket.admitted.num_tokens >= 1030 * inputs.count(IMAGE)
        service.close()

    run_async(test)


def test_an_image_of_many_sizes_is_admitted_by_its_own() -> None:
    """By the largest size a thumbnail was refused for a deadline that it keeps, and two of them were bulk."""
    costs = CostModel.assumed(Limits(8192, 8, 8192))
    side = page_side(PixelBounds(fewest=4 * 28**2, most=1800 * 28**2, multiple=28))
    side = replace(side, costs=costs, decoder_costs=costs)
    sizes = [(56, 56), (280, 140), (4000, 3000)]
    images = [ImageInput(data_url(png(*size))) for size in sizes]
    encodings = side.encoder.encode(images[:2])
    assert [side.demand([one]).num_tokens for one in images[:2]] == [one.num_tokens for one in encodings] == [10, 56]
    most, (small, _, large) = side.demand([IMAGE]), [side.demand([one]) for one in images]
    assert 1700 < large.num_tokens <= 1806 <= most.num_tokens  # of one whose header says nothing the most
    assert small.seconds < large.seconds / 4
    both = side.demand(images)
    assert (both.num_tokens, both.image_tokens) == (10 + 56 + large.num_tokens, large.num_tokens)
    stripe, none = ImageInput(png(1, 4000)), ImageInput("https://a.example/b.png")
    assert side.demand([stripe]).num_tokens == side.demand([none]).num_tokens == most.num_tokens


def test_the_header_of_an_image_that_is_there_many_times_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A query's, that stands in a pair with each document: 64 kB were decoded for each on the event loop."""
    side, read = page_side(), []

    def num_states(_: ImageEncoder, image: ImageInput) -> int:
        read.append(image)
        return 1024

    monkeypatch.setattr(ImageEncoder, "num_states", num_states)
    assert side.demand([IMAGE] * 1000 + [ImageInput(b"", "input")]).num_tokens == 1001 * 1030
    assert len(read) == 2


def test_of_very_many_images_the_headers_of_some_stand_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of 8 MB held the event loop for half a second."""
    side, read = page_side(), []

    def num_states(_: ImageEncoder, image: ImageInput) -> int:
        read.append(image)
        return 2048 if image.content == b"large" else 1024

    monkeypatch.setattr(ImageEncoder, "num_states", num_states)
    images = [ImageInput(b"large" if place % 4 else b"small", "input") for place in range(20_000)]
    exact = sum(side.demand([image]).num_tokens for image in images[:4]) * 5_000
    read.clear()
    assert side.demand(images).num_tokens == pytest.approx(exact, rel=0.1)
    assert len(read) == 1_000


def test_of_very_many_pairs_with_images_some_stand_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """16,384 pairs with a query of 64 images, 100 kB of a body, held the event loop for half a second."""
    side, seen, demand = page_side(), [], ImageSide.demand

    def counted(self: ImageSide, images: Sequence[ImageInput]) -> Demand:
        seen.append(len(images))
        return demand(self, images)

    monkeypatch.setattr(ImageSide, "demand", counted)
    readers = InputReaders("model", None, side, 512, 1)
    try:
        query, pieces = [ImageInput(b"") for _ in range(64)], (("a" * 36,),)  # 12 tokens
        pairs = [ImagesInText((pieces,), (*query, *query[: place % 3])) for place in range(6_000)]
        found = readers.demand(lambda lengths: Demand(sum(lengths), 0.0), pairs, whole=False)
    finally:
        readers.close()
    assert seen[0] <= 500 * 66
    assert found.num_tokens == pytest.approx(6_000 * (12 + 65 * 1030), rel=0.01)
    assert found.seconds == pytest.approx(6_000 * side.demand([IMAGE] * 65).seconds, rel=0.01)
    assert found.image_tokens == 1030


def tile_side(most_bytes: int) -> ImageSide:
    """Of images of two by two patches, 2,352 bytes, ``most_bytes`` of which may wait."""
    processor = ImageProcessor(
        shortest_edge=None, resize=(28, 28), resample="bicubic", crop=None, rescale=1.0, mean=(0.0,) * 3, std=(1.0,) * 3
    )
    limits = ImageLimits(max_bytes=1_000_000, max_pixels=1_000_000)
    encoder = ImageEncoder(processor, (28, 28), 14, num_leading=0, limits=limits)
    return ImageSide(encoder, COSTS, (28, 28), turns=DecodingTurns(memory=PixelMemory(most_bytes)))


def tiles(count: int) -> ModelRequest:
    """Images that differ."""
    return ModelRequest([ImageInput(Image.new("RGB", (28, 28), (place, 0, 0))) for place in range(count)])


async def held(side: ImageSide, num_bytes: int) -> None:
    """Return when images of so many bytes wait."""
    while side.turns.memory.num_bytes < num_bytes:  # noqa: ASYNC110
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("ends", ["answered", "cancelled"])
def test_images_are_decoded_as_the_engine_takes_them(ends: str, tmp_path: Path) -> None:
    """2 MB of small files were 2.4 GB of pixels, which waited for the engine."""

    async def test() -> None:
        images, side = GatedEngine(LIMITS), tile_side(5_000)
        service = two_towers(tmp_path, Metrics(), FakeEngine(LIMITS), images, side=side)
        request = tiles(40)
        with service.admit(request.inputs) as ticket:
            task = asyncio.ensure_future(service.infer(request, ticket=ticket, outputs={"embedding"}))
            await entered(images)
            await held(side, 5_000)
            await asyncio.sleep(0.3)  # time for the thread to go on, where it is not stopped
            assert 5_000 <= side.turns.memory.num_bytes < 5_000 + 2 * 2_352  # each of two threads has one at hand
            if ends == "cancelled":
                task.cancel()
                await asyncio.wait([task])
                assert side.turns.memory.num_bytes == 0
            images.open(100)
            if ends == "answered":
                assert len((await task).rows) == 40
        (row,) = (await service.infer(tiles(1), ticket=service.admit(tiles(1).inputs), outputs={"embedding"})).rows
        assert row
        assert side.turns.memory.num_bytes == 0
        service.close()

    run_async(test)


def test_images_that_wait_for_room_hold_up_no_single_ones(tmp_path: Path) -> None:
    async def test() -> None:
        images, side = GatedEngine(LIMITS), tile_side(5_000)
        service = two_towers(tmp_path, Metrics(), FakeEngine(LIMITS), images, side=side)
        many, one = tiles(40), tiles(41)
        one = ModelRequest(one.inputs[-1:])
        with service.admit(many.inputs, lane="bulk") as ticket, service.admit(one.inputs, lane="interactive") as first:
            task = asyncio.ensure_future(service.infer(many, ticket=ticket, outputs={"embedding"}))
            await entered(images)
            await held(side, 5_000)
            single = asyncio.ensure_future(service.infer(one, ticket=first, outputs={"embedding"}))
            await held(side, 5_000 + 2_352)  # read, though there is no room
            images.open(100)
            await asyncio.gather(task, single)
        service.close()

    run_async(test)


@pytest.mark.parametrize("target", ["cpu", "tensorrt"])
def test_decoding_takes_turns_with_engines_on_the_host_s_cores_alone(target: str) -> None:
    """A GPU would get smaller steps, and nothing for them."""
    side, engine = tile_side(5_000), FakeEngine(LIMITS)
    engine.info = replace(engine.info, target=target)
    found = LoadedTower(side, engine, None).side_at(DeviceGate())
    assert isinstance(found, ImageSide)
    assert (found.turns is side.turns) == (target != "cpu")


@pytest.mark.parametrize("error", [ShuttingDownError("closed"), OSError("a socket's")])
def test_what_a_port_refuses_does_not_stay_counted(error: Exception) -> None:
    class Closed:
        def submit(self, submission: Submission) -> None:
            raise error

    memory = PixelMemory()
    opened: Any = lambda on_answers, metrics: Closed()  # noqa: E731
    port = PixelPort(opened, DecodingTurns(memory=memory), lambda answers: None, None)  # type: ignore[arg-type]
    patches = ImagePatches(np.zeros((2, 12), np.uint8), b"", (1, 2))
    with pytest.raises(type(error)):
        port.submit(Submission(1, "bulk", frozenset(), [Item(0, Encoding(np.zeros(2, np.int32), image=patches))]))
    assert memory.num_bytes == 0


def test_a_place_that_is_submitted_again_is_counted_once() -> None:
    memory = PixelMemory()
    patches = ImagePatches(np.zeros((2, 12), np.uint8), b"", (1, 2))
    for _ in range(2):
        memory.keep(1, [Item(0, Encoding(np.zeros(2, np.int32), image=patches))])
    assert memory.num_bytes == 24
    memory.release(1)
    assert memory.num_bytes == 0


def test_the_gauge_of_waits_is_for_the_work_of_both_towers(tmp_path: Path) -> None:
    """It was for that of texts alone, where requests are admitted by both."""

    async def test() -> None:
        metrics, images = Metrics(), GatedEngine(LIMITS)
        service = two_towers(tmp_path, metrics, FakeEngine(LIMITS), images)
        for place in range(3):
            patches = ImagePatches(np.full((2, 12), place, np.uint8), bytes([place]), (1, 2))
            items = [Item(place, Encoding(np.zeros(2, np.int32), image=patches))]
            service._port.submit(Submission(1, "bulk", frozenset({"embedding"}), items))
            if not place:
                await entered(images)
        families = text_string_to_metric_families(metrics.render().decode())
        waits_s = next(family.samples for family in families if family.name == "bei_drain_seconds")
        found = {sample.labels["lane"]: sample.value for sample in waits_s}
        assert found["bulk"] >= service._port.stats().lanes["bulk"].cost_s > 0  # two images wait behind one
        images.open()
        service.close()
        families = text_string_to_metric_families(metrics.render().decode())
        assert {s.value for family in families if family.name == "bei_drain_seconds" for s in family.samples} == {0.0}

    run_async(test)


def test_an_image_that_several_inputs_have_is_counted_once_while_it_waits() -> None:
    """A query's image was counted for each of its documents: 50 pairs stood for all the memory there is."""
    memory, encoder = PixelMemory(), page_side().encoder
    query, page = (encoder.encode([ImageInput(png(10 + place, 10))])[0].images[0] for place in range(2))
    ids = np.zeros(2100, np.int32)
    pairs = [Encoding(ids, images=(query,)), Encoding(ids, images=(query, page)), Encoding(ids, images=(page, page))]
    size = query.patches.levels.nbytes
    memory.keep(1, [Item(place, one) for place, one in enumerate(pairs[:2])])
    memory.keep(1, [Item(2, pairs[2])])
    assert memory.num_bytes == 2 * size
    memory.release(1, [0])
    assert memory.num_bytes == 2 * size
    memory.release(1, [1])
    assert memory.num_bytes == size
    memory.keep(1, [Item(2, pairs[0])])  # submitted again
    assert memory.num_bytes == size
    memory.release(1)
    assert memory.num_bytes == 0


def test_headers_are_read_once_a_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At admission, and not again for each pair or chunk that has the image."""
    read: list[ImageInput] = []
    num_states = ImageEncoder.num_states

    def reading(encoder: ImageEncoder, image: ImageInput) -> int:
        read.append(image)
        return num_states(encoder, image)

    monkeypatch.setattr(ImageEncoder, "num_states", reading)

    async def test() -> None:
        service = two_towers(tmp_path, Metrics(), FakeEngine(LIMITS), FakeEngine(LIMITS), side=tile_side(1 << 20))
        request = tiles(70)
        with service.admit(request.inputs) as ticket:
            assert len((await service.infer(request, ticket=ticket, outputs={"embedding"})).rows) == 70
        assert len(read) == 70
        service.close()

    run_async(test)
