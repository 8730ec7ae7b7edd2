"""Spans of texts for labels that a request brings (GLiNER, arXiv:2311.08526, section 2.2).

A text of more words than the model reads at once is read in windows. They overlap by a quarter, at least by the longest
span, so that each span lies in one of them whole (where spans may have any length, up to a quarter); of a span in two
windows the higher score counts.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from functools import partial
from operator import mul
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np

from bei.artifact.label_layouts import Extraction
from bei.core import Encoding, Int32Array, LabelVectors, Row
from bei.engine.schema_columns import count_columns
from bei.engine.words import num_words
from bei.errors import BeiError, InvalidRequestError
from bei.service.admission import Ticket
from bei.service.call import InferenceResult, ModelRequest
from bei.service.model_service import ModelService
from bei.tasks.candidate_records import RecordReader
from bei.tasks.candidate_relations import Proposed, RelationReader
from bei.tasks.candidate_spans import CandidateReader, in_text
from bei.tasks.entity_relations import related
from bei.tasks.extract_labels import CheckedLabels, extraction_of
from bei.tasks.schema_classes import LabelScore, add_probabilities
from bei.tasks.schema_forms import MOST_COLUMNS, AskedSchema, first_instances
from bei.tasks.schema_spans import Found, Instance, SchemaReader, instances_of_text
from bei.tasks.span_choice import (
    MOST_OF_REQUEST,
    MOST_SCORES,
    Candidates,
    check_candidates,
    choose,
    choose_most,
    collect,
)
from bei.tasks.support import PartialResult, off_loop_if_large
from bei.tokenizer.alike import check_told_apart
from bei.tokenizer.encoder import EncodingOptions
from bei.tokenizer.entity_text import EntityText
from bei.tokenizer.label_encoder import LabelText, vectors_of
from bei.tokenizer.label_prompt import LOOKED_AHEAD, LabelPrompt, word_spans
from bei.tokenizer.paired_text import PairedText

# About: of a word, with what stands behind it; of a token. Tokens of a name beside those of its characters.
_WORD_CHARS, _TOKEN_CHARS, _NAME_TOKENS = 5, 4, 2
_LEAST_CHARS = 64  # of a window, however many labels stand in front
_PER_CANDIDATE = 100  # as many numbers take as long
_PAIRS, _RECORDS = "relation_logits", "record_states"


class ExtractTask(ModelRequest, frozen=True, kw_only=True):
    """Texts, and labels to find spans for, which score above their thresholds; None: no spans are asked for. ``flat``:
    spans do not overlap, else they may lie inside each other. ``multi_label``: a span may have several labels.
    ``schema``: structures, relations and classifications; relations of named entities are those of ``EntityText``."""

    labels: CheckedLabels | None
    flat: bool = True
    multi_label: bool = False
    schema: AskedSchema = AskedSchema()


class Span(NamedTuple):
    """What stands at ``start`` to ``end`` (one past its last character, in code points), its label and its score."""

    start: int
    end: int
    text: str
    label: str
    score: float


class Spans(PartialResult, frozen=True, kw_only=True):
    """The spans of each text, in its order, and of what else was asked for its instances of structures and relations
    and its labels of classifications, by name. ``lengths``: tokens of each text's windows, with the labels of each."""

    spans: list[list[Span]]
    structures: list[dict[str, list[Instance]]]
    relations: list[dict[str, list[Instance]]]
    classifications: list[dict[str, LabelScore | list[LabelScore]]]


# First word, last word, label and score.
_Choice: TypeAlias = tuple[int, int, int, float]


class _Window(NamedTuple):
    """Words ``first`` to ``stop`` of text number ``text``."""

    text: int
    first: int
    stop: int


def num_around(service: ModelService, labels: CheckedLabels | None, schema: AskedSchema) -> int:
    """Characters that are read with each window. Raises TaskNotSupportedError."""
    is_in_front = extraction_of(service).label_width is msgspec.UNSET
    return schema.num_chars + (labels.num_chars if labels and is_in_front else 0)


