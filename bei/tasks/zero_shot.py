"""Scores of labels that a request brings.

natural language inference   how each text entails "This example is LABEL." (arXiv:1909.00161)
GLiClass, GLiNER2            all labels in one text with the text (arXiv:2508.07662, arXiv:2507.18546); they see each
                             other
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import NamedTuple

import msgspec
import numpy as np

from bei.artifact.label_layouts import Extraction, Labelling, Schema
from bei.artifact.reading_faults import MOST_TOKENS
from bei.core import Encoding, Float32Array, Row
from bei.engine.postprocess import apply_function
from bei.engine.words import LABEL, kinds_of
from bei.errors import InvalidRequestError, TaskNotSupportedError
from bei.service.admission import Ticket
from bei.service.call import ModelInput, ModelRequest, Reduce
from bei.service.model_service import ModelService
from bei.tasks.classify import Scores, logits_of
from bei.tasks.extract_labels import check_examples, checked_descriptions
from bei.tasks.support import computed, off_loop_if_large, require, token_keys
from bei.tokenizer.alike import check_told_apart
from bei.tokenizer.label_prompt import LabelPrompt
from bei.tokenizer.schema_prompt import SchemaPart
from bei.tokenizer.templates import AroundTemplate

# How a model of natural language inference is asked for a label (transformers' default).
HYPOTHESIS = "This example is {}."

OUTPUT = "label_logits"

_NUMBERS_PER_CHAR = 20  # that take as long as a character to be tokenized


class LabelGuidance(NamedTuple):
    """``descriptions``: labels and what they mean. ``examples``: texts and the label of each."""

    descriptions: tuple[tuple[str, str], ...] = ()
    examples: tuple[tuple[str, str], ...] = ()


class ZeroShotTask(ModelRequest, frozen=True, kw_only=True):
    """Texts, and ``labels``, which share one probability. ``multi_label``: each has its own, and so has a single one.
    ``template``: the hypothesis with a label in its {}, for models of natural language inference. ``guidance``: what
    GLiNER2 reads of the labels beside their names. ``param``: the request's field of the labels, for messages."""

    labels: Seq[str]
    param: str = "labels"
    multi_label: bool = False
    template: str = HYPOTHESIS
    guidance: LabelGuidance = LabelGuidance()


def check_zero_shot(service: ModelService, template: str = HYPOTHESIS) -> None:
    """Raise TaskNotSupportedError for a model that scores no labels of a request; InvalidRequestError for a template
    without {}, or for a model that reads none."""
    if service.manifest.labelling is msgspec.UNSET:
        nli_labels(service)
        if "{}" not in template:
            raise InvalidRequestError("hypothesis_template has no {} for the label.", "hypothesis_template")
        return
    require(service, "zero_shot")
    if template != HYPOTHESIS:
        raise InvalidRequestError(
            f"{service.name} reads labels as they are: leave hypothesis_template out.", "hypothesis_template"
        )


def label_guidance(
    service: ModelService, labels: Seq[str], meanings: Mapping[str, str | None], examples: Seq[tuple[str, str]]
) -> LabelGuidance:
    """``meanings`` of labels and ``examples``, checked. Raises InvalidRequestError."""
    layout = service.manifest.labelling
    reads = layout is not msgspec.UNSET and bool(layout.schema)
    if examples and not reads:
        raise InvalidRequestError(f"{service.name} reads no examples, GLiNER2 does: leave them out.", "examples")
    check_examples(examples, labels, "examples", service, "examples")
    return LabelGuidance(checked_descriptions(meanings, service, reads), tuple(examples))


def num_around(service: ModelService, task: ZeroShotTask) -> int:
    """Characters that are read with each of ``inputs_of``: of labels, and of what is told of them. Raises
    InvalidRequestError for labels."""
    layout = service.manifest.labelling
    if layout is msgspec.UNSET:
        return 0  # hypotheses are inputs
    texts = chain.from_iterable(task.guidance.descriptions + task.guidance.examples)
    return around_text(layout, task.labels, task.param).num_chars + sum(map(len, texts))


def inputs_of(service: ModelService, task: ZeroShotTask) -> list[ModelInput]:
    """What the model reads, to admit it with ``num_around``: texts, or pairs of each with each hypothesis."""
    texts = [str(text) for text in task.inputs]
    if service.manifest.labelling is not msgspec.UNSET:
        return [*texts]
    hypotheses = [task.template.replace("{}", label, 1) for label in task.labels]
    return [(text, hypothesis) for text in texts for hypothesis in hypotheses]


