"""The schema of a request, in the forms of gliner2's, and the parts that GLiNER2 reads of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sized
from collections.abc import Sequence as Seq
from typing import Literal, NamedTuple, TypeAlias

import msgspec

from bei.artifact.label_layouts import Extraction
from bei.errors import InvalidRequestError
from bei.service.model_service import ModelService
from bei.tasks.extract_labels import (
    THRESHOLD,
    CheckedLabels,
    Labels,
    Share,
    check_readable,
    checked_labels,
    extraction_of,
    no_entities,
)
from bei.tasks.schema_classes import AskedClasses, ClassesForm, checked_classes
from bei.tokenizer.alike import check_told_apart
from bei.tokenizer.schema_prompt import SchemaPart

# Fields, heads and tails of all instances that a text is scored for at once, beside labels to find spans for (see
# ``MOST_LABELS``). A text is read with FIRST_INSTANCES of each structure and relation, and again where the model counts
# more.
MOST_COLUMNS = 256
FIRST_INSTANCES = 4
# Relations times the most entities: a text's scores then take as much as those of spans for MOST_LABELS.
MOST_PAIRED = 3072
ENDS = ("head", "tail")
Mode: TypeAlias = Literal["natural", "latent", "anchorless"]
Cardinality: TypeAlias = Literal["optional_one", "required_one", "zero_or_more", "one_or_more"]


class FieldForm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A field of a structure: all its spans are wanted (``list``) or the best one (``str``). ``choices``: in place of
    spans, which of them hold. Where the structure has a ``mode``: how many values an instance has (null: of the anchor
    ``required_one``, else ``zero_or_more``), and with ``exclusive`` no value is two instances'."""

    name: str
    dtype: Literal["list", "str"] = "list"
    choices: list[str] | None = None
    description: str | None = None
    threshold: Share | None = None
    cardinality: Cardinality | None = None
    exclusive: bool = False


class StructureForm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fields of a structure; a text is the name of one. ``mode`` (GLiNER2.5): several instances, one for each value
    of the field ``anchor`` (null: the first one; ``natural``), for each value that begins one (``latent``), or as the
    model has learned them (``anchorless``)."""

    fields: list[str | FieldForm]
    mode: Mode | None = None
    anchor: str | None = None


class RelationForm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a relation means, and the threshold of its head and its tail."""

    description: str | None = None
    threshold: Share | None = None


# By name. A text is the description of a relation.
Structures: TypeAlias = Mapping[str, StructureForm | list[str | FieldForm]]
Relations: TypeAlias = Seq[str] | Mapping[str, str | RelationForm]


class AskedField(NamedTuple):
    """``choices``: each with the place of its word in front of the text; empty: spans are wanted. Of parts with a mode:
    ``has_one``: an instance has at most one value; ``must_be_there``: at least one, whatever it scores; ``exclusive``:
    no value is two instances'. ``own_threshold``: the threshold that the field names itself."""

    name: str
    threshold: float
    is_single: bool = False
    choices: tuple[tuple[str, int], ...] = ()
    has_one: bool = False
    must_be_there: bool = False
    exclusive: bool = False
    own_threshold: float = 0.0


class AskedPart(NamedTuple):
    """A structure, or with ``is_relation`` a relation, whose fields are its head and its tail. ``mode``: how instances
    are formed, whose fields have the place ``anchor``, and which have probabilities of at least ``threshold``."""

    name: str
    fields: tuple[AskedField, ...]
    part: SchemaPart
    is_relation: bool = False
    mode: Mode | None = None
    anchor: int | None = None
    threshold: float = THRESHOLD


class AskedSchema(NamedTuple):
    """What a request asks of a schema, in the order of its parts: structures, labels, relations, classes. ``words``:
    choices, in front of the text's words. ``of_entities``: relations are between entities that the request names."""

    structures: tuple[AskedPart, ...] = ()
    relations: tuple[AskedPart, ...] = ()
    words: tuple[str, ...] = ()
    classes: tuple[AskedClasses, ...] = ()
    of_entities: bool = False

    @property
    def num_chars(self) -> int:
        """Characters that are read with each text."""
        parts = [one.part for one in (*self.structures, *self.relations)] + [one.part for one in self.classes]
        return sum(map(len, self.words)) + sum([part.num_chars for part in parts])

    @property
    def has_modes(self) -> bool:
        """True if a structure has a mode."""
        return any(one.mode for one in self.structures)

    def parts(self, labels: CheckedLabels | None, layout: Extraction, instances: Seq[int]) -> tuple[SchemaPart, ...]:
        """As the model reads them. ``instances``: of each structure, then of each relation."""
        count = len(self.structures)
        first, last = (
            [one.part._replace(instances=most) for one, most in zip(side, numbers, strict=True)]
            for side, numbers in ((self.structures, instances[:count]), (self.relations, instances[count:]))
        )
        own = [part] if labels and (part := labels.described(layout)) else []
        return (*first, *own, *last, *[one.part for one in self.classes])

    @property
    def sizes(self) -> list[int]:
        """The number of fields of each structure, then of each relation."""
        return [len(one.fields) for one in (*self.structures, *self.relations)]