def labels_beside(service: ModelService, labels: CheckedLabels | None) -> list[LabelText]:
    """Labels that are read by a tower of their own. Raises TaskNotSupportedError."""
    is_beside = labels and extraction_of(service).label_width is not msgspec.UNSET
    return [LabelText(name) for name in labels.names] if labels and is_beside else []


def inputs_of(service: ModelService, texts: Seq[str], num_around: int) -> list[str]:
    """Pieces of ``texts``, to admit them: of a long text about as many, as long, as the windows that it is read in.
    ``num_around``: characters that are read with each. Raises TaskNotSupportedError."""
    layout = extraction_of(service)
    room = service.manifest.max_seq_len * _TOKEN_CHARS - num_around
    size = max(_LEAST_CHARS, min(layout.max_words * _WORD_CHARS, room))
    shared = size // 4
    return [
        text[start : start + size] for text in texts for start in range(0, max(1, len(text) - shared), size - shared)
    ]


async def extract(service: ModelService, task: ExtractTask, *, ticket: Ticket) -> Spans:
    """The spans of each text. Raises as ``ModelService.infer`` does, and InvalidRequestError for labels, and for too
    many spans above their thresholds."""
    layout = extraction_of(service)
    texts = [str(text) if not isinstance(text, EntityText) else text for text in task.inputs]
    if task.schema.of_entities:
        return await _between_entities(service, texts, task, ticket)
    num_chars = sum(map(len, texts)) * (LOOKED_AHEAD if layout.schema else 1)  # each is read so often, at most
    words = await off_loop_if_large(lambda: [word_spans(text, layout) for text in texts], num_chars)
    names = task.labels.names if task.labels else ()
    beside = labels_beside(service, task.labels)
    vectors = await _vectors(service, beside, ticket) if beside else None
    decoder = _Decoder(task, layout, texts, words, 0 if beside else _tokens_around(service, task))
    outputs = {"span_logits"} | ({"label_logits"} if task.schema.classes else set[str]())
    outputs |= {_RECORDS} if task.schema.has_modes else set[str]()
    todo = decoder.begin()
    # More than once where fewer words fit than the model was trained with, where it counts many instances, and to score
    # pairs of what it finds.
    while todo:
        step = todo.pop()
        parts = task.schema.parts(task.labels, layout, step.instances)
        options = EncodingOptions(labels=LabelPrompt(names, layout, vectors, parts=parts, words=task.schema.words))
        inputs = [_text_of(texts[one.text], words[one.text], one) for one in step.windows]
        if step.pairs:
            inputs = [PairedText(text, pairs.table) for text, pairs in zip(inputs, step.pairs, strict=True)]
        request = ModelRequest(inputs, options, None if task.failed is None else {})
        answer = await service.infer(request, ticket=ticket, outputs={_PAIRS} if step.pairs else outputs)
        most = sum(scores.size for row in answer.rows for scores in row.values())  # candidates
        todo += await off_loop_if_large(partial(decoder.read, step, answer), most * _PER_CANDIDATE)
    return decoder.result()


async def _between_entities(service: ModelService, texts: Seq[str], task: ExtractTask, ticket: Ticket) -> Spans:
    """Relations alone, between entities that the texts name."""
    relations, lengths, errors = await related(service, texts, task.schema, task.failed, ticket)
    return Spans(
        lengths,
        [],
        errors,
        spans=[[] for _ in texts],
        structures=[{} for _ in texts],
        relations=relations,
        classifications=[{} for _ in texts],
    )


class _Step(NamedTuple):
    """Windows that are read with so many instances of each structure, then of each relation. ``is_again``: the model
    has counted more than it was asked for at first. ``pairs``: of each window, where these alone are to be scored."""

    windows: list[_Window]
    instances: list[int]
    is_again: bool = False
    pairs: Seq[Proposed] = ()


