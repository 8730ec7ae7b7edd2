"""Inference that routes of several dialects share: the vectors of inputs, the scores of documents."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import partial
from typing import Any, NamedTuple, TypedDict, cast

import msgspec
from typing_extensions import NotRequired

from bei.engine.postprocess import descending
from bei.errors import InvalidRequestError
from bei.image.source import placed
from bei.server.endpoint.context import RequestContext, empty_text
from bei.server.endpoint.input_report import report_of
from bei.server.endpoint.render import Items, Reply
from bei.server.endpoint.vector_encoding import FLOATS, VectorForm
from bei.service.admission import Ticket
from bei.service.service import InferenceService
from bei.tasks.classify import Scores
from bei.tasks.embed import (
    CheckedTask,
    Embeddings,
    EmbedTask,
    SparseEmbeddings,
    TaskName,
    check_task,
    dropped_tokens,
    embed_chunks,
    embed_inputs,
    embed_sparse,
)
from bei.tasks.rerank import RerankTask, num_around, rerank
from bei.tasks.support import PartialResult
from bei.tokenizer.encoder import AS_CONFIGURED, EncodingOptions

# Characters of a prompt and its copies, one in front of each input.
_MOST_PROMPT_CHARS = 1 << 26

_RESULT_BYTES = 50  # of JSON, about: {"index":123,"relevance_score":0.12345678},


class Embedded(NamedTuple):
    """Vectors, the form in which each is written (None: several, or one that is never bytes alone), and what became of
    each input, if that is asked."""

    answer: Embeddings | SparseEmbeddings
    form: VectorForm | None
    report: Items | None

    @property
    def dense(self) -> Embeddings:
        """The vectors of a request that asked for no sparse ones."""
        assert isinstance(self.answer, Embeddings)
        return self.answer

    def reply(self, content: object) -> Reply:
        """``content`` with these vectors, or the vectors alone."""
        octets = partial(self.form.octets, self.dense) if self.form else None
        return Reply(content, self.answer.truncated, octets, self.report)


async def embedded(
    context: RequestContext,
    service: InferenceService,
    task: EmbedTask,
    *,
    forms: Seq[VectorForm] = (FLOATS,),
    around_bytes: int = 0,
) -> Embedded:
    """The vectors of a task.

    ``forms`` are those in which each vector will be written, ``around_bytes`` what stands around it; a sparse form is
    alone. Raises what the task and the checks of ``context`` raise.
    """
    form = forms[0]
    is_sparse = form.is_sparse
    checked = checked_task(context, service, task, form.task)
    item_bytes = around_bytes
    for each in forms:
        each.check(service.manifest, checked.width, task.normalize, task.dimensions_param)
        item_bytes += each.num_bytes(checked.width)
    context.check_answer(len(task.inputs) * item_bytes)
    answer: Embeddings | SparseEmbeddings
    if task.late_chunking:
        ticket = context.admit(service, [" ".join(cast("Seq[str]", task.inputs))], num_around=checked.num_around)
        return Embedded(await embed_chunks(service, checked, ticket=ticket), form, None)
    ticket = context.admit(service, checked.task.inputs, num_around=checked.num_around)
    if is_sparse:
        answer = await embed_sparse(service, checked, ticket=ticket)
        context.check_answer(len(task.inputs) * around_bytes + form.list_bytes(answer))
    else:
        answer = await embed_inputs(service, checked, ticket=ticket)
    report = await reported(service, checked, answer, ticket) if context.has_report else None
    return Embedded(answer, form if len(forms) == 1 and not is_sparse else None, report)


def checked_task(context: RequestContext, service: InferenceService, task: EmbedTask, name: TaskName) -> CheckedTask:
    """``check_task``, whose warnings go to the client, behind the checks of ``context``."""
    inputs, param = task.inputs, task.param
    if task.prompt is not None and len(task.prompt) * len(inputs) > _MOST_PROMPT_CHARS:
        raise InvalidRequestError(
            f"A prompt of {len(task.prompt)} characters in front of {len(inputs)} inputs is too much at once: "
            "shorten it, or split the request.",
            "prompt",
        )
    if (task.prompt_name is not None or task.prompt) and {*map(type, task.inputs)} == {list}:
        raise InvalidRequestError(
            "A prompt is of texts, and the request has token ids alone, which are read as they are: leave it out.",
            "prompt" if task.prompt else "prompt_name",
        )
    if context.has_report and not task.late_chunking:  # empty and unreadable inputs fail alone
        context.check_count(inputs, param)
        empty = {index: empty_text(index, param) for index, value in enumerate(inputs) if value == ""}
        task = msgspec.structs.replace(task, failed={**empty, **context.unreadable})
    else:
        context.check_inputs(inputs, param)
    if service.manifest.image_tower is not None and len(inputs) > 1:
        task = msgspec.structs.replace(task, inputs=[placed(one, place) for place, one in enumerate(inputs)])
    checked = check_task(service, task, name)
    for warning in checked.warnings:
        context.warn(warning)
    return checked


async def reported(service: InferenceService, checked: CheckedTask, result: PartialResult, ticket: Ticket) -> Items:
    """The report on each input, for the client."""
    return report_of(result, await dropped_tokens(service, checked, result, ticket=ticket))


class RankedText(TypedDict):
    """By descending score. ``document`` where it is asked for."""

    index: int
    relevance_score: float
    document: NotRequired[str]


async def ranked(
    context: RequestContext,
    service: InferenceService,
    query: str,
    documents: Seq[str],
    *,
    param: str,
    raw: bool = False,
    options: EncodingOptions = AS_CONFIGURED,
) -> Scores:
    """The scores of ``documents``, which the field ``param`` holds, against ``query``."""
    context.check_count(documents, param)
    context.check_answer(len(documents) * _RESULT_BYTES)
    task = RerankTask.of(query, documents, options, raw=raw)
    return await rerank(service, task, ticket=context.admit(service, task.inputs, num_around=num_around(service)))


def ranking(
    scores: Scores,
    top_n: int | None,
    documents: Seq[str] | None = None,
    *,
    score: str = "relevance_score",
    document: str = "document",
    is_score_first: bool = False,
) -> Items:
    """The index and the score of the ``top_n`` best (None, 0: of all), best first, and of ``documents`` its own;
    ``score`` and ``document`` are the names of both, ``is_score_first``: the score stands before the index."""
    values, order = scores.values[:, 0], order_of(scores)[: top_n or None]

    def result_of(index: int) -> dict[str, Any]:
        value = values[index]
        result = {score: value, "index": index} if is_score_first else {"index": index, score: value}
        return result if documents is None else {**result, document: documents[index]}

    num_chars = 0 if documents is None else sum(len(documents[index]) for index in order)
    num_bytes = len(order) * _RESULT_BYTES + num_chars
    return Items(len(order), num_bytes, lambda start, stop: [result_of(index) for index in order[start:stop]])


def order_of(scores: Scores) -> list[int]:
    """Indices by descending score; equal ones stay in order."""
    return descending(scores.values[:, 0])