async def zero_shot(service: ModelService, task: ZeroShotTask, *, ticket: Ticket) -> Scores:
    """Score each label for each text: a row a text.

    ``truncated`` lists texts. Raises TaskNotSupportedError, InvalidRequestError.
    """
    check_zero_shot(service, task.template)
    layout = service.manifest.labelling
    if layout is msgspec.UNSET or not layout.schema:  # else where the schema is tokenized
        keys = partial(token_keys, service.encoder, task.labels)
        num_numbers = sum(map(len, task.labels)) * _NUMBERS_PER_CHAR
        check_told_apart(task.param, task.labels, await off_loop_if_large(keys, num_numbers), task.param)
    if layout is not msgspec.UNSET:
        return await _by_markers(service, layout, task, ticket)
    entails, contradicts = nli_labels(service)
    count = len(task.labels)
    # As transformers' ZeroShotClassificationPipeline, but for contradiction, which it takes by its place.
    pairs = ModelRequest(inputs_of(service, task), replace(task.options, whole_second=True))
    answer, _ = await logits_of(service, pairs, ticket)

    def scores_of_labels(logits: Float32Array) -> Float32Array:
        if task.multi_label or count == 1:
            return apply_function(logits[:, [contradicts, entails]], "softmax")[:, 1].reshape(len(task.inputs), -1)
        return apply_function(logits[:, entails].reshape(len(task.inputs), -1), "softmax")

    values = await computed(answer.rows, "logits", scores_of_labels)
    truncated = sorted({index // count for index in answer.truncated})
    return Scores(answer.lengths, truncated, values=values, labels=list(task.labels))


def nli_labels(service: ModelService) -> tuple[int, int]:
    """The places of entailment and of contradiction among a model's labels; of two labels the other one is the latter.

    Raises TaskNotSupportedError for a model that has no such labels.
    """
    require(service, "classify")
    classification = service.manifest.classification
    assert classification is not None  # require("classify") has passed
    labels = [label.lower() for label in classification.labels]
    entails = next((index for index, label in enumerate(labels) if label.startswith("entail")), None)
    others = [index for index, label in enumerate(labels) if label.startswith("contra") or len(labels) == 2]
    contradicts = next((index for index in others if index != entails), None)
    if entails is None or contradicts is None:
        raise TaskNotSupportedError(
            f"{service.name} has the labels {', '.join(classification.labels)}: labels of a request need a model of "
            "natural language inference, with entailment and contradiction, GLiClass or GLiNER2.",
            "model",
        )
    return entails, contradicts


def own_token(layout: Labelling, text: str) -> str | None:
    """What ``text`` spells of the tokens that tell labels apart."""
    return next((one for one in (layout.label_token, layout.separator_token) if one in text), None)


def around_text(layout: Labelling, labels: Seq[str], param: str = "labels") -> AroundTemplate:
    """What stands around a text. Raises InvalidRequestError, of the field ``param``, for labels that are empty, or
    spell a token of these."""
    for place, label in enumerate(labels):
        if not label.strip():
            raise InvalidRequestError(f"{param} {place} is empty: name what to find, or leave it out.", param)
        if token := own_token(layout, label):
            raise InvalidRequestError(f"{param} {place} has {token!r}, a token of the model's own: take it out.", param)
    prompt = "".join([f"{layout.label_token}{label}" for label in labels]) + layout.separator_token
    return AroundTemplate("", prompt) if layout.text_first else AroundTemplate(prompt, "")


def of_markers(layout: Labelling) -> Reduce:
    """Keeps the rows of the labels' tokens, and of what a text spells like one: [markers, 1]."""

    def kept(row: Row, encoding: Encoding) -> Row:
        places = np.flatnonzero(encoding.input_ids == layout.label_id) + (not layout.reads_marker)
        return {OUTPUT: row[OUTPUT][places[places < encoding.num_tokens]]}

    return kept


def label_row(layout: Labelling, rows: Float32Array, count: int) -> Float32Array:
    """The logits [count] of the labels among the ``rows`` of all markers. Raises InvalidRequestError where labels were
    cut off."""
    found = rows[len(rows) - count :, 0] if layout.text_first else rows[:count, 0]
    if len(rows) < count:
        raise InvalidRequestError(
            f"Of {count} labels the model reads {len(rows)} at once: send fewer or shorter labels.", "labels"
        )
    return found


def schema_prompt(layout: Labelling, schema: Schema, part: SchemaPart) -> LabelPrompt:
    """``part`` in front of a text, of which nothing is cut unless the request says so."""
    read = Extraction(
        label_id=layout.label_id,
        separator_id=schema.separator_id,
        reads_marker=layout.reads_marker,
        max_width=1,
        max_words=MOST_TOKENS,
        schema=schema,
    )
    return LabelPrompt(part.labels, read, may_be_cut=False, parts=(part,))


def of_schema(row: Row, encoding: Encoding) -> Row:
    """Keeps the rows of the labels' tokens, [labels, 1]."""
    assert encoding.token_type_ids is not None
    places = np.flatnonzero(kinds_of(encoding.token_type_ids) == LABEL)
    return {OUTPUT: row[OUTPUT][places]}


async def _by_markers(service: ModelService, layout: Labelling, task: ZeroShotTask, ticket: Ticket) -> Scores:
    most = service.manifest.max_seq_len
    if len(task.labels) >= most:
        raise InvalidRequestError(
            f"There are {len(task.labels)} labels, of a token or more each, and the model reads {most}: send fewer.",
            task.param,
        )
    around = around_text(layout, task.labels, task.param)
    reduce: Reduce
    if layout.schema:
        if task.options.direction == "left":
            raise InvalidRequestError(
                f"{service.name} reads words of texts from their beginnings: leave truncation_direction out.",
                "truncation_direction",
            )
        part = SchemaPart(
            task.param, layout.schema.task, tuple(task.labels), task.guidance.descriptions, task.guidance.examples
        )
        options, reduce = replace(task.options, labels=schema_prompt(layout, layout.schema, part)), of_schema
    else:
        options = replace(task.options, template=around, kept=(around.before, around.behind))
        reduce = of_markers(layout)
    request = ModelRequest(task.inputs, options)
    answer = await service.infer(request, ticket=ticket, outputs={OUTPUT}, reduce=reduce)
    logits = np.stack([label_row(layout, row[OUTPUT], len(task.labels)) for row in answer.rows])
    values = apply_function(logits, "sigmoid" if task.multi_label or len(task.labels) == 1 else "softmax")
    return Scores(answer.lengths, answer.truncated, values=values, labels=list(task.labels))