class _Decoder:
    """From the scores of windows to the spans of ``texts``. The candidates of a text are dropped with its last window.

    ``read`` raises InvalidRequestError for too many; of a partial answer the text has the error.
    """

    def __init__(
        self, task: ExtractTask, layout: Extraction, texts: Seq[str], words: Seq[Int32Array], tokens_around: int
    ) -> None:
        self.lengths = [0] * len(texts)
        self.errors = dict(task.failed or {})
        self.spans: list[list[Span]] = [[] for _ in texts]
        schema = task.schema
        self.structures: list[dict[str, list[Instance]]] = [{one.name: [] for one in schema.structures} for _ in texts]
        self.relations: list[dict[str, list[Instance]]] = [{one.name: [] for one in schema.relations} for _ in texts]
        self.classifications: list[dict[str, LabelScore | list[LabelScore]]] = [{} for _ in texts]
        self._task = task
        self._layout = layout
        self._texts = texts
        self._words = words
        self._tokens_around = tokens_around
        self._thresholds = np.array(task.labels.thresholds if task.labels else (), np.float32)
        self._schema = _reader(task, layout)
        self._records = RecordReader(task.labels, schema, layout, flat=task.flat) if schema.has_modes else None
        self._relations: RelationReader | None = None
        if layout.candidates and schema.relations:
            self._relations = RelationReader(task.labels, schema, layout)
        self._found: defaultdict[int, Found] = defaultdict(Found)  # of texts with windows that are not read yet
        self._unread: Counter[int] = Counter()  # windows, by text
        self._num_candidates = 0  # of texts before

    def result(self) -> Spans:
        """All that was read."""
        return Spans(
            self.lengths,
            [],
            self.errors,
            spans=self.spans,
            structures=self.structures,
            relations=self.relations,
            classifications=self.classifications,
        )

    def begin(self) -> list[_Step]:
        """All windows of texts without errors, the last first, so many at once that their scores are not too many."""
        windows = [
            window
            for index, spans in enumerate(self._words)
            if index not in self.errors
            for window in self._windows(index, len(spans))
        ]
        self._unread.update(window.text for window in windows)
        instances = first_instances(self._task.schema, counts=not self._layout.candidates)
        return [_Step(some, instances) for some in self._parts_of(windows, instances)][::-1]

    def _parts_of(self, windows: Seq[_Window], instances: Seq[int]) -> Iterator[list[_Window]]:
        task, layout = self._task, self._layout
        names = len(task.labels.names) if task.labels else 0
        columns = names + sum(map(mul, instances, task.schema.sizes))
        if layout.schema:
            columns += (len(task.schema.sizes) + bool(names)) * count_columns(layout.schema.num_counts, layout.columns)
        some: list[_Window] = []
        num_scores = 0
        for window in windows:
            num_tokens = window.stop - window.first + self._tokens_around
            num_scores += num_tokens * columns * layout.columns
            if some and num_scores > MOST_SCORES:
                yield some
                some, num_scores = [], num_tokens * columns * layout.columns
            some.append(window)
        if some:
            yield some

    def _windows(self, index: int, num_words: int) -> Iterator[_Window]:
        schema = self._task.schema
        if not num_words and (schema.classes or schema.words):  # a text without words has classes and choices too
            yield _Window(index, 0, 0)
        yield from _windows(index, 0, num_words, self._layout)

    def read(self, step: _Step, answer: InferenceResult) -> list[_Step]:
        """What is left of ``step``, which was read only in part, and what is to be read again: with more instances, or
        for pairs."""
        if step.pairs:
            self._read_pairs(step, answer)
            return []
        rows = iter(answer.rows)
        left: list[_Window] = []
        again: list[tuple[_Window, list[int]]] = []
        paired: list[tuple[_Window, Proposed]] = []
        for place, window in enumerate(step.windows):
            text = window.text
            self._unread[text] -= 1
            if place in answer.errors:
                self._set_error(text, answer.errors[place])
                continue
            row, encoding = next(rows), answer.encodings[place]
            if text in self.errors:
                continue
            counts = self._read(window, encoding, row, step.instances)
            if counts is None:
                self.lengths[text] += encoding.num_tokens
                behind = [*self._behind(window, encoding)]
                left += behind
                self._unread[text] += len(behind)
                if text not in self.errors and (pairs := self._proposed(encoding, row)) is not None:
                    paired.append((window, pairs))
                    self._unread[text] += 1
            else:
                # Never fewer than before: a count that is as likely as another may differ from step to step.
                again.append((window, [*map(max, counts, step.instances)] if step.is_again else counts))
                self._unread[text] += 1
            if not self._unread[text]:
                self._choose(text)
        steps = self._again([one for one in again if one[0].text not in self.errors])
        if paired := [one for one in paired if one[0].text not in self.errors]:
            windows = [window for window, _ in paired]
            steps.append(_Step(windows, step.instances, pairs=[pairs for _, pairs in paired]))
        left = [window for window in left if window.text not in self.errors]
        return [*steps, step._replace(windows=left)] if left else steps

    def _read(self, window: _Window, encoding: Encoding, row: Row, instances: Seq[int]) -> list[int] | None:
        """The counts of instances, where the window must be read again for them."""
        found, places, logits = self._found[window.text], range(window.first, window.stop), row["span_logits"]
        try:
            if self._schema:
                counts = self._schema.read(found, logits, encoding, places, instances)
                if self._records:
                    self._records.read(found, logits, row[_RECORDS], encoding, places)
                if counts is None and self._task.schema.classes:
                    add_probabilities(self._task.schema.classes, found.classes, row["label_logits"], encoding)
                return counts
            collect(found.labels, logits, encoding, places, self._thresholds, self._layout)
        except InvalidRequestError as error:
            self._fail(window.text, error)
        return None

    def _proposed(self, encoding: Encoding, row: Row) -> Proposed | None:
        """The pairs that a window is to be read again for."""
        return self._relations.proposed(row["span_logits"], encoding) if self._relations else None

    def _read_pairs(self, step: _Step, answer: InferenceResult) -> None:
        """Add the relations of windows that were read for pairs."""
        assert self._relations
        rows = iter(answer.rows)
        for place, (window, pairs) in enumerate(zip(step.windows, step.pairs, strict=True)):
            text = window.text
            self._unread[text] -= 1
            if place in answer.errors:
                self._set_error(text, answer.errors[place])
                continue
            scores = next(rows)[_PAIRS]
            if text in self.errors:
                continue
            words = range(window.first, window.stop)
            try:
                self._relations.read(self._found[text], scores, pairs, words, self._texts[text], self._words[text])
            except InvalidRequestError as error:
                self._fail(text, error)
            if not self._unread[text]:
                self._choose(text)

    def _behind(self, window: _Window, encoding: Encoding) -> Iterator[_Window]:
        """What is left of a window of which the first words were read."""
        num_read = max(1, _num_words(encoding) - len(self._task.schema.words))
        read = window.first + num_read
        if read < window.stop:
            first = max(window.first + 1, read - min(_overlap(self._layout), num_read // 2))
            yield from _windows(window.text, first, window.stop, self._layout)

    def _again(self, windows: Seq[tuple[_Window, list[int]]]) -> list[_Step]:
        """Steps in which each of ``windows`` has its count of instances, or more."""
        fit: list[tuple[_Window, list[int]]] = []
        sizes = self._task.schema.sizes
        for window, counts in windows:
            if (columns := sum(map(mul, counts, sizes))) > MOST_COLUMNS:
                error = InvalidRequestError(
                    f"The model counts {sum(counts)} instances of the structures and relations, with {columns} fields "
                    f"in all, and {MOST_COLUMNS} are scored at once: ask for fewer of them.",
                    "structures" if self._task.schema.structures else "relations",
                )
                self._fail(window.text, error)
            else:
                fit.append((window, counts))
        steps: list[_Step] = []
        for window, counts in fit:
            if window.text in self.errors:
                continue
            most = [*map(max, counts, steps[-1].instances)] if steps else counts
            if steps and sum(map(mul, most, sizes)) <= MOST_COLUMNS:
                steps[-1] = _Step([*steps[-1].windows, window], most, is_again=True)
            else:
                steps.append(_Step([window], counts, is_again=True))
        return steps

    def _fail(self, text: int, error: InvalidRequestError) -> None:
        if self._task.failed is None:
            raise error
        self._set_error(text, error)

    def _set_error(self, text: int, error: BeiError) -> None:
        self.errors.setdefault(text, error)
        self._found.pop(text, None)

    def _choose(self, text: int) -> None:
        if text in self.errors:
            return
        found = self._found.pop(text, Found())
        self._num_candidates += found.size
        if self._task.failed is None:
            check_candidates(self._num_candidates, MOST_OF_REQUEST, "the request")
        words, schema = self._words[text], self._task.schema
        if self._task.labels:
            self.spans[text] = _spans(found.labels, self._texts[text], words, self._task, self._layout)
        for place, part in enumerate((*schema.structures, *schema.relations)):
            side = self.relations if part.is_relation else self.structures
            side[text][part.name] = instances_of_text(found.records.get(place, ()), part, self._texts[text], words)
        for asked in schema.classes:
            self.classifications[text][asked.part.name] = asked.chosen(found.classes[asked.part.name])


def _reader(task: ExtractTask, layout: Extraction) -> SchemaReader | CandidateReader | None:
    """What reads the scores of models that read a schema."""
    if layout.candidates:
        return CandidateReader(task.labels, task.schema, layout, flat=task.flat)
    return SchemaReader(task.labels, task.schema, layout, flat=task.flat) if layout.schema else None


def _tokens_around(service: ModelService, task: ExtractTask) -> int:
    """Tokens that are read with each window, about: a name of one character has a marker too."""
    names = len(task.labels.names) if task.labels else 0
    names += sum(task.schema.sizes) + sum([len(one.part.labels) for one in task.schema.classes])
    return num_around(service, task.labels, task.schema) // _TOKEN_CHARS + _NAME_TOKENS * names


async def _vectors(service: ModelService, labels: Seq[LabelText], ticket: Ticket) -> LabelVectors:
    """Of the tower of labels, whose port keeps answers: a label that was asked lately is not computed."""
    request = ModelRequest(labels)
    answer = await service.infer(request, ticket=ticket, outputs={"embedding"})
    check_told_apart("labels", labels, [encoding.input_ids.tobytes() for encoding in answer.encodings], "labels")
    return vectors_of(np.stack([row["embedding"] for row in answer.rows]))


def _overlap(layout: Extraction) -> int:
    quarter = layout.max_words // 4
    return min(layout.max_words - 1, quarter if layout.has_any_width else max(layout.max_width, quarter))


def _windows(index: int, first: int, stop: int, layout: Extraction) -> Iterator[_Window]:
    """Windows of words ``first`` to ``stop``: one, or several that overlap."""
    while first < stop:
        last = min(stop, first + layout.max_words)
        yield _Window(index, first, last)
        if last == stop:
            return
        first = last - _overlap(layout)


def _text_of(text: str, words: Int32Array, window: _Window) -> str:
    """The window's part of ``text``, which has the same words; the last one's to the text's end, whose blanks GLiNER2
    reads as one without a full stop."""
    if window.first == window.stop:  # no words
        return text
    return text[words[window.first, 0] : words[window.stop - 1, 1] if window.stop < len(words) else None]


def _num_words(encoding: Encoding) -> int:
    assert encoding.token_type_ids is not None
    return num_words(encoding.token_type_ids)


def _spans(found: Candidates, text: str, words: Int32Array, task: ExtractTask, layout: Extraction) -> list[Span]:
    apart = task.multi_label and bool(layout.schema)
    if layout.candidates and task.flat:
        chosen = choose_most(found, apart=apart)
    else:
        chosen = choose(found, flat=task.flat, multi_label=task.multi_label, by_word=layout.by_word, apart=apart)
    chosen = in_text(chosen)
    places = (
        (int(words[first, 0]), int(words[last, 1]), label, score) for first, last, label, score in _wanted(chosen, task)
    )
    assert task.labels is not None
    names = task.labels.names
    return [Span(start, end, text[start:end], names[label], score) for start, end, label, score in places]


def _wanted(chosen: Iterable[_Choice], task: ExtractTask) -> Iterable[_Choice]:
    """``chosen`` without all but the best, the first of equal ones, of labels of which one is wanted."""
    single = task.labels.single if task.labels else ()
    if not single:
        return chosen
    chosen, best = list(chosen), dict[int, _Choice]()
    for one in chosen:
        _, _, label, score = one
        if label in single and (label not in best or score > best[label][3]):
            best[label] = one
    return [one for one in chosen if one[2] not in single or best[one[2]] is one]
