"""Scores of documents against a query."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

from bei.engine.postprocess import apply_function
from bei.errors import InvalidRequestError
from bei.service.admission import Ticket
from bei.service.service import InferenceService
from bei.tasks.classify import Scores, logits_of
from bei.tasks.support import computed, require
from bei.tokenizer.encoder import AS_CONFIGURED, EncodingOptions, PairTemplate


async def rerank(
    service: InferenceService,
    query: str,
    documents: Seq[str],
    *,
    ticket: Ticket,
    raw: bool = False,
    instruction: str | None = None,
    options: EncodingOptions = AS_CONFIGURED,
) -> Scores:
    """Score each of ``documents`` against ``query``, as ``rerank_pairs`` does."""
    pairs = [(query, document) for document in documents]
    return await rerank_pairs(service, pairs, ticket=ticket, raw=raw, instruction=instruction, options=options)


async def rerank_pairs(
    service: InferenceService,
    pairs: Seq[tuple[str, str]],
    *,
    ticket: Ticket,
    raw: bool = False,
    instruction: str | None = None,
    options: EncodingOptions = AS_CONFIGURED,
) -> Scores:
    """Score the second text of each of ``pairs`` against the first; ``raw``: the logit, else what the model's function
    makes of it, the sigmoid if it has none. One column.

    A model with a template is asked with it; ``instruction`` fills its slot.
    """
    require(service, "rerank")
    template = service.manifest.rerank_template
    if template is not None:
        if instruction is not None and "{instruction}" not in template.body:
            raise InvalidRequestError(f"{service.name}'s template takes no instruction: leave it out.", "instruction")
        chosen = template.instruction if instruction is None else instruction
        # Filled chunk by chunk: all at once, a long query would stand in memory as often as there are documents.
        options = replace(options, framed=True, template=PairTemplate(template.body, chosen))
    elif instruction is not None:
        raise InvalidRequestError(f"{service.name} takes no instruction: leave it out.", "instruction")
    answer, classification = await logits_of(service, pairs, ticket, options)
    chosen = "none" if raw else classification.relevance
    values = await computed(answer.rows, "logits", lambda rows: apply_function(rows, chosen))
    return Scores(values, ["score"], answer.num_tokens, answer.truncated)
