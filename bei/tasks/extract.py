"""Spans of texts for labels that a request brings (GLiNER, arXiv:2311.08526, section 2.2).

A text of more words than the model reads at once is read in windows. They overlap by a quarter, at least by the longest
span, so that each span lies in one of them whole; of a span in two windows the higher score counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from bei.artifact.manifest import Extraction
from bei.core import Encoding, Float32Array
from bei.engine.postprocess import apply_function
from bei.engine.words import WORD, kinds_of, num_words, word_numbers
from bei.errors import InvalidRequestError
from bei.service.admission import Ticket
from bei.service.call import ModelRequest
from bei.service.model_service import ModelService
from bei.tasks.support import PartialResult, off_loop_if_large, require
from bei.tokenizer.encoder import EncodingOptions
from bei.tokenizer.label_prompt import LabelPrompt, word_spans

THRESHOLD = 0.5  # of the gliner library


class ExtractTask(ModelRequest, frozen=True, kw_only=True):
    """Texts, and labels to find spans for. ``thresholds``: of each label; spans score above it. ``flat``: spans do not
    overlap, else they may lie inside each other. ``multi_label``: a span may have several labels."""

    labels: tuple[str, ...]
    thresholds: tuple[float, ...]
    flat: bool = True
    multi_label: bool = False


class Span(NamedTuple):
    """What stands at ``start`` to ``end`` (one past its last character, in code points), its label and its score."""

    start: int
    end: int
    text: str
    label: str
    score: float


class Spans(PartialResult, frozen=True, kw_only=True):
    """The spans of each text, in its order. ``lengths``: tokens of each text's windows, with the labels of each."""

    spans: list[list[Span]]


class _Window(NamedTuple):
    """Words ``first`` to ``stop`` of text number ``text``."""

    text: int
    first: int
    stop: int


class _Candidates(msgspec.Struct):
    """Of one text: the score of each span (first word, last word) and label above its threshold."""

    scores: dict[tuple[int, int, int], float] = {}


def checked_labels(labels: Seq[str], threshold: float | Mapping[str, float], most: int) -> tuple[float, ...]:
    """The threshold of each label. ``most``: tokens that the model reads. Raises InvalidRequestError."""
    if not labels:
        raise InvalidRequestError("labels is empty: name what to find.", "labels")
    if len(labels) > most // 2:
        raise InvalidRequestError(
            f"There are {len(labels)} labels, of two tokens or more each, and the model reads {most}: send fewer.",
            "labels",
        )
    seen: dict[str, int] = {}
    for place, label in enumerate(labels):
        if not label.strip():
            raise InvalidRequestError(f"labels {place} is empty: name what to find, or leave it out.", "labels")
        if label in seen:
            raise InvalidRequestError(f"labels {place} is the same as labels {seen[label]}: leave one out.", "labels")
        seen[label] = place
    if isinstance(threshold, Mapping):
        if (unknown := next((name for name in threshold if name not in seen), None)) is not None:
            raise InvalidRequestError(f"threshold has {unknown!r}, which is none of the labels.", "threshold")
        found = tuple(float(threshold.get(label, THRESHOLD)) for label in labels)
    else:
        found = (float(threshold),) * len(labels)
    if not all(0 <= value <= 1 for value in found):
        raise InvalidRequestError("threshold must be from 0 to 1.", "threshold")
    return found


def extraction_of(service: ModelService) -> Extraction:
    """How the model reads labels and words. Raises TaskNotSupportedError."""
    require(service, "extract")
    layout = service.manifest.extraction
    assert isinstance(layout, Extraction)  # as the loader has checked
    return layout


