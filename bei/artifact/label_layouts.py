"""How a model reads what a request brings beside its texts: labels, or a list of documents."""

from __future__ import annotations

from typing import Literal

import msgspec

from bei.core import EXTRAS, record_columns

# As Laya counts them.
KINDS_OF_QUESTIONS = ("choice", "score", "noul")


class Schema(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tokens of a schema in front of a text (GLiNER2, arXiv:2507.18546). Each part of it is ``opening``, ``part_id``,
    the name of the task with descriptions of its labels, ``opening``, the labels behind their markers, and twice
    ``closing``. Between parts stands ``between_id``, behind the last one ``separator_id``.

    ``task``: the name of the part whose labels a request brings. ``field_id``, ``relation_id``: the markers of labels
    of structures and relations. ``part_id`` is the part's own token: a model that finds spans scores ``num_counts``
    numbers of instances from its state, from 0. Words are read in lower case, a text that ends in no full stop gets
    one, and there are no tokens around a text.
    """

    task: str
    opening: list[int]
    closing: list[int]
    part_id: int
    field_id: int
    relation_id: int
    between_id: int
    separator_id: int
    num_counts: int


class RelationPairs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which pairs of a text's candidates are scored for a relation (GLiNER2.5): of its ``most_heads`` best heads and
    its ``most_tails`` best tails, with probabilities of at least ``least_end``, the ``most_pairs`` whose products are
    largest."""

    most_heads: int
    most_tails: int
    most_pairs: int
    least_end: float


class Records(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """From what instances of structures are formed (GLiNER2.5, ``bei.engine.record_columns``): candidates are vectors
    of ``width`` numbers, and the model has learned ``num_queries`` instances."""

    width: int
    num_queries: int

    @property
    def candidate_columns(self) -> int:
        """Numbers of a boundary as a start, or as an end."""
        return record_columns(self.width, self.num_queries)[0]

    @property
    def columns(self) -> int:
        """Numbers of a token."""
        return record_columns(self.width, self.num_queries)[1]


class Candidates(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How spans are chosen from pairs of boundaries (GLiNER2.5): a graph scores those of up to ``most_boundaries``
    starts and ends (``bei.engine.boundaries``), of which a text's candidates are the ``least_per_label`` best of each
    label, and then the best of all, ``pool_size`` in all. A label that is absent with a probability above
    ``absent_above`` has no spans. ``relations``: of models that score pairs of them, by the output relation_logits.
    ``records``: of models that form instances of them, by the output record_states."""

    most_boundaries: int
    pool_size: int
    least_per_label: int
    absent_above: float
    relations: RelationPairs | msgspec.UnsetType = msgspec.UNSET
    records: Records | msgspec.UnsetType = msgspec.UNSET

    @property
    def columns(self) -> int:
        """Numbers of a row for one label."""
        return self.most_boundaries + EXTRAS


class Extraction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a model reads labels and a text's words: each label behind the token ``label_id``, then ``separator_id``,
    then the words, each tokenized by itself.

    ``reads_marker``: a label is represented by the token in front of it, else by its own first token. ``max_width``:
    words of the longest span. ``max_words``: most words that the model was trained to read at once. ``by_word``: the
    scores are those of words as the first of a span, its last, and one inside, else those of spans by their widths.
    ``label_width``: labels do not stand in front of the words, but are vectors of so many numbers, of the tower of
    labels; then the two ids are -1, and ``reads_marker`` is false. ``schema``: what stands around the labels; then
    columns are those of ``bei.engine.schema_columns``. ``max_entities``: the scores are those of pairs of entities
    that a request names, up to so many of a text, and labels are relations; ``max_width`` is ``max_words`` then.
    ``candidates``: they are those of pairs of boundaries, spans have any length, and no instances are counted. All four
    are unset in artifacts of other models.
    """

    label_id: int
    separator_id: int
    reads_marker: bool
    max_width: int
    max_words: int
    by_word: bool = False
    label_width: int | msgspec.UnsetType = msgspec.UNSET
    schema: Schema | msgspec.UnsetType = msgspec.UNSET
    max_entities: int | msgspec.UnsetType = msgspec.UNSET
    candidates: Candidates | msgspec.UnsetType = msgspec.UNSET

    @property
    def has_any_width(self) -> bool:
        """True if spans may have any length."""
        return self.by_word or bool(self.candidates)

    @property
    def columns(self) -> int:
        """Scores of a word, or of an entity, for one label."""
        if self.max_entities is not msgspec.UNSET:
            return self.max_entities
        if self.candidates:
            return self.candidates.columns
        return 3 if self.by_word else self.max_width


class Labelling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a model reads labels of a request with a text: each behind the token ``label_token``, then
    ``separator_token``, in front of the text unless ``text_first``.

    ``reads_marker``: a label is represented by the token in front of it, else by its own first token. ``schema``: what
    stands around the labels, which with the words are then read as those of ``Extraction``. Unset in artifacts of other
    models.
    """

    label_token: str
    label_id: int
    separator_token: str
    text_first: bool
    reads_marker: bool
    schema: Schema | msgspec.UnsetType = msgspec.UNSET


class Listwise(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a reranker reads a query and many documents in one text (``bei.tokenizer.list_prompt``): a marker behind each
    document, and one behind the query, whose states it compares.

    ``*_token``, ``*_id``: the markers. ``max_query_tokens``, ``max_document_tokens``: of more, the first are read.
    ``max_documents``, ``max_tokens``: the model's own code puts no more into one text; further documents are read with
    the query in another one.
    """

    document_token: str
    query_token: str
    document_id: int
    query_id: int
    max_query_tokens: int
    max_document_tokens: int
    max_documents: int
    max_tokens: int


class OptionMarkers(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a model reads a question, its options and a text (Laya): ``start_id``, the question, ``separator_id``, each
    option behind ``marker_id``, ``separator_id``, the text, ``separator_id``. The type of every token is the place of
    the question's kind in ``KINDS_OF_QUESTIONS``, and an option's score is that of its marker.

    ``marker_token``: how the marker is spelled; texts that spell it have a blank there. ``max_option_tokens``: most of
    one option; ``max_question_tokens``: of question, options and their markers. ``temperatures``: what scores are
    divided by, by the kind of question, or by kind and number of options ("choice:3-5").

    ``form``: whose words stand around question, options and text (``bei.tasks.decision_readings``). OpenDecider's
    models do not read the kind of a question, and read a special token that a text spells as plain characters.
    """

    start_id: int
    separator_id: int
    marker_id: int
    marker_token: str
    max_option_tokens: int
    max_question_tokens: int
    temperatures: dict[str, float]
    form: Literal["laya", "opendecider"] = "laya"

    @property
    def before_text(self) -> str:
        """What stands in front of a text."""
        return "input: " if self.form == "opendecider" else ""

    def without_marker(self, text: str) -> str:
        """``text`` as it is read."""
        return text if self.form == "opendecider" else text.replace(self.marker_token, " ")

    def temperature(self, kind: str, num_options: int) -> float:
        """Of questions of ``kind``."""
        sizes = ((2, "2"), (5, "3-5"), (10, "6-10"))
        size = next((name for most, name in sizes if num_options <= most), "11+")
        return self.temperatures.get(f"{kind}:{size}", self.temperatures[kind])
