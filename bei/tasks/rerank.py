"""Scores of documents against a query."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import cast

import msgspec

from bei.artifact.manifest import RerankTemplate
from bei.errors import InvalidRequestError
from bei.service.admission import Ticket
from bei.service.call import ModelRequest
from bei.service.model_service import ModelService
from bei.tasks.classify import Scores, label_scores, logits_of, scores_of
from bei.tasks.rerank_lists import score_lists
from bei.tasks.support import require
from bei.tokenizer.encoder import AS_CONFIGURED, EncodingOptions
from bei.tokenizer.prompts import num_chars, prompt_of
from bei.tokenizer.templates import PairTemplate


class RerankTask(ModelRequest, frozen=True, kw_only=True):
    """Pairs of a query and a document. ``raw``: the logits, else what the model's function makes of them, the sigmoid
    if it has none. ``instruction`` fills the slot of a model's template. ``label``: a classifier's, whose score is the
    pair's; None: the model is a reranker."""

    raw: bool = False
    instruction: str | None = None
    label: str | None = None

    @classmethod
    def of(
        cls,
        query: str,
        documents: Seq[str],
        options: EncodingOptions = AS_CONFIGURED,
        *,
        raw: bool = False,
        instruction: str | None = None,
    ) -> RerankTask:
        """One query with each of ``documents``."""
        return cls([(query, document) for document in documents], options, raw=raw, instruction=instruction)


async def rerank(service: ModelService, task: RerankTask, *, ticket: Ticket) -> Scores:
    """Score the second text of each pair against the first: one column. A model with a template is asked with it.

    The score of a ``label`` is its probability as ``classify`` gives it, of an only label the relevance. A model that
    reads lists scores all documents of a query together, by cosines, which ``raw`` leaves as they are.
    """
    require(service, "rerank" if task.label is None else "classify")
    if (layout := service.manifest.listwise) is not msgspec.UNSET:
        pairs = cast("Seq[tuple[str, str]]", task.inputs)
        found = await score_lists(service, layout, pairs, task.options, task.instruction, ticket=ticket)
        return Scores(found.lengths, found.truncated, values=found.values[:, None], labels=["score"])
    column = _column(service, task.label)
    asked = asked_pairs(service, ModelRequest(task.inputs, task.options, task.failed), task.instruction)
    answer, classification = await logits_of(service, asked, ticket)
    labels = classification.labels
    function = "none" if task.raw else classification.relevance if len(labels) == 1 else classification.function
    values = await scores_of(answer, lambda rows: label_scores(service, rows, function)[:, column : column + 1], 1)
    return Scores(answer.lengths, answer.truncated, answer.errors, values=values, labels=["score"])


def num_around(service: ModelService, instruction: str | None = None) -> int:
    """Characters that are read with each pair: of the model's template or, without one, its default prompt.
    ``instruction`` None: the template's own."""
    template = service.manifest.rerank_template
    if template is None:
        return num_chars(prompt_of(service.manifest))
    return _pair_template(template, instruction).num_chars


def _pair_template(template: RerankTemplate, instruction: str | None) -> PairTemplate:
    return PairTemplate(template.body, template.instruction if instruction is None else instruction)


def asked_pairs(service: ModelService, request: ModelRequest, instruction: str | None = None) -> ModelRequest:
    """Pairs as the model reads them: in its template, if it has one. ``instruction`` None: the template's own.

    Raises InvalidRequestError for an instruction that it has no slot for.
    """
    template = service.manifest.rerank_template
    if template is None:
        if instruction is not None:
            raise InvalidRequestError(f"{service.name} takes no instruction: leave it out.", "instruction")
        return request
    if instruction is not None and "{instruction}" not in template.body:
        raise InvalidRequestError(f"{service.name}'s template takes no instruction: leave it out.", "instruction")
    # Filled chunk by chunk: all at once, a long query would stand in memory as often as there are documents.
    options = replace(request.options, framed=True, template=_pair_template(template, instruction))
    return ModelRequest(request.inputs, options, request.failed)


def _column(service: ModelService, label: str | None) -> int:
    """The place of ``label`` among the model's. Raises InvalidRequestError where it has none of that name."""
    if label is None:
        return 0
    classification = service.manifest.classification
    assert classification is not None  # require("classify") has passed
    if label not in classification.labels:
        shown = ", ".join(classification.labels[:20])
        raise InvalidRequestError(f"{service.name} has no label {label[:40]!r}; it has: {shown}.", "label")
    return classification.labels.index(label)
