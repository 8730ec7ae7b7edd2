"""Spans of texts for labels that a request brings (GLiNER, arXiv:2311.08526, section 2.2).

A text of more words than the model reads at once is read in windows. They overlap by a quarter, at least by the longest
span, so that each span lies in one of them whole (where spans may have any length, up to a quarter); of a span in two
windows the higher score counts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from functools import partial
from itertools import groupby
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np

from bei.artifact.label_layouts import Extraction
from bei.core import Encoding, Float32Array, LabelVectors
from bei.engine.words import num_words
from bei.errors import InvalidRequestError
from bei.service.admission import Ticket
from bei.service.call import InferenceResult, ModelRequest
from bei.service.model_service import ModelService
from bei.tasks.extract_labels import CheckedLabels, extraction_of
from bei.tasks.span_choice import Candidates, check_candidates, choose, collect
from bei.tasks.support import PartialResult, off_loop_if_large
from bei.tokenizer.encoder import EncodingOptions
from bei.tokenizer.label_encoder import LabelText, vectors_of
from bei.tokenizer.label_prompt import LOOKED_AHEAD, LabelPrompt, word_spans

# Candidates of all texts of a request, of which a text may have MOST_CANDIDATES.
MOST_OF_REQUEST = 1_000_000
_PER_CANDIDATE = 100  # as many numbers take as long


class ExtractTask(ModelRequest, frozen=True, kw_only=True):
    """Texts, and labels to find spans for, which score above their thresholds. ``flat``: spans do not overlap, else
    they may lie inside each other. ``multi_label``: a span may have several labels."""

    labels: CheckedLabels
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


# First word, last word, label and score.
_Choice: TypeAlias = tuple[int, int, int, float]


class _Window(NamedTuple):
    """Words ``first`` to ``stop`` of text number ``text``."""

    text: int
    first: int
    stop: int


async def extract(service: ModelService, task: ExtractTask, *, ticket: Ticket) -> Spans:
    """The spans of each text. Raises as ``ModelService.infer`` does, and InvalidRequestError for labels, and for too
    many spans above their thresholds."""
    layout = extraction_of(service)
    texts = [str(text) for text in task.inputs]
    num_chars = sum(map(len, texts)) * (LOOKED_AHEAD if layout.schema else 1)  # each is read so often, at most
    words = await off_loop_if_large(lambda: [word_spans(text, layout) for text in texts], num_chars)
    names = task.labels.names
    vectors = await _vectors(service, names, ticket) if layout.label_width is not msgspec.UNSET else None
    decoder = _Decoder(task, layout, texts, words)
    prompt = LabelPrompt(names, layout, vectors, described=task.labels.described(layout))
    options = EncodingOptions(labels=prompt)
    waiting = [
        window
        for index, spans in enumerate(words)
        if index not in decoder.errors
        for window in _windows(index, 0, len(spans), layout)
    ]
    while waiting:  # more than once where fewer words fit than the model was trained with
        inputs = [_text_of(texts[one.text], words[one.text], one) for one in waiting]
        request = ModelRequest(inputs, options, None if task.failed is None else {})
        answer = await service.infer(request, ticket=ticket, outputs={"span_logits"})
        most = sum(row["span_logits"].size for row in answer.rows)  # candidates
        waiting = await off_loop_if_large(partial(decoder.read, waiting, answer), most * _PER_CANDIDATE)
    return Spans(decoder.lengths, [], decoder.errors, spans=decoder.spans)


class _Decoder:
    """From the scores of windows to the spans of ``texts``. The candidates of a text are dropped with its last window.

    ``read`` raises InvalidRequestError for too many; of a partial answer the text has the error.
    """

    def __init__(
        self, task: ExtractTask, layout: Extraction, texts: Seq[str], words: Seq[Seq[tuple[int, int]]]
    ) -> None:
        self.lengths = [0] * len(texts)
        self.errors = dict(task.failed or {})
        self.spans: list[list[Span]] = [[] for _ in texts]
        self._task = task
        self._layout = layout
        self._texts = texts
        self._words = words
        self._thresholds = np.array(task.labels.thresholds, np.float32)
        self._found: defaultdict[int, Candidates] = defaultdict(dict)  # of texts with windows that are not read yet
        self._num_candidates = 0  # of those before

    def read(self, windows: Seq[_Window], answer: InferenceResult) -> list[_Window]:
        """The windows that are left of ``windows``, which were read only in part."""
        rows = iter(answer.rows)
        left: list[_Window] = []
        for text, places in groupby(range(len(windows)), lambda place: windows[place].text):
            begun = len(left)
            for place in places:
                if place in answer.errors:
                    self.errors.setdefault(text, answer.errors[place])
                else:
                    left += self._read(windows[place], answer.encodings[place], next(rows)["span_logits"])
            if text in self.errors:
                del left[begun:]
            if begun == len(left):
                self._choose(text)
        return left

    def _read(self, window: _Window, encoding: Encoding, logits: Float32Array) -> Iterator[_Window]:
        text, layout = window.text, self._layout
        self.lengths[text] += encoding.num_tokens
        places = range(window.first, window.stop)
        try:
            collect(self._found[text], logits, encoding, places, self._thresholds, layout)
        except InvalidRequestError as error:
            if self._task.failed is None:
                raise
            self.errors.setdefault(text, error)
        read = window.first + _num_read(encoding)
        if read < window.stop:
            first = max(window.first + 1, read - min(_overlap(layout), _num_read(encoding) // 2))
            yield from _windows(text, first, window.stop, layout)

    def _choose(self, text: int) -> None:
        found = self._found.pop(text, {})
        if text in self.errors:
            return
        self._num_candidates += len(found)
        if self._task.failed is None:
            check_candidates(self._num_candidates, MOST_OF_REQUEST, "the request")
        self.spans[text] = _spans(found, self._texts[text], self._words[text], self._task, self._layout)


async def _vectors(service: ModelService, labels: Seq[str], ticket: Ticket) -> LabelVectors:
    """Of the tower of labels, whose port keeps answers: a label that was asked lately is not computed."""
    request = ModelRequest([LabelText(label) for label in labels])
    answer = await service.infer(request, ticket=ticket, outputs={"embedding"})
    return vectors_of(np.stack([row["embedding"] for row in answer.rows]))


def _overlap(layout: Extraction) -> int:
    quarter = layout.max_words // 4
    return min(layout.max_words - 1, quarter if layout.by_word else max(layout.max_width, quarter))


def _windows(index: int, first: int, stop: int, layout: Extraction) -> Iterator[_Window]:
    """Windows of words ``first`` to ``stop``: one, or several that overlap."""
    while first < stop:
        last = min(stop, first + layout.max_words)
        yield _Window(index, first, last)
        if last == stop:
            return
        first = last - _overlap(layout)


def _text_of(text: str, words: Seq[tuple[int, int]], window: _Window) -> str:
    """The window's part of ``text``, which has the same words; the last one's to the text's end, whose blanks GLiNER2
    reads as one without a full stop."""
    return text[words[window.first][0] : words[window.stop - 1][1] if window.stop < len(words) else None]


def _num_read(encoding: Encoding) -> int:
    assert encoding.token_type_ids is not None
    return max(1, num_words(encoding.token_type_ids))


def _spans(
    found: Candidates, text: str, words: Seq[tuple[int, int]], task: ExtractTask, layout: Extraction
) -> list[Span]:
    apart = task.multi_label and bool(layout.schema)
    chosen = choose(found, flat=task.flat, multi_label=task.multi_label, by_word=layout.by_word, apart=apart)
    places = ((words[first][0], words[last][1], label, score) for first, last, label, score in _wanted(chosen, task))
    names = task.labels.names
    return [Span(start, end, text[start:end], names[label], score) for start, end, label, score in places]


def _wanted(chosen: Iterable[_Choice], task: ExtractTask) -> Iterable[_Choice]:
    """``chosen`` without all but the best, the first of equal ones, of labels of which one is wanted."""
    single = task.labels.single
    if not single:
        return chosen
    chosen, best = list(chosen), dict[int, _Choice]()
    for one in chosen:
        _, _, label, score = one
        if label in single and (label not in best or score > best[label][3]):
            best[label] = one
    return [one for one in chosen if one[2] not in single or best[one[2]] is one]
