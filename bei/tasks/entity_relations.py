"""Relations between entities that a request names (GLiREL, arXiv:2501.03172), as the glirel library's
``predict_relations`` finds them: pairs of different entities that score above a relation's threshold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from functools import partial
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta

from bei.artifact.label_layouts import Extraction
from bei.core import Encoding, Float32Array, Row
from bei.engine.postprocess import apply_function
from bei.engine.words import WORD, kinds_of
from bei.errors import BeiError, InvalidRequestError
from bei.service.admission import Ticket
from bei.service.call import ModelRequest
from bei.service.model_service import ModelService
from bei.tasks.extract_labels import extraction_of, no_entities
from bei.tasks.schema_forms import ENDS, AskedSchema
from bei.tasks.schema_spans import Instance, Value
from bei.tasks.span_choice import MOST_CANDIDATES, MOST_OF_REQUEST, MOST_SCORES, check_candidates
from bei.tasks.support import off_loop_if_large
from bei.tokenizer.encoder import EncodingOptions
from bei.tokenizer.entity_text import EntityPlace, EntityText
from bei.tokenizer.label_prompt import LabelPrompt
from bei.tokenizer.schema_prompt import SchemaPart

_OUTPUT = "span_logits"
_PER_CANDIDATE = 10  # as many numbers take as long
_SHOWN_CHARS = 40  # of a text in a message


class EntityForm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An entity of a text, in code points. ``text`` must stand there; ``label`` and ``score``, of a span, are not
    read."""

    start: Annotated[int, Meta(ge=0)]
    end: Annotated[int, Meta(ge=1)]
    text: str | None = None
    label: str | None = None
    score: float | None = None


class Related(NamedTuple):
    """Of each text its relations by name, the tokens that were read, and by their places the errors of texts."""

    relations: list[dict[str, list[Instance]]]
    lengths: list[int]
    errors: dict[int, BeiError]


def entity_texts(texts: Seq[str], entities: Seq[Seq[EntityForm]] | None, service: ModelService) -> list[str]:
    """``texts`` with their ``entities``, where the model reads these. Raises InvalidRequestError."""
    layout = extraction_of(service)
    if layout.max_entities is msgspec.UNSET:
        if entities is not None:
            raise InvalidRequestError(
                f"{service.name} finds entities by itself, GLiREL reads them: send labels, and leave entities out.",
                "entities",
            )
        return [*texts]
    if entities is None:
        raise no_entities(service.name)
    if len(entities) != len(texts):
        raise InvalidRequestError(
            f"entities has {len(entities)} lists for {len(texts)} texts: send one for each text.", "entities"
        )
    return [
        entity_text(text, own, place, layout) for place, (text, own) in enumerate(zip(texts, entities, strict=True))
    ]


def entity_text(text: str, entities: Seq[EntityForm], place: int, layout: Extraction) -> EntityText:
    """Text number ``place`` with its ``entities``. Raises InvalidRequestError."""
    most = layout.max_entities
    assert most is not msgspec.UNSET, "the caller has asked"
    if len(entities) > most:
        raise InvalidRequestError(
            f"entities {place} has {len(entities)} entities, and the model scores all pairs of up to {most}: send "
            "fewer, or parts of the text.",
            "entities",
        )
    for one in entities:
        where = f"entities {place} has one from {one.start} to {one.end}"
        if not one.start < one.end <= len(text):
            raise InvalidRequestError(f"{where}, in a text of {len(text)} characters.", "entities")
        if one.text is not None and one.text != text[one.start : one.end]:
            raise InvalidRequestError(
                f"{where}, where {_shown(text[one.start : one.end])} stands and not {_shown(one.text)}: count in code "
                "points, and send the text that the entities were found in.",
                "entities",
            )
    return EntityText(text, [EntityPlace(one.start, one.end) for one in entities], place)


def _shown(text: str) -> str:
    return repr(text) if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]!r}..."


async def related(
    service: ModelService,
    inputs: Seq[str],
    asked: AskedSchema,
    failed: Mapping[int, BeiError] | None,
    ticket: Ticket,
) -> Related:
    """The relations of each text. Raises as ``ModelService.infer`` does, and InvalidRequestError for too many."""
    layout = extraction_of(service)
    names = [one.name for one in asked.relations]
    thresholds = np.array([one.fields[0].threshold for one in asked.relations], np.float32)
    prompt = LabelPrompt((*names,), layout, parts=(SchemaPart("relations", "", (*names,)),))
    found = Related([{name: [] for name in names} for _ in inputs], [0] * len(inputs), dict(failed or {}))
    num_found = 0
    for places in _parts(inputs, found.errors, len(names) * layout.columns):
        request = ModelRequest(
            [inputs[place] for place in places], EncodingOptions(labels=prompt), None if failed is None else {}
        )
        answer = await service.infer(request, ticket=ticket, outputs={_OUTPUT}, reduce=_of_entities)
        rows = iter(answer.rows)
        for index, place in enumerate(places):
            if index in answer.errors:
                found.errors[place] = answer.errors[index]
                continue
            logits = next(rows)[_OUTPUT]
            found.lengths[place] = answer.encodings[index].num_tokens
            read = partial(_read, inputs[place], names, logits, thresholds, layout.columns)
            try:
                found.relations[place].update(await off_loop_if_large(read, logits.size * _PER_CANDIDATE))
            except InvalidRequestError as error:
                if failed is None:
                    raise
                found.errors[place] = error
            num_found += sum(map(len, found.relations[place].values()))
            if failed is None:
                check_candidates(num_found, MOST_OF_REQUEST, "the request", "relations")
    return found


def _of_entities(row: Row, encoding: Encoding) -> Row:
    """Keeps the rows of a text's entities, which stand in those of its first words (``bei.engine.entity_pairs``)."""
    assert encoding.token_type_ids is not None
    assert encoding.label_vectors is not None
    words = np.flatnonzero(kinds_of(encoding.token_type_ids) == WORD)
    return {_OUTPUT: row[_OUTPUT][words[: len(encoding.label_vectors.rows)]]}


def _parts(inputs: Seq[str], errors: Mapping[int, BeiError], columns: int) -> Iterator[list[int]]:
    """The places of texts that have pairs, of so many at a time that their scores, ``columns`` of an entity, are about
    MOST_SCORES."""
    some: list[int] = []
    num_scores = 0
    for place, text in enumerate(inputs):
        if place in errors or not isinstance(text, EntityText) or len(text.entities) < 2:
            continue
        own = len(text.entities) * columns
        if some and num_scores + own > MOST_SCORES:
            yield some
            some, num_scores = [], 0
        some.append(place)
        num_scores += own
    if some:
        yield some


def _read(
    text: str, names: Seq[str], logits: Float32Array, thresholds: Float32Array, most: int
) -> dict[str, list[Instance]]:
    """The relations of ``text`` by their names. ``logits`` [entities, labels * ``most`` entities]."""
    assert isinstance(text, EntityText)
    entities, found = text.entities, {name: list[Instance]() for name in names}
    count = len(entities)
    scores = apply_function(logits.reshape(count, -1, most)[:, : len(names), :count], "sigmoid")
    above = scores > thresholds[:, None]
    above[np.arange(count), :, np.arange(count)] = False  # with itself
    check_candidates(int(np.count_nonzero(above)), MOST_CANDIDATES, "a text", "relations")
    for head, label, tail in np.argwhere(above).tolist():
        score = float(scores[head, label, tail])
        ends = (Value(text[one.start : one.end], score, one.start, one.end) for one in (entities[head], entities[tail]))
        found[names[label]].append(dict(zip(ENDS, ends, strict=True)))
    return found
