"""Extraction of ``bei.Model`` and ``bei embed``: spans for labels, and what else a schema asks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from typing import Any, NamedTuple, TypeAlias

import msgspec

from bei.errors import BeiError, InvalidRequestError, MalformedRequestError
from bei.offline.input_checks import can_be_iterated, check_order, names, several, text
from bei.offline.method import ListCollector, Method, WindowResult
from bei.offline.options import ExtractOptions, RelationOptions, checked, converted
from bei.offline.results import Extracted
from bei.service.admission import Ticket
from bei.service.model_service import ModelService
from bei.tasks.entity_relations import EntityForm, entity_text
from bei.tasks.extract import ExtractTask, Span, extract, inputs_of, num_around
from bei.tasks.extract_labels import THRESHOLD, CheckedLabels, LabelForm, checked_labels, extraction_of
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
from bei.tasks.schema_spans import Instance

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
    around = num_around(service, found, AskedSchema())

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
        model_inputs=lambda inputs: inputs_of(service, inputs, around),
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

    around = num_around(service, labels, schema)
    columns = FIRST_INSTANCES * sum(schema.sizes) + (len(labels.names) if labels else 0)
    return Method(
        name="extract_schema",
        options=options,
        check=text,
        run=run,
        collector=ListCollector[Extracted],
        model_inputs=lambda inputs: inputs_of(service, inputs, around),
        bytes_per_token=_FLOAT_BYTES * columns * (service.manifest.dimension("span_logits") or 0),
    )


def relation_extraction(
    service: ModelService, relations: Iterable[str] | Mapping[str, object], given: Given
) -> Method[str, list[dict[str, list[Instance]]], list[dict[str, list[Instance]]]]:
    """The ``relations`` of each text between its entities."""
    options = checked(RelationOptions, given)
    layout = extraction_of(service)
    if layout.max_entities is msgspec.UNSET:
        raise InvalidRequestError(
            f"{service.name} finds entities by itself, GLiREL reads them: call extract or extract_schema.", "entities"
        )
    asked = [relations] if isinstance(relations, str) else relations
    threshold = options.get("threshold", THRESHOLD)
    _, schema = checked_request(
        None,
        None,
        converted(_plain(asked, "relations"), _RELATIONS, "relations"),
        None,
        threshold,
        service,
        has_entities=True,
    )

    def check(value: object, index: int) -> str:
        assert isinstance(value, tuple), "as with_entities makes them"
        given = [*map(_plain_entity, value[1])] if can_be_iterated(value[1]) else value[1]
        return entity_text(text(value[0], index), converted(given, list[EntityForm], "entities"), index, layout)

    async def run(inputs: Seq[str], ticket: Ticket, wrong: Wrong) -> WindowResult[list[dict[str, list[Instance]]]]:
        answer = await extract(service, ExtractTask(inputs, failed=wrong, labels=None, schema=schema), ticket=ticket)
        return WindowResult(answer.relations, answer.num_tokens, answer.truncated, answer.errors)

    return Method(
        name="extract_relations",
        options=options,
        check=check,
        run=run,
        collector=ListCollector[dict[str, list[Instance]]],
        bytes_per_token=_FLOAT_BYTES * len(schema.relations) * layout.columns,
    )


def with_entities(inputs: Iterable[str], entities: Iterable[object]) -> list[tuple[object, object]]:
    """Each text with its entities. Raises InvalidRequestError."""
    if not can_be_iterated(entities) or isinstance(entities, str | Mapping):
        raise MalformedRequestError("entities must be a list of the entities of each text.", "entities")
    texts, given = [*several(inputs)], [*entities]
    if len(texts) != len(given):
        raise InvalidRequestError(
            f"entities has {len(given)} lists for {len(texts)} texts: give one for each text.", "entities"
        )
    return [*zip(texts, given, strict=True)]


def _plain_entity(given: object) -> object:
    """A span that a model has found as a dict, for ``converted``."""
    return given._asdict() if isinstance(given, Span) else given


def _plain(given: object, param: str) -> object:
    """A mapping as a dict, an iterable as a list, for ``converted``, which refuses what else was given."""
    check_order(given, param)
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
        None
        if asked.structures is None
        else converted(_plain(asked.structures, "structures"), _STRUCTURES, "structures"),
        None if relations is None else converted(_plain(relations, "relations"), _RELATIONS, "relations"),
        None
        if asked.classifications is None
        else converted(_plain(asked.classifications, "classifications"), list[ClassesForm], "classifications"),
        options.get("threshold", THRESHOLD),
        service,
    )


def _labels(given: Iterable[str] | Mapping[str, object]) -> list[str] | dict[str, str | LabelForm]:
    """As a request has them. Raises InvalidRequestError."""
    found = names(given, "labels")
    if not isinstance(given, Mapping):
        return found
    return converted({**given}, dict[str, str | LabelForm], "labels")
