"""The engine port of a model with two towers: texts go to one engine, images or labels to the other; and images that
a decoder reads go from the one to the other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from collections.abc import Sequence as Seq

import msgspec

from bei.errors import BeiError
from bei.metrics.registry import ModelMetrics
from bei.port import LANES, STATES, Answer, EnginePort, Item, Lane, LaneStats, OnAnswers, PortStats, Submission
from bei.scheduler.image_bounds import BoundedImage, BoundedImages, ImageReading, by_submission


class TowerPort:
    """Implements ``EnginePort`` over two, which share a device: work of both is one model's.

    ``open_texts`` and ``open_second`` make the two. A submission is for one of them, but for images that a decoder
    reads: the second engine's states of these are submitted to the first. ``reading``: how it reads them; None: none
    does. What would have too many bytes of states at a time is held back from the second engine (``image_bounds``), and
    ``metrics`` counts it as waiting.
    """

    def __init__(
        self,
        open_texts: Callable[[OnAnswers], EnginePort],
        open_second: Callable[[OnAnswers], EnginePort],
        on_answers: OnAnswers,
        reading: ImageReading | None = None,
        metrics: ModelMetrics | None = None,
    ) -> None:
        answering = threading.Lock()

        def in_turn(answers: Seq[Answer]) -> None:
            with answering:
                on_answers(answers)

        self._on_answers = in_turn
        self._reading = reading
        self._metrics = metrics
        self._lock = threading.Lock()
        self._images = BoundedImages()
        self._second = open_second(self._on_second)
        try:
            self._texts = open_texts(self._on_texts)
        except BaseException:  # raised again: the other engine's threads would outlive this
            self._second.close()
            raise
        if metrics is not None:
            metrics.watch_held(self.held)

    def submit(self, submission: Submission) -> None:
        """As ``EnginePort`` has it."""
        first = submission.items[0].encoding
        if not first.is_for_second:
            self._texts.submit(submission)
        elif first.image is None or first.image.places is None:
            self._second.submit(submission)
        else:
            self._submit_images(submission)

    def cancel(self, request_id: int) -> None:
        """As ``EnginePort`` has it."""
        with self._lock:
            self._images.cancel(request_id)
        self._second.cancel(request_id)
        self._texts.cancel(request_id)
        self._answer(self._submit_ready())

    def stats(self) -> PortStats:
        """The state of both together. Each engine waits for the other's steps: what these take is in the sums, so it is
        no slowdown."""
        texts, second, held = self._texts.stats(), self._second.stats(), self.held()
        both = texts.is_busy and second.is_busy
        slowdown = max(texts.slowdown, second.slowdown) - (1 / texts.num_streams if both else 0.0)
        return PortStats(
            lanes={lane: texts.lanes[lane].plus(second.lanes[lane]).plus(held[lane]) for lane in LANES},
            num_running=texts.num_running + second.num_running,
            running_s=texts.running_s + second.running_s,
            slowdown=max(slowdown, 1 / texts.num_streams),
            interactive_share=min(1.0, texts.interactive_share + second.interactive_share),
            is_alive=texts.is_alive and second.is_alive,
            is_stalled=texts.is_stalled or second.is_stalled,
            is_busy=texts.is_busy or second.is_busy,
            last_step_s=max(texts.last_step_s, second.last_step_s),
            step_cap_s=min(texts.step_cap_s, second.step_cap_s),
            overtaking=max(texts.overtaking, second.overtaking),
            device=texts.device,
            num_streams=texts.num_streams,
            unshared=texts.unshared,
        )

    def held(self) -> dict[Lane, LaneStats]:
        """The part of ``stats().lanes`` that neither engine's port has."""
        with self._lock:
            return self._images.lanes()

    def close(self) -> None:
        """As ``EnginePort`` has it."""
        with self._lock:
            self._images.is_bounded = False
        self._answer(self._submit_ready())
        self._second.close()  # first: what it answers may be for the other
        self._texts.close()
        if self._metrics is not None:
            self._metrics.forget_held(self.held)

    def _submit_images(self, submission: Submission) -> None:
        """Images that a decoder reads."""
        assert self._reading is not None, "the model has a decoder that reads images"
        images = [BoundedImage(place, encoding, submission, self._reading) for place, encoding in submission.items]
        with self._lock:
            self._images.add(images)
        refused = self._submit_ready()
        own = [answer.result for answer in refused if answer.request_id == submission.request_id]
        if len(own) == len(images) and isinstance(own[0], BeiError):  # nothing was taken over
            self._answer([answer for answer in refused if answer.request_id != submission.request_id])
            raise own[0]
        self._answer(refused)

    def _submit_ready(self) -> list[Answer]:
        """Submit to the tower what is no longer held back. Returns answers where it takes none."""
        refused: list[Answer] = []
        while True:
            with self._lock:
                images = self._images.ready()
            if not images:
                return refused
            for submission, own in by_submission(images):
                items = [Item(image.place, image.encoding.of_tower) for image in own]
                asked = msgspec.structs.replace(submission, items=items, outputs=frozenset((STATES,)))
                refused += self._submit_to(self._second, asked, own)

    def _submit_to(self, port: EnginePort, submission: Submission, images: Seq[BoundedImage]) -> list[Answer]:
        """Submit ``images``. Returns answers where ``port`` takes none."""
        request_id = submission.request_id
        try:
            port.submit(submission)
        except BeiError as error:
            with self._lock:
                self._images.settle(images)
            return [Answer(request_id, image.place, error) for image in images]
        if any(image.is_cancelled for image in images):  # meanwhile
            port.cancel(request_id)
        return []

    def _on_second(self, answers: Seq[Answer]) -> None:
        """Send on the answers of the second engine: states that a decoder reads to it, others to the service."""
        done: list[Answer] = []
        read: dict[BoundedImage, Item] = {}
        with self._lock:
            for answer in answers:
                image = self._images.find(answer.request_id, answer.place)
                if image is None or isinstance(answer.result, BeiError):
                    self._images.settle([] if image is None else [image])
                    done.append(answer)
                else:
                    self._images.read(image)
                    read[image] = Item(answer.place, image.encoding.with_features(answer.result[STATES]))
        for submission, images in by_submission(read):
            asked = msgspec.structs.replace(submission, items=[read[image] for image in images])
            done += self._submit_to(self._texts, asked, images)
        self._answer(done + self._submit_ready())

    def _on_texts(self, answers: Seq[Answer]) -> None:
        """Answers of the first engine, also to images that it has read."""
        refused: list[Answer] = []
        if self._images:
            with self._lock:
                images = [self._images.find(answer.request_id, answer.place) for answer in answers]
                self._images.settle([image for image in images if image is not None and image.is_in_decoder])
            refused = self._submit_ready()
        self._answer([*answers, *refused])

    def _answer(self, answers: Seq[Answer]) -> None:
        if answers:
            self._on_answers(answers)