async def extract(service: ModelService, task: ExtractTask, *, ticket: Ticket) -> Spans:
    """The spans of each text. Raises as ``ModelService.infer`` does, and InvalidRequestError for labels."""
    layout = extraction_of(service)
    texts = [str(text) for text in task.inputs]
    num_chars = sum(map(len, texts))
    words = await off_loop_if_large(lambda: [word_spans(text) for text in texts], num_chars)
    refused = frozenset(task.failed or ())
    found = [_Candidates(scores={}) for _ in texts]
    lengths = [0] * len(texts)
    errors = dict(task.failed or {})
    options = EncodingOptions(labels=LabelPrompt(task.labels, layout))
    thresholds = np.array(task.thresholds, np.float32)
    waiting = [
        window
        for index, spans in enumerate(words)
        if index not in refused
        for window in _windows(index, 0, len(spans), layout)
    ]
    while waiting:  # more than once where fewer words fit than the model was trained with
        inputs = [_text_of(texts[one.text], words[one.text], one) for one in waiting]
        request = ModelRequest(inputs, options, None if task.failed is None else {})
        answer = await service.infer(request, ticket=ticket, outputs={"span_logits"})
        rows = iter(answer.rows)
        left: list[_Window] = []
        for place, window in enumerate(waiting):
            if place in answer.errors:
                errors.setdefault(window.text, answer.errors[place])
                continue
            encoding = answer.encodings[place]
            lengths[window.text] += encoding.num_tokens
            scores = next(rows)["span_logits"]
            _collect(found[window.text], scores, encoding, window, thresholds, layout.max_width)
            read = window.first + _num_read(encoding)
            if read < window.stop:
                first = max(window.first + 1, read - min(_overlap(layout), _num_read(encoding) // 2))
                left += _windows(window.text, first, window.stop, layout)
        waiting = [window for window in left if window.text not in errors]

    def chosen() -> list[list[Span]]:
        return [
            [] if index in errors else list(_spans(one, text, places, task))
            for index, (one, text, places) in enumerate(zip(found, texts, words, strict=True))
        ]

    spans = await off_loop_if_large(chosen, sum(len(one.scores) for one in found) * 100)
    return Spans(lengths, [], errors, spans=spans)


def _overlap(layout: Extraction) -> int:
    return min(layout.max_words - 1, max(layout.max_width, layout.max_words // 4))


def _windows(index: int, first: int, stop: int, layout: Extraction) -> Iterator[_Window]:
    """Windows of words ``first`` to ``stop``: one, or several that overlap."""
    while first < stop:
        last = min(stop, first + layout.max_words)
        yield _Window(index, first, last)
        if last == stop:
            return
        first = last - _overlap(layout)


def _text_of(text: str, words: Seq[tuple[int, int]], window: _Window) -> str:
    """The window's part of ``text``, which has the same words."""
    return text[words[window.first][0] : words[window.stop - 1][1]]


def _num_read(encoding: Encoding) -> int:
    assert encoding.token_type_ids is not None
    return max(1, num_words(encoding.token_type_ids))


def _collect(
    found: _Candidates,
    logits: Float32Array,
    encoding: Encoding,
    window: _Window,
    thresholds: Float32Array,
    max_width: int,
) -> None:
    """Add the window's spans above their thresholds to ``found``. ``logits`` [tokens, columns]: by labels, then by
    widths, with further labels of other sequences behind."""
    types = encoding.token_type_ids
    assert types is not None
    starts, count = word_numbers(types), num_words(types)
    labels = len(thresholds)
    rows = logits[kinds_of(types) == WORD].reshape(len(starts), -1, max_width)[:, :labels]
    scores = apply_function(rows, "sigmoid")
    above: npt.NDArray[np.bool_] = scores > thresholds[:, None]
    above &= (starts[:, None] + np.arange(max_width) < count)[:, None, :]
    places = np.argwhere(above)
    for (word, label, width), score in zip(places.tolist(), scores[above].tolist(), strict=True):
        first = window.first + int(starts[word])
        key = (first, first + width, label)
        found.scores[key] = max(found.scores.get(key, 0.0), score)


def _spans(found: _Candidates, text: str, words: Seq[tuple[int, int]], task: ExtractTask) -> Iterator[Span]:
    """The candidates that are left when those are taken out that overlap a better one, in the text's order."""
    # Equal scores are ranked as the library's torch.where lists them: by first word, width and label.
    ranked = sorted(found.scores.items(), key=lambda item: (-item[1], item[0]))
    longest = max((last - first for first, last, _ in found.scores), default=0)
    kept: dict[int, list[tuple[int, int, int, float]]] = {}  # by first word
    for (first, last, label), score in ranked:
        near = range(first - longest, last + 1)
        if not any(_excludes(first, last, other, task) for place in near for other in kept.get(place, ())):
            kept.setdefault(first, []).append((first, last, label, score))
    for place in sorted(kept):
        for first, last, label, score in kept[place]:
            start, end = words[first][0], words[last][1]
            yield Span(start, end, text[start:end], task.labels[label], score)


def _excludes(first: int, last: int, other: tuple[int, int, int, float], task: ExtractTask) -> bool:
    if (first, last) == other[:2]:
        return not task.multi_label
    if first > other[1] or other[0] > last:
        return False
    is_nested = (first <= other[0] and last >= other[1]) or (other[0] <= first and other[1] >= last)
    return task.flat or not is_nested
