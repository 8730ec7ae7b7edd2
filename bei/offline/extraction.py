"""Extraction of ``bei.Model`` and ``bei embed``: spans for labels, and what else a schema asks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from typing import Any, NamedTuple, TypeAlias

from bei.errors import BeiError
from bei.offline.input_checks import can_be_iterated, names, text
from bei.offline.method import ListCollector, Method, WindowResult
from bei.offline.options import ExtractOptions, checked, converted
from bei.offline.results import Extracted
from bei.service.admission import Ticket
from bei.service.model_service import ModelService
from bei.tasks.extract import ExtractTask, Span, extract, inputs_of
from bei.tasks.extract_labels import THRESHOLD, CheckedLabels, LabelForm, checked_labels
from bei.tasks.schema_classes import ClassesForm
from bei.tasks.schema_forms import (
    FIRST_INSTANCES,
    AskedSchema,
    FieldForm,
    RelationForm,
    StructureForm,
    check_span_settings,
    checked_request,
)

Given: TypeAlias = Mapping[str, object]
Wrong: TypeAlias = Mapping[int, BeiError] | None

_FLOAT_BYTES = 4
_STRUCTURES: Any = dict[str, StructureForm | list[str | FieldForm]]
_RELATIONS: Any = list[str] | dict[str, str | RelationForm]


class SchemaToFind(NamedTuple):
    """As ``bei.Model`` was given it."""

    labels: Iterable[str] | Mapping[str, object] | None
    structures: Mapping[str, object] | None
    relations: Iterable[str] | Mapping[str, object] | None
    classifications: Iterable[Mapping[str, object]] | None


def spans(
    service: ModelService, labels: Iterable[str] | Mapping[str, object], given: Given
) -> Method[str, list[list[Span]], list[list[Span]]]:
    """Spans of each text for the ``labels``."""
    options = checked(ExtractOptions, given)
    found = checked_labels(_labels(labels), options.get("threshold", THRESHOLD), service)
    flat, multi_label = options.get("flat", True), options.get("multi_label", False)

    async def run(inputs: Seq[str], ticket: Ticket, wrong: Wrong) -> WindowResult[list[list[Span]]]:
        task = ExtractTask(inputs, failed=wrong, labels=found, flat=flat, multi_label=multi_label)
        answer = await extract(service, task, ticket=ticket)
        return WindowResult(answer.spans, answer.num_tokens, answer.truncated, answer.errors)

    return Method(
        name="extract",
        options=options,
        check=text,
        run=run,
        collector=ListCollector[list[Span]],
        model_inputs=lambda inputs: inputs_of(service, inputs, found.num_chars),
        bytes_per_token=_FLOAT_BYTES * len(found.names) * (service.manifest.dimension("span_logits") or 0),
    )


def schema_extraction(
    service: ModelService, asked: SchemaToFind, given: Given
) -> Method[str, list[Extracted], list[Extracted]]:
    """What each text has of ``asked``."""
    options = checked(ExtractOptions, given)
    found = schema_to_find(service, asked, options)
    flat, multi_label = options.get("flat", True), options.get("multi_label", False)
    check_span_settings(found, options.get("threshold", THRESHOLD), flat=flat, multi_label=multi_label)
    labels, schema = found

    async def run(inputs: Seq[str], ticket: Ticket, wrong: Wrong) -> WindowResult[list[Extracted]]:
        task = ExtractTask(inputs, failed=wrong, labels=labels, flat=flat, multi_label=multi_label, schema=schema)
        answer = await extract(service, task, ticket=ticket)
        every = list(map(Extracted, answer.spans, answer.structures, answer.relations, answer.classifications))
        return WindowResult(every, answer.num_tokens, answer.truncated, answer.errors)

    num_around = schema.num_chars + (labels.num_chars if labels else 0)
    columns = FIRST_INSTANCES * sum(schema.sizes) + (len(labels.names) if labels else 0)
    return Method(
        name="extract_schema",
        options=options,
        check=text,
        run=run,
        collector=ListCollector[Extracted],
        model_inputs=lambda inputs: inputs_of(service, inputs, num_around),
        bytes_per_token=_FLOAT_BYTES * columns * (service.manifest.dimension("span_logits") or 0),
    )


def _plain(given: object) -> object:
    """A mapping as a dict, an iterable as a list, for ``converted``, which refuses what else was given."""
    if isinstance(given, Mapping):
        return {**given}
    return [*given] if can_be_iterated(given) and not isinstance(given, str) else given


def schema_to_find(
    service: ModelService, asked: SchemaToFind, options: ExtractOptions
) -> tuple[CheckedLabels | None, AskedSchema]:
    """What is asked for, checked. Raises InvalidRequestError."""
    relations = [asked.relations] if isinstance(asked.relations, str) else asked.relations
    return checked_request(
        None if asked.labels is None else _labels(asked.labels),
        None if asked.structures is None else converted(_plain(asked.structures), _STRUCTURES, "structures"),
        None if relations is None else converted(_plain(relations), _RELATIONS, "relations"),
        None
        if asked.classifications is None
        else converted(_plain(asked.classifications), list[ClassesForm], "classifications"),
        options.get("threshold", THRESHOLD),
        service,
    )


def _labels(given: Iterable[str] | Mapping[str, object]) -> list[str] | dict[str, str | LabelForm]:
    """As a request has them. Raises InvalidRequestError."""
    found = names(given, "labels")
    if not isinstance(given, Mapping):
        return found
    return converted({**given}, dict[str, str | LabelForm], "labels")
