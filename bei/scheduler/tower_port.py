"""The engine port of a model with two towers: texts go to one engine, images or labels to the other; and images that
a decoder reads go from the one to the other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from collections.abc import Sequence as Seq

import msgspec
import numpy as np

from bei.artifact.image_sequence import MOST_IMAGES
from bei.errors import BeiError
from bei.metrics.registry import ModelMetrics
from bei.port import LANES, STATES, Answer, EnginePort, Item, Lane, LaneStats, OnAnswers, PortStats, Submission
from bei.scheduler.image_bounds import BoundedInput, BoundedInputs, ImageReading, InputStage, by_submission


class TowerPort:
    """Implements ``EnginePort`` over two, which share a device: work of both is one model's.

    ``open_texts`` and ``open_second`` make the two. A submission is for one of them, but for images that a decoder
    reads: the second engine's states of these are submitted to the first. ``reading``: how it reads them; None: none
    does. What would have too many bytes of states at a time is held back from the second engine (``image_bounds``), and
    ``metrics`` counts it as waiting. The second engine's places are numbers of images: MOST_IMAGES for each input.
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
        self._inputs = BoundedInputs()
        self._second = open_second(self._on_second)
        try:
            self._texts = open_texts(self._on_texts)
        except BaseException:  # raised again: the other engine's threads would outlive this
            self._second.close()
            raise
        if metrics is not None:
            metrics.watch_held(self.held)

    def submit(self, submission: Submission) -> None:
        first = submission.items[0].encoding
        if first.images:
            self._submit_with_images(submission)
        else:
            (self._second if first.is_for_second else self._texts).submit(submission)

    def cancel(self, request_id: int) -> None:
        with self._lock:
            self._inputs.cancel(request_id)
        self._second.cancel(request_id)
        self._texts.cancel(request_id)
        self._answer(self._submit_admitted())

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
            step_cap_s=max(texts.step_cap_s, second.step_cap_s),
            overtaking=max(texts.overtaking, second.overtaking),
            device=texts.device,
            num_streams=texts.num_streams,
            unshared=texts.unshared,
        )

    def held(self) -> dict[Lane, LaneStats]:
        """The part of ``stats().lanes`` that neither engine's port has."""
        with self._lock:
            return self._inputs.lanes()

    def close(self) -> None:
        with self._lock:
            self._inputs.is_bounded = False
        self._answer(self._submit_admitted())
        self._second.close()  # first: what it answers may be for the other
        self._texts.close()
        if self._metrics is not None:
            self._metrics.forget_held(self.held)

    def _submit_with_images(self, submission: Submission) -> None:
        """A submission whose inputs have images that a decoder reads."""
        assert self._reading is not None, "the model has a decoder that reads images"
        inputs = [BoundedInput(place, encoding, submission, self._reading) for place, encoding in submission.items]
        with self._lock:
            self._inputs.add(inputs)
        if refused := self._ask(submission, inputs):
            error = refused[0].result
            assert isinstance(error, BeiError)
            raise error

    def _ask(self, submission: Submission, inputs: Seq[BoundedInput]) -> list[Answer]:
        """Ask the decoder for what it knows: then the tower need not compute states. Returns answers where it takes
        none."""
        assert self._reading is not None, "the model has a decoder that reads images"
        nothing = np.zeros((0, self._reading.width), np.float32)
        items = [Item(one.place, one.encoding.with_features([nothing] * len(one.states))) for one in inputs]
        return self._submit_to(self._texts, msgspec.structs.replace(submission, items=items, is_probe=True), inputs)

    def _compute(self, submission: Submission, inputs: Seq[BoundedInput]) -> list[Answer]:
        """Submit the images of ``inputs`` to the tower. Returns answers where it takes none."""
        items = [
            Item(one.place * MOST_IMAGES + number, encoding)
            for one in inputs
            for number, encoding in enumerate(one.encoding.of_tower)
        ]
        asked = msgspec.structs.replace(submission, items=items, outputs=frozenset((STATES,)))
        return self._submit_to(self._second, asked, inputs)

    def _submit_admitted(self) -> list[Answer]:
        """Submit what is no longer held back. Returns answers where a port takes none."""
        refused: list[Answer] = []
        while True:
            with self._lock:
                unknown, known = self._inputs.admit()
            if not unknown and not known:
                return refused
            for submission, inputs in by_submission(unknown):
                refused += self._compute(submission, inputs)
            for submission, inputs in by_submission(known):
                refused += self._ask(submission, inputs)

    def _submit_to(self, port: EnginePort, submission: Submission, inputs: Seq[BoundedInput]) -> list[Answer]:
        """Submit ``inputs``. Returns answers where ``port`` takes none."""
        request_id = submission.request_id
        try:
            port.submit(submission)
        except BeiError as error:
            with self._lock:
                self._inputs.settle(inputs)
            return [Answer(request_id, one.place, error) for one in inputs]
        if any(one.is_cancelled for one in inputs):  # meanwhile
            port.cancel(request_id)
        return []

    def _on_second(self, answers: Seq[Answer]) -> None:
        """Send on the answers of the second engine: states that a decoder reads to it, others to the service."""
        if self._reading is None:
            self._answer(answers)
            return
        done: list[Answer] = []
        read: dict[BoundedInput, Item] = {}
        with self._lock:
            for answer in answers:
                place, number = divmod(answer.place, MOST_IMAGES)
                one = self._inputs.find(answer.request_id, place)
                if one is None:  # cancelled meanwhile, or another image of the input has failed
                    continue
                if isinstance(answer.result, BeiError):
                    self._inputs.settle([one])
                    done.append(answer._replace(place=place))
                elif (encoding := one.add_states(number, answer.result[STATES])) is not None:
                    self._inputs.read(one)
                    read[one] = Item(place, encoding)
        for submission, inputs in by_submission(read):
            asked = msgspec.structs.replace(submission, items=[read[one] for one in inputs])
            done += self._submit_to(self._texts, asked, inputs)
        self._answer(done + self._submit_admitted())

    def _on_texts(self, answers: Seq[Answer]) -> None:
        """Send on the answers of the first engine. Images of inputs that it does not know yet go to the second one."""
        if self._reading is None:
            self._answer(answers)
            return
        done: list[Answer] = []
        admitted: list[BoundedInput] = []
        with self._lock:
            for answer in answers:
                one = self._inputs.find(answer.request_id, answer.place)
                if answer.result:
                    self._inputs.settle([] if one is None else [one])
                    done.append(answer)
                elif one is None:  # cancelled meanwhile
                    continue
                elif one.stage is InputStage.ADMITTED:
                    admitted.append(one)
                else:
                    self._inputs.hold(one)
        for submission, inputs in by_submission(admitted):
            done += self._compute(submission, inputs)
        self._answer(done + self._submit_admitted())

    def _answer(self, answers: Seq[Answer]) -> None:
        if answers:
            self._on_answers(answers)
