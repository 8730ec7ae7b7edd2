"""Faults of how a manifest says that a model reads its inputs: templates, labels of requests, lists."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from bei.artifact.label_layouts import KINDS_OF_QUESTIONS, Records, RelationPairs, Schema
from bei.artifact.manifest import Manifest

# 16 million tokens are a thousand times a batch.
MOST_TOKENS = 1 << 24
MOST_COUNT = 1 << 31  # token ids are int32
_MOST_BOUNDARIES, _MOST_CANDIDATES = 128, 1 << 14
_MOST_ENDS, _MOST_PAIRS = 1 << 10, 1 << 12  # of a relation
_MOST_COUNTS = 256  # of instances; GLiNER2 has 20


def shown(value: object) -> str:
    """``value`` in a message: printable, and not long."""
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def reading_faults(manifest: Manifest) -> Iterator[str]:
    """All of them."""
    for part in (_templates, _decisions, _extraction, _listwise, _labelling, _option_markers):
        yield from part(manifest)


def _templates(manifest: Manifest) -> Iterator[str]:
    template = manifest.rerank_template
    if template is not None:
        if "rerank" not in manifest.tasks:
            yield "there is a rerank_template, and the model does not rerank"
        for slot in ("{query}", "{document}"):
            if slot not in template.body:
                yield f"the body of rerank_template has no {slot}: every pair would be the same text"
        if template.last_id is not msgspec.UNSET and not 0 <= template.last_id < manifest.spec.vocab_size:
            yield f"rerank_template.last_id is {shown(template.last_id)}, which the model has no row for"
    if (asked := manifest.classify_template) and (manifest.tasks != ["classify"] or "{text}" not in asked.body):
        yield "classify_template goes with the task classify alone, and its body must have {text}"


def _decisions(manifest: Manifest) -> Iterator[str]:
    """Faults of what is read to decide."""
    asked = manifest.decide_template
    if isinstance(asked, msgspec.UnsetType):
        if "decide" in manifest.tasks and not manifest.option_markers:
            yield "the task decide has no decide_template"
        return
    if manifest.tasks != ["decide"]:
        yield "decide_template goes with the task decide alone"
    by_tokens = asked.option is msgspec.UNSET
    if by_tokens != (manifest.dimension("logits") is not None):
        yield "decide_template must have an option where the output is token_likelihood, and none where it is logits"
    for slot in ("{text}", "{question}", *(["{options}"] if by_tokens else [])):
        if slot not in asked.body:
            yield f"the body of decide_template has no {slot}"
    if not by_tokens and "{option}" not in str(asked.option):
        yield "the option of decide_template has no {option}: all would be the same text"


def _extraction(manifest: Manifest) -> Iterator[str]:
    """Faults of how labels and words are read, which goes with scores of spans."""
    found, width = manifest.extraction, manifest.dimension("span_logits")
    if (width is None) != isinstance(found, msgspec.UnsetType):
        yield "extraction and the output span_logits must both be there, or neither"
    elif not isinstance(found, msgspec.UnsetType):
        tower = manifest.label_tower
        if (found.label_width is msgspec.UNSET) != (tower is None):
            yield "label_width of extraction and a tower of labels must both be there, or neither"
        elif tower is not None and [one.dimension for one in tower.outputs] != [found.label_width]:
            yield "the tower of labels has vectors of another width than label_width of extraction"
        for name in ("label_id", "separator_id") if tower is None else ():
            if not 0 <= (value := getattr(found, name)) < manifest.spec.vocab_size:
                yield f"{name} of extraction is {shown(value)}, which is in no vocabulary"
        if found.schema and (tower is not None or found.by_word):
            yield "extraction has a schema, which goes with scores of spans, and with labels in front of the text"
        if found.max_entities is not msgspec.UNSET and (tower is not None or found.by_word or found.schema):
            yield "extraction has max_entities, which goes with relations in front of the text alone"
        if found.candidates and (not found.schema or found.max_width != found.max_words):
            yield "extraction has candidates, which go with a schema, and with spans of any length"
        if (pool := found.candidates) and not (
            1 <= pool.most_boundaries <= _MOST_BOUNDARIES
            and 0 <= pool.least_per_label <= pool.pool_size <= _MOST_CANDIDATES
            and 0 <= pool.absent_above <= 1
        ):
            yield "the candidates of extraction have an invalid number"
        yield from _relations(pool.relations if pool else msgspec.UNSET, manifest.dimension("relation_logits"))
        yield from _records(pool.records if pool else msgspec.UNSET, manifest.dimension("record_states"))
        yield from _schema("extraction", found.schema, manifest.spec.vocab_size)
        if found.columns != width or found.max_width < 1 or not 1 <= found.max_words <= MOST_TOKENS:
            yield "extraction has an invalid max_width or max_words"


def _relations(found: RelationPairs | msgspec.UnsetType, width: int | None) -> Iterator[str]:
    """Faults of how pairs of spans are chosen, whose scores are ``width`` in a row."""
    if (found.most_pairs if found else None) != width:
        yield "the relations of extraction do not go with the output relation_logits"
    if found and not (
        1 <= found.most_heads <= _MOST_ENDS
        and 1 <= found.most_tails <= _MOST_ENDS
        and 1 <= found.most_pairs <= _MOST_PAIRS
        and 0 <= found.least_end <= 1
    ):
        yield "the relations of extraction have an invalid number"


def _records(found: Records | msgspec.UnsetType, width: int | None) -> Iterator[str]:
    """Faults of what instances are formed from, which has ``width`` numbers in a row."""
    if found and not (1 <= found.width <= _MOST_ENDS and 1 <= found.num_queries <= _MOST_ENDS):
        yield "the records of extraction have an invalid number"
    elif (found.columns if found else None) != width:
        yield "the records of extraction do not go with the output record_states"


def _schema(what: str, found: Schema | msgspec.UnsetType, vocab_size: int) -> Iterator[str]:
    if isinstance(found, msgspec.UnsetType):
        return
    own = (found.part_id, found.field_id, found.relation_id, found.between_id, found.separator_id)
    ids = (*found.opening, *found.closing, *own)
    if not all(0 <= value < vocab_size for value in ids):
        yield f"the schema of {what} has a token that is in no vocabulary"
    if not 2 <= found.num_counts <= _MOST_COUNTS:
        yield f"the schema of {what} has {shown(found.num_counts)} counts, and must have 2 to {_MOST_COUNTS}"


def _listwise(manifest: Manifest) -> Iterator[str]:
    """Faults of how lists of documents are read, which goes with the states of their markers."""
    found = manifest.listwise
    if (manifest.dimension("token_projection") is None) != isinstance(found, msgspec.UnsetType):
        yield "listwise and the output token_projection must both be there, or neither"
    elif not isinstance(found, msgspec.UnsetType):
        ids = found.document_id, found.query_id
        if ids[0] == ids[1] or not all(0 <= value < manifest.spec.vocab_size for value in ids):
            yield f"document_id and query_id of listwise are {shown(ids[0])} and {shown(ids[1])}: no two tokens"
        if "" in (found.document_token, found.query_token):
            yield "listwise has a marker without a character"
        for name in ("max_query_tokens", "max_document_tokens", "max_documents", "max_tokens"):
            if not 1 <= (value := getattr(found, name)) <= MOST_TOKENS:
                yield f"{name} of listwise is {shown(value)}, and must be from 1 to {MOST_TOKENS}"


def _labelling(manifest: Manifest) -> Iterator[str]:
    """Faults of how labels of a request are read with a text."""
    found = manifest.labelling
    if (manifest.dimension("label_logits") is None) != isinstance(found, msgspec.UnsetType):
        yield "labelling and the output label_logits must both be there, or neither"
    elif not isinstance(found, msgspec.UnsetType):
        if not 0 <= found.label_id < manifest.spec.vocab_size:
            yield f"label_id of labelling is {shown(found.label_id)}, which is in no vocabulary"
        if "" in (found.label_token, found.separator_token) or found.label_token == found.separator_token:
            yield "label_token and separator_token of labelling are no two tokens"
        yield from _schema("labelling", found.schema, manifest.spec.vocab_size)


def _option_markers(manifest: Manifest) -> Iterator[str]:
    """Faults of how questions and their options are read."""
    found = manifest.option_markers
    if (manifest.dimension("option_logits") is None) != isinstance(found, msgspec.UnsetType):
        yield "option_markers and the output option_logits must both be there, or neither"
    elif not isinstance(found, msgspec.UnsetType):
        ids = {found.start_id, found.separator_id, found.marker_id}
        if found.marker_id in (found.start_id, found.separator_id) or not all(
            0 <= value < manifest.spec.vocab_size for value in ids
        ):
            yield "start_id, separator_id and marker_id of option_markers are no such tokens"
        if not found.marker_token:
            yield "option_markers has a marker without a character"
        for name in ("max_option_tokens", "max_question_tokens"):
            if not 1 <= (value := getattr(found, name)) <= MOST_TOKENS:
                yield f"{name} of option_markers is {shown(value)}, and must be from 1 to {MOST_TOKENS}"
        if missing := {*KINDS_OF_QUESTIONS} - found.temperatures.keys():
            yield f"option_markers has no temperature of {', '.join(sorted(missing))}"
        if not all(0 < value < float("inf") for value in found.temperatures.values()):
            yield "option_markers has a temperature that is no number above 0"


def repeated(what: str, names: Sequence[str]) -> Iterator[str]:
    """Faults of names that stand twice in ``what``."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            yield f"{what} has {shown(name)} twice"
        seen.add(name)
