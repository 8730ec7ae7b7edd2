"""From scores of tokens to entities, with the aggregations of transformers' token classification pipeline.

``none``: every token with its scores. ``simple``: neighbouring tokens of one tag are joined. ``first``, ``average``,
``max``: the tokens of a word get one label first (that of its first token, of its mean scores, of its best token),
then words are joined. Tags may be in BIO form (B-PER, I-PER) or plain; what stands before a joined label's first hyphen
is left out. (transformers: TokenClassificationPipeline)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from bei.core import Encoding, Float32Array, TokenSpans

Aggregation = Literal["none", "simple", "first", "average", "max"]

_OUTSIDE = "O"


@dataclass(frozen=True)
class Entity:
    """A labelled span of a text: characters ``start`` to ``end``, and what stands there.

    ``scores`` float32 [labels]. ``token_id`` is the first token's. An entity of several tokens has the mean of their
    scores.
    """

    start: int
    end: int
    text: str
    token_id: int
    label: str
    score: float
    scores: Float32Array


def entities_of(
    text: str, encoding: Encoding, scores: Float32Array, labels: list[str], aggregation: Aggregation
) -> list[Entity]:
    """Entities of ``text`` in order. ``scores`` float32 [tokens, labels]; ``encoding`` has spans.

    Without aggregation every token but the special ones is there, outside ones too; with it, entities only.
    """
    spans = encoding.spans
    assert spans is not None  # the task asked for them
    tokens = [
        _entity(text, spans, encoding, scores[index], labels, index, index)
        for index in np.flatnonzero(~spans.special).tolist()
    ]
    if aggregation == "none":
        return tokens
    if aggregation != "simple":
        tokens = _words(text, spans, encoding, scores, labels, aggregation)
    joined = [_joined(text, group) for group in _groups(tokens)]
    return [entity for entity in joined if entity.label != _OUTSIDE]


def _entity(
    text: str, spans: TokenSpans, encoding: Encoding, scores: Float32Array, labels: list[str], first: int, last: int
) -> Entity:
    start, end = int(spans.offsets[first, 0]), int(spans.offsets[last, 1])
    best = int(scores.argmax())
    return Entity(
        start, end, text[start:end], int(encoding.input_ids[first]), labels[best], float(scores[best]), scores
    )


def _words(
    text: str,
    spans: TokenSpans,
    encoding: Encoding,
    scores: Float32Array,
    labels: list[str],
    aggregation: Aggregation,
) -> list[Entity]:
    """One entity a word; its tokens are neighbours of one word index."""
    words: list[list[int]] = []
    for index in np.flatnonzero(~spans.special).tolist():
        if words and spans.words[words[-1][-1]] == spans.words[index]:
            words[-1].append(index)
        else:
            words.append([index])
    return [
        _entity(text, spans, encoding, _word_scores(scores[word], aggregation), labels, word[0], word[-1])
        for word in words
    ]


def _word_scores(scores: Float32Array, aggregation: Aggregation) -> Float32Array:
    """Scores of a word from those of its tokens, float32 [tokens, labels]."""
    if aggregation == "first":
        first: Float32Array = scores[0]
        return first
    if aggregation == "max":
        best: Float32Array = scores[int(scores.max(axis=1).argmax())]
        return best
    mean: Float32Array = scores.mean(axis=0)
    return mean


def _groups(entities: list[Entity]) -> list[list[Entity]]:
    """Neighbours with one tag, a new group at every B-."""
    groups: list[list[Entity]] = []
    open_tag = None
    for entity in entities:
        prefix, tag = _parts(entity.label)
        if tag == open_tag and prefix != "B":
            groups[-1].append(entity)
        else:
            groups.append([entity])
            open_tag = tag
    return groups


def _parts(label: str) -> tuple[str, str]:
    """Prefix and tag: B-PER is (B, PER); a label of another form continues itself."""
    return (label[0], label[2:]) if label[:2] in ("B-", "I-") else ("I", label)


def _joined(text: str, group: list[Entity]) -> Entity:
    start, end = group[0].start, group[-1].end
    scores: Float32Array = np.mean([entity.scores for entity in group], axis=0).astype(np.float32)
    score = float(np.mean([entity.score for entity in group]))
    label = group[0].label.split("-", 1)[-1]
    return Entity(start, end, text[start:end], group[0].token_id, label, score, scores)
