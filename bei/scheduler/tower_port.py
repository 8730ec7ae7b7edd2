"""The engine port of a model with two towers: texts go to one engine, images or labels to the other; and images that
a decoder reads go from the one to the other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from collections.abc import Sequence as Seq

import msgspec

from bei.core import Encoding
from bei.errors import BeiError
from bei.port import LANES, STATES, Answer, EnginePort, Item, OnAnswers, PortStats, Submission


class TowerPort:
    """Implements ``EnginePort`` over two, which share a device: work of both is one model's.

    ``open_texts`` and ``open_second`` make the two. A submission is for one of them, but for images that a decoder
    reads: the second engine's states of these are submitted to the first.
    """

    def __init__(
        self,
        open_texts: Callable[[OnAnswers], EnginePort],
        open_second: Callable[[OnAnswers], EnginePort],
        on_answers: OnAnswers,
    ) -> None:
        answering = threading.Lock()

        def in_turn(answers: Seq[Answer]) -> None:
            with answering:
                on_answers(answers)

        self._on_answers = in_turn
        self._lock = threading.Lock()
        # Images whose states are computed, by request and place, each with the submission that it came with.
        self._in_tower: dict[int, dict[int, tuple[Encoding, Submission]]] = {}
        self._second = open_second(self._on_second)
        try:
            self._texts = open_texts(in_turn)
        except BaseException:  # raised again: the other engine's threads would outlive this
            self._second.close()
            raise

    def submit(self, submission: Submission) -> None:
        """As ``EnginePort`` has it."""
        first = submission.items[0].encoding
        if not first.is_for_second:
            self._texts.submit(submission)
        elif first.image is None or first.image.places is None:
            self._second.submit(submission)
        else:
            self._submit_to_tower(submission)

    def cancel(self, request_id: int) -> None:
        """As ``EnginePort`` has it."""
        with self._lock:
            self._in_tower.pop(request_id, None)
        self._second.cancel(request_id)
        self._texts.cancel(request_id)

    def stats(self) -> PortStats:
        """The state of both together. Each engine waits for the other's steps: what these take is in the sums, so it is
        no slowdown."""
        texts, second = self._texts.stats(), self._second.stats()
        both = texts.is_busy and second.is_busy
        slowdown = max(texts.slowdown, second.slowdown) - (1 / texts.num_streams if both else 0.0)
        return PortStats(
            lanes={lane: texts.lanes[lane].plus(second.lanes[lane]) for lane in LANES},
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

    def close(self) -> None:
        """As ``EnginePort`` has it."""
        self._second.close()  # first: what it answers may be for the other
        self._texts.close()

    def _submit_to_tower(self, submission: Submission) -> None:
        """Images that a decoder reads."""
        own = [Item(place, encoding.of_tower) for place, encoding in submission.items]
        with self._lock:
            waiting = self._in_tower.setdefault(submission.request_id, {})
            waiting.update({place: (encoding, submission) for place, encoding in submission.items})
        try:
            self._second.submit(msgspec.structs.replace(submission, items=own, outputs=frozenset((STATES,))))
        except BeiError:
            self._forget(submission.request_id, [place for place, _ in own])
            raise

    def _on_second(self, answers: Seq[Answer]) -> None:
        """Send on the answers of the second engine: states that a decoder reads to it, others to the service."""
        done: list[Answer] = []
        read: dict[int, list[tuple[Item, Submission]]] = {}
        for answer in answers:
            with self._lock:
                found = self._in_tower.get(answer.request_id, {}).get(answer.place)
            if found is None or isinstance(answer.result, BeiError):
                self._forget(answer.request_id, [answer.place])
                done.append(answer)
                continue
            encoding, submission = found
            item = Item(answer.place, encoding.with_features(answer.result[STATES]))
            read.setdefault(id(submission), []).append((item, submission))
        for pairs in read.values():
            done += self._submit_read([item for item, _ in pairs], pairs[0][1])
        if done:
            self._on_answers(done)

    def _submit_read(self, items: list[Item], submission: Submission) -> list[Answer]:
        """Submit images with their states to the decoder. Returns answers where it takes none."""
        request_id = submission.request_id
        try:
            self._texts.submit(msgspec.structs.replace(submission, items=items))
        except BeiError as error:
            self._forget(request_id, [item.place for item in items])
            return [Answer(request_id, item.place, error) for item in items]
        if not self._forget(request_id, [item.place for item in items]):  # cancelled meanwhile
            self._texts.cancel(request_id)
        return []

    def _forget(self, request_id: int, places: Seq[int]) -> bool:
        """Of images that are no longer in the tower; False if the request was cancelled before."""
        with self._lock:
            waiting = self._in_tower.get(request_id)
            if waiting is None:
                return False
            for place in places:
                waiting.pop(place, None)
            if not waiting:
                del self._in_tower[request_id]
            return True
