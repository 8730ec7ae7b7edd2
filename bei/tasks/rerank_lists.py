"""Scores by models that read a query with all its documents at once (jina-reranker-v3, arXiv:2509.25085).

Documents that the model's own code, or the artifact's longest sequence, does not take in one text are read with the
query in further texts. The query's state is then the mean of those of all texts, weighted by each one's best score, and
every document's score is its state's cosine with that mean, as in the model's own code.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from functools import partial
from typing import NamedTuple

import numpy as np

from bei.artifact.label_layouts import Listwise
from bei.core import Encoding, Float32Array
from bei.errors import InvalidRequestError
from bei.service.admission import Ticket
from bei.service.call import ModelRequest
from bei.service.model_service import ModelService
from bei.tasks.support import off_loop_if_large
from bei.tokenizer.encoder import EncodingOptions
from bei.tokenizer.list_prompt import list_prompt, passage, without_markers

# Tokens that a document may have in a text beyond those that it has by itself: its edges may be split otherwise.
_SLACK = 4
_OUTPUT = "token_projection"


class ListScores(NamedTuple):
    """Of each pair: ``values`` float32 [n], cosines; ``lengths``, of which the first document of a text has those that
    belong to none; ``truncated``: places of pairs whose query or document was cut."""

    values: Float32Array
    lengths: list[int]
    truncated: list[int]


class _Text(NamedTuple):
    """Cut to what is read. ``num_tokens``: by itself."""

    text: str
    num_tokens: int
    is_cut: bool


class _Block(NamedTuple):
    """One text of the model: a query, its documents, and their places among the pairs."""

    query: str
    documents: list[_Text]
    places: list[int]


async def score_lists(
    service: ModelService,
    layout: Listwise,
    pairs: Seq[tuple[str, str]],
    options: EncodingOptions,
    instruction: str | None,
    *,
    ticket: Ticket,
) -> ListScores:
    """Score the second text of each pair against the first. Pairs of one query are one list, in their order.

    Raises as ``ModelService.infer`` does, and InvalidRequestError for a query that leaves no room for documents.
    """
    places: dict[str, list[int]] = {}
    for place, (query, _) in enumerate(pairs):
        places.setdefault(query, []).append(place)
    reader = _Reader(service, layout, options, instruction, ticket)
    blocks = [await reader.blocks(query, [pairs[place][1] for place in own], own) for query, own in places.items()]
    texts = [
        list_prompt(block.query, [one.text for one in block.documents], instruction, layout)
        for of_query in blocks
        for block in of_query
    ]
    read = EncodingOptions(truncate=False, add_special_tokens=options.add_special_tokens)
    answer = await service.infer(
        ModelRequest(texts, read),
        ticket=ticket,
        outputs={_OUTPUT},
        reduce=lambda row, encoding: {_OUTPUT: row[_OUTPUT][marked(encoding, layout)]},
    )
    found = ListScores(np.zeros(len(pairs), np.float32), [0] * len(pairs), sorted(reader.cut))
    rows, encodings = iter(answer.rows), iter(answer.encodings)
    for of_query in blocks:
        states = _checked([next(rows)[_OUTPUT] for _ in of_query], of_query)
        work = partial(cosines, states)
        found.values[[place for block in of_query for place in block.places]] = await off_loop_if_large(
            work, sum(own.size for own in states)
        )
        for block in of_query:
            rest = next(encodings).num_tokens
            for place, one in zip(block.places[1:], block.documents[1:], strict=True):
                found.lengths[place] = one.num_tokens
                rest -= one.num_tokens
            found.lengths[block.places[0]] = max(rest, 0)
    return found


def marked(encoding: Encoding, layout: Listwise) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
    """The places of the documents' markers in their order, then those of the query's."""
    ids = encoding.input_ids
    return np.concatenate([np.flatnonzero(ids == index) for index in (layout.document_id, layout.query_id)])


def cosines(states: Seq[Float32Array]) -> Float32Array:
    """The score of every document. ``states``: of each text [documents + 1, width], the query's last.

    (jina-reranker-v3's ``rerank``: weights of the query's states are the largest of (1 + cosine) / 2 of each text.)
    """
    queries = np.stack([own[-1] for own in states])
    weights = [((1 + _cosine(own[:-1], own[-1])) / 2).max() for own in states]
    query = np.average(queries, axis=0, weights=weights) if sum(weights) > 0 else queries.mean(axis=0)
    return _cosine(np.concatenate([own[:-1] for own in states]), query).astype(np.float32)


def _cosine(documents: Float32Array, query: Float32Array) -> Float32Array:
    norms = np.linalg.norm(documents, axis=1) * np.linalg.norm(query)
    values: Float32Array = documents @ query / np.maximum(norms, 1e-8)
    return values


def _checked(states: list[Float32Array], blocks: Seq[_Block]) -> list[Float32Array]:
    for own, block in zip(states, blocks, strict=True):
        if len(own) != len(block.documents) + 1:  # a tokenizer that makes a marker of other text
            raise InvalidRequestError(
                "A text has a token that the model reads as the end of a document or of the query: take it out.",
                "documents",
            )
    return states


class _Reader:
    """Cuts texts to the model's limits, and groups documents. ``cut``: places of pairs with a text that was cut."""

    def __init__(
        self,
        service: ModelService,
        layout: Listwise,
        options: EncodingOptions,
        instruction: str | None,
        ticket: Ticket,
    ) -> None:
        self._service = service
        self._layout = layout
        self._options = options
        self._instruction = instruction
        self._ticket = ticket
        self.cut: set[int] = set()

    async def blocks(self, query: str, documents: Seq[str], places: Seq[int]) -> list[_Block]:
        """The texts of one list."""
        layout, most = self._layout, self._service.manifest.max_seq_len
        last = passage(layout.max_documents - 1, "", layout)
        frame = list_prompt("", [], self._instruction, layout)
        around, own = await self._num_tokens([frame, f"{last}\n"])
        own += _SLACK
        room = most - around - own - 2 * _SLACK
        if room < 4:
            raise InvalidRequestError(
                f"The model reads {most} tokens at once, of which the instruction leaves too few: shorten it.",
                "instruction",
            )
        # The query is read twice: half of the room is its own at most.
        (asked,) = await self._shortened([query], min(layout.max_query_tokens, room // 4))
        room -= 2 * asked.num_tokens
        limit = min(layout.max_document_tokens, room, self._options.max_tokens or room)
        texts = await self._shortened(documents, limit)
        self.cut.update(place for place, one in zip(places, texts, strict=True) if one.is_cut or asked.is_cut)
        lengths = [one.num_tokens for one in texts]
        return [
            _Block(asked.text, texts[first:stop], [*places[first:stop]])
            for first, stop in _groups(lengths, asked.num_tokens, room + own, own, layout)
        ]

    async def _num_tokens(self, texts: Seq[str]) -> list[int]:
        request = ModelRequest(texts, EncodingOptions(whole=True))
        return [one.num_tokens for one in await self._service.encode(request, ticket=self._ticket)]

    async def _shortened(self, texts: Seq[str], most: int) -> list[_Text]:
        """``texts`` cut to ``most`` tokens each, without markers. Raises InputTooLongError where the request forbids to
        cut."""
        asked = self._options
        options = EncodingOptions(
            truncate=asked.truncate,
            direction=asked.direction,
            max_tokens=most,
            add_special_tokens=False,
            with_spans=True,
        )
        read = [text for text in texts if text]  # the service takes no text without tokens
        encodings = await self._service.encode(ModelRequest(read, options), ticket=self._ticket) if read else []
        found = iter(encodings)
        return [_cut(text, next(found), self._layout) if text else _Text("", 0, False) for text in texts]


def _cut(text: str, encoding: Encoding, layout: Listwise) -> _Text:
    if encoding.truncated:
        assert encoding.spans is not None  # they were asked for
        offsets = encoding.spans.offsets
        text = text[int(offsets[:, 0].min()) : int(offsets[:, 1].max())]
    return _Text(without_markers(text, layout), encoding.num_tokens, encoding.truncated)


def _groups(lengths: Seq[int], query_tokens: int, room: int, own: int, layout: Listwise) -> Iterator[tuple[int, int]]:
    """First and one past the last document of each text. ``lengths``: their tokens, to which each adds ``own``;
    ``room``: the most in one text.

    The model's own code ends a text when less than ``max_document_tokens`` of ``max_tokens`` are left beside the query.
    """
    start = used = tokens = 0
    for index, length in enumerate(lengths):
        if index > start and used + length + own > room:
            yield start, index
            start, used, tokens = index, 0, 0
        used += length + own
        tokens += length
        left = layout.max_tokens - 2 * query_tokens - tokens
        if index + 1 - start >= layout.max_documents or left <= layout.max_document_tokens:
            yield start, index + 1
            start, used, tokens = index + 1, 0, 0
    if start < len(lengths):
        yield start, len(lengths)