def checked_request(
    labels: Labels | None,
    structures: Structures | None,
    relations: Relations | None,
    classifications: Seq[ClassesForm] | None,
    threshold: float | Mapping[str, float],
    service: ModelService,
    *,
    has_entities: bool = False,
) -> tuple[CheckedLabels | None, AskedSchema]:
    """What a request asks to find. ``threshold``: of all, or of labels by their names. ``has_entities``: the request
    names the entities of its texts. Raises InvalidRequestError, TaskNotSupportedError."""
    layout = extraction_of(service)
    schema = (("structures", structures), ("relations", relations), ("classifications", classifications))
    if layout.max_entities is not msgspec.UNSET:
        if not has_entities:
            raise no_entities(service.name)
        others = (("labels", labels), schema[0], schema[2])
        if (name := next((name for name, given in others if given is not None), None)) is not None:
            raise InvalidRequestError(
                f"{service.name} scores relations between entities, and nothing else: leave {name} out.", name
            )
        return None, _between_entities(relations, threshold, service, MOST_PAIRED // layout.max_entities)
    for name, given in schema:
        _check_form(name, given, layout, service)
    if labels is None and not any(given for _, given in schema):
        raise InvalidRequestError("labels is missing: name what to find.", "labels")
    if labels is None and isinstance(threshold, Mapping) and threshold:
        raise InvalidRequestError(f"threshold has {next(iter(threshold))!r}, which is none of the labels.", "threshold")
    least = THRESHOLD if isinstance(threshold, Mapping) else threshold
    if not 0 <= least <= 1:
        raise InvalidRequestError("threshold must be from 0 to 1.", "threshold")
    checked = None if labels is None else checked_labels(labels, threshold, service)
    found = _schema(structures or {}, relations or (), least, service)
    return checked, found._replace(classes=checked_classes(classifications, service) if classifications else ())


def _check_form(name: str, given: Sized | None, layout: Extraction, service: ModelService) -> None:
    """Raise InvalidRequestError where the form ``name`` is ``given`` empty, or to a model that reads no schema."""
    if given is None:
        return
    if not layout.schema:
        raise InvalidRequestError(
            f"{service.name} finds spans for labels alone, GLiNER2 {name} too: leave {name} out.", name
        )
    if name == "relations" and layout.candidates and not layout.candidates.relations:
        raise InvalidRequestError(
            f"{service.name} is a GLiNER2.5 without scores of relations: leave {name} out, or ask another one; if its "
            "boundary_head has enable_relations, build it again.",
            name,
        )
    if not given:
        raise InvalidRequestError(f"{name} is empty: name what to find, or leave it out.", name)


def _between_entities(
    relations: Relations | None, threshold: float | Mapping[str, float], service: ModelService, most: int
) -> AskedSchema:
    """Relations, of which a text is scored for ``most`` at once, between entities."""
    if not relations:
        raise InvalidRequestError("relations is missing or empty: name what to score.", "relations")
    if isinstance(threshold, Mapping):
        raise InvalidRequestError("threshold by name is of labels: send it in relations.", "threshold")
    if not 0 <= threshold <= 1:
        raise InvalidRequestError("threshold must be from 0 to 1.", "threshold")
    if len(relations) > most:
        raise InvalidRequestError(
            f"There are {len(relations)} relations, and a text is scored for {most} at once: send fewer.", "relations"
        )
    asked = tuple(_relations(relations, threshold))
    if (told := next((one.name for one in asked if one.part.about), None)) is not None:
        raise InvalidRequestError(
            f"{service.name} reads names of relations alone, GLiNER2 descriptions too: leave that of {told!r} out.",
            "relations",
        )
    return AskedSchema(relations=asked, of_entities=True)


def check_span_settings(
    asked: tuple[CheckedLabels | None, AskedSchema],
    threshold: float | Mapping[str, float],
    *,
    flat: bool,
    multi_label: bool,
) -> None:
    """Raise InvalidRequestError for a setting of spans that nothing of ``asked`` reads."""
    labels, schema = asked
    if schema.of_entities and (multi_label or not flat):
        name = "multi_label" if multi_label else "flat"
        raise InvalidRequestError(f"{name} is of spans, and relations alone are asked for: leave it out.", name)
    if multi_label and labels is None:
        raise InvalidRequestError(
            "multi_label is of spans for labels: send labels, or leave it out. A classification has its own.",
            "multi_label",
        )
    if labels is not None or schema.structures or schema.relations:
        return
    for name, is_set in (("threshold", threshold not in (THRESHOLD, {})), ("flat", not flat)):
        if is_set:
            raise InvalidRequestError(
                f"{name} is of spans, and classifications alone are asked for: leave it out.", name
            )


def _schema(structures: Structures, relations: Relations, threshold: float, service: ModelService) -> AskedSchema:
    _check_counts(structures, relations, service)
    _check_modes(structures, service)
    named = {name: _fields(name, form) for name, form in structures.items()}
    words = tuple(_choice_words(named))
    # The library takes the first word that is a choice, whatever field or name it stands for.
    places: dict[str, int] = {}
    for place, word in enumerate(words):
        places.setdefault(word.lower(), place)
    return AskedSchema(
        tuple(_structure(name, fields, places, threshold, structures[name]) for name, fields in named.items()),
        tuple(_relations(relations, threshold)),
        words,
    )


def _check_counts(structures: Structures, relations: Relations, service: ModelService) -> None:
    """Raise InvalidRequestError for more fields or choices than are read at once, before any of them is looked at."""
    fields = [one for form in structures.values() for one in _given(form)]
    if (count := len(fields) + len(ENDS) * len(relations)) > MOST_COLUMNS:
        raise InvalidRequestError(
            f"There are {count} fields, heads and tails, and a text is scored for {MOST_COLUMNS} at once: send fewer.",
            "structures" if structures else "relations",
        )
    count = sum(len(one.choices or ()) for one in fields if isinstance(one, FieldForm))
    check_readable("choices", count, 2, service, "structures")


def _check_modes(structures: Structures, service: ModelService) -> None:
    """Raise InvalidRequestError for modes that the model does not have, and for what goes with a mode alone."""
    candidates = extraction_of(service).candidates
    for name, form in structures.items():
        mode, anchor = (form.mode, form.anchor) if isinstance(form, StructureForm) else (None, None)
        fields = [one for one in _given(form) if isinstance(one, FieldForm)]
        where = f"structures {name!r}"
        if mode is not None and not (candidates and candidates.records):
            raise InvalidRequestError(
                f"{where} has the mode {mode!r}, and {service.name} forms no instances so: leave mode out, or ask a "
                "GLiNER2.5 whose boundary_head has enable_records.",
                "structures",
            )
        if anchor is not None and (mode != "natural" or anchor not in map(_name_of, _given(form))):
            raise InvalidRequestError(
                f"{where} has the anchor {anchor!r}, which has to be one of its fields, with the mode natural.",
                "structures",
            )
        for one in fields:
            if mode is None and (one.cardinality is not None or one.exclusive):
                setting = "exclusive" if one.cardinality is None else "cardinality"
                raise InvalidRequestError(
                    f"The field {one.name!r} of {where} has {setting}, which goes with a mode: leave it out.",
                    "structures",
                )
            if mode is not None and one.choices:
                raise InvalidRequestError(
                    f"The field {one.name!r} of {where} has choices, which bei does not find in structures with a "
                    "mode: leave mode out, or choices.",
                    "structures",
                )


def _name_of(field: str | FieldForm) -> str:
    return field if isinstance(field, str) else field.name


def first_instances(schema: AskedSchema, *, counts: bool = True) -> list[int]:
    """Instances of each structure and relation that texts are read with at first. ``counts``: the model counts them,
    else a text has one of each."""
    if not counts:
        return [1] * len(schema.sizes)
    most = MOST_COLUMNS // max(1, sum(schema.sizes))
    return [max(1, min(FIRST_INSTANCES, most))] * len(schema.sizes)


def _given(form: StructureForm | list[str | FieldForm]) -> list[str | FieldForm]:
    return form.fields if isinstance(form, StructureForm) else form


def _fields(name: str, form: StructureForm | list[str | FieldForm]) -> list[FieldForm]:
    """The fields of structure ``name``, checked."""
    where = f"structures {name!r}"
    if not name.strip():
        raise InvalidRequestError("structures has an empty name: write one.", "structures")
    fields = [FieldForm(one) if isinstance(one, str) else one for one in _given(form)]
    if not fields:
        raise InvalidRequestError(f"{where} has no fields: name what to find.", "structures")
    seen: set[str] = set()
    for one in fields:
        if not one.name.strip():
            raise InvalidRequestError(f"A field of {where} has an empty name: write one.", "structures")
        if "::" in one.name:
            raise InvalidRequestError(
                f"The field {one.name!r} of {where} has '::', gliner2's short form: send an object with name, dtype, "
                "choices and description.",
                "structures",
            )
        if one.name in seen:
            raise InvalidRequestError(f"{where} has the field {one.name!r} twice: leave one out.", "structures")
        seen.add(one.name)
        if one.description is not None and not one.description.strip():
            raise InvalidRequestError(
                f"The description of {one.name!r} in {where} is empty: leave it out.", "structures"
            )
        for choice in one.choices if one.choices is not None else ("any",):
            if not choice.strip():
                raise InvalidRequestError(f"A choice of {one.name!r} in {where} is empty: write it.", "structures")
        # Words are compared in lower case, and blanks around them leave no token.
        read = [choice.strip().lower() for choice in dict.fromkeys(one.choices or ())]
        check_told_apart(f"choices of {one.name!r} in {where}", [*dict.fromkeys(one.choices or ())], read, "structures")
        if one.choices is not None and not one.choices:
            raise InvalidRequestError(f"choices of {one.name!r} in {where} is empty: leave it out.", "structures")
    return fields


def _choice_words(structures: Mapping[str, list[FieldForm]]) -> Iterator[str]:
    """What is read in front of the text: ``( name: field ( choice | choice ) , field ( choice ) )``."""
    for name, fields in structures.items():
        inner: list[str] = []
        for one in fields:
            if one.choices:
                between = [word for choice in one.choices for word in ("|", choice)][1:]
                inner += [*([","] if inner else []), one.name, "(", *between, ")"]
        if inner:
            yield from ["(", f"{name}:", *inner, ")"]


def _structure(
    name: str,
    fields: list[FieldForm],
    places: Mapping[str, int],
    threshold: float,
    form: StructureForm | list[str | FieldForm],
) -> AskedPart:
    """``places``: of words in front of the text, in lower case."""
    mode = form.mode if isinstance(form, StructureForm) else None
    anchor: int | None = None
    if isinstance(form, StructureForm) and mode == "natural":
        anchor = [one.name for one in fields].index(form.anchor) if form.anchor is not None else 0
    asked = tuple(
        _field(
            AskedField(
                one.name,
                threshold if one.threshold is None else one.threshold,
                one.dtype == "str",
                tuple((choice, places[choice.lower()]) for choice in dict.fromkeys(one.choices or ())),
                own_threshold=one.threshold or 0.0,
            ),
            one.cardinality or ("required_one" if place == anchor else "zero_or_more"),
            one.exclusive,
            has_mode=mode is not None,
        )
        for place, one in enumerate(fields)
    )
    part = SchemaPart(
        f"structures {name!r}",
        name,
        tuple(one.name for one in fields),
        tuple((one.name, one.description) for one in fields if one.description is not None),
        marker="field",
    )
    return AskedPart(name, asked, part, mode=mode, anchor=anchor, threshold=threshold)


def _field(asked: AskedField, cardinality: Cardinality, is_exclusive: bool, *, has_mode: bool) -> AskedField:
    """``asked``, with what it means in a structure with a mode."""
    if not has_mode:
        return asked
    has_one = cardinality in ("optional_one", "required_one")
    return asked._replace(
        is_single=asked.is_single or has_one,
        has_one=has_one,
        must_be_there=cardinality in ("required_one", "one_or_more"),
        exclusive=is_exclusive,
    )


def _relations(given: Relations, threshold: float) -> Iterator[AskedPart]:
    forms = given if isinstance(given, Mapping) else dict.fromkeys(given, RelationForm())
    if len(forms) < len(given):
        twice = Counter(given).most_common(1)[0][0]
        raise InvalidRequestError(f"relations has {twice!r} twice: leave one out.", "relations")
    for name, form in forms.items():
        found = RelationForm(form) if isinstance(form, str) else form
        if not name.strip():
            raise InvalidRequestError("relations has an empty name: write one.", "relations")
        if found.description is not None and not found.description.strip():
            raise InvalidRequestError(f"The description of {name!r} in relations is empty: leave it out.", "relations")
        least = threshold if found.threshold is None else found.threshold
        fields = tuple(AskedField(end, least, is_single=True) for end in ENDS)
        about = found.description or ""
        part = SchemaPart(f"relations {name!r}", name, ENDS, marker="relation", about=about)
        yield AskedPart(name, fields, part, is_relation=True)
