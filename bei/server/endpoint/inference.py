"""What routes of several dialects ask of a model: the vectors of inputs, the scores of documents."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import partial
from typing import NamedTuple

from bei.engine.postprocess import descending
from bei.errors import BeiError, InvalidRequestError
from bei.server.endpoint.context import Call, empty_text
from bei.server.endpoint.input_report import report_of
from bei.server.endpoint.render import Items
from bei.server.endpoint.reply import Reply
from bei.server.endpoint.vector_encoding import FLOATS, VectorForm
from bei.service.admission import Ticket
from bei.service.service import InferenceService
from bei.service.submission import ModelInput
from bei.tasks.classify import Scores
from bei.tasks.dimensions import check_dimensions
from bei.tasks.embed import Embeddings, SparseEmbeddings, dropped_tokens, embed_inputs, embed_sparse
from bei.tasks.partial import Fates
from bei.tasks.rerank import rerank
from bei.tokenizer import prompts
from bei.tokenizer.encoder import AS_CONFIGURED, EncodingOptions


class Embedded(NamedTuple):
    """Vectors, the form in which each is written (None: several, or one that is never bytes alone), and what became of
    each input, if that is asked."""

    answer: Embeddings | SparseEmbeddings
    form: VectorForm | None
    report: Items | None

    @property
    def dense(self) -> Embeddings:
        """The vectors of a call that asked for no sparse ones."""
        assert isinstance(self.answer, Embeddings)
        return self.answer

    def reply(self, content: object) -> Reply:
        """``content`` with these vectors, or the vectors alone."""
        octets = partial(self.form.octets, self.dense) if self.form else None
        return Reply(content, self.answer.truncated, octets, self.report)


async def embedded(
    call: Call,
    service: InferenceService,
    inputs: Seq[ModelInput],
    *,
    param: str,
    forms: Seq[VectorForm] = (FLOATS,),
    around_bytes: int = 0,
    prompt_name: str | None = None,
    input_type: str | None = None,
    prompt: str | None = None,
    dimensions: int | None = None,
    dimensions_param: str = "dimensions",
    normalize: bool | None = None,
    top_k: int | None = None,
    options: EncodingOptions = AS_CONFIGURED,
) -> Embedded:
    """The vectors of ``inputs``, which the field ``param`` holds; ``dimensions_param`` is that of ``dimensions``.

    ``forms`` are those in which each vector will be written, ``around_bytes`` what stands around it; a sparse one is
    alone, and ``top_k`` is of it. Raises what ``embed_inputs`` and the checks of ``call`` raise.
    """
    wrong = wrong_of(call, inputs, param)
    check_cut(call, service, dimensions, dimensions_param)
    width = service.manifest.dimension("embedding") or 0
    width = min(width, dimensions or width)
    for form in forms:
        form.check(service.manifest, width, normalize, dimensions_param)
    is_sparse = forms[0].is_sparse
    if is_sparse and dimensions is not None:
        raise InvalidRequestError(f"{dimensions_param} are of dense vectors: leave them out.", dimensions_param)
    call.check_answer(len(inputs) * (around_bytes + sum(form.num_bytes(width) for form in forms)))
    has_texts = any(isinstance(value, str) for value in inputs)
    chosen = asked_prompt(call, service, prompt_name, input_type, prompt, has_texts=has_texts)
    ticket = call.admit(service, inputs)
    answer: Embeddings | SparseEmbeddings
    if is_sparse:
        role = prompts.role_of(service.manifest, prompt_name, input_type)
        options = prompts.in_role(options, role)  # for the report too
        answer = await embed_sparse(
            service, inputs, ticket=ticket, prompt=chosen, role=role, top_k=top_k, options=options, wrong=wrong
        )
        call.check_answer(len(inputs) * around_bytes + forms[0].list_bytes(answer))
    else:
        answer = await embed_inputs(
            service,
            inputs,
            ticket=ticket,
            prompt=chosen,
            dimensions=dimensions,
            normalize=normalize,
            options=options,
            wrong=wrong,
        )
    report = await reported(call, service, inputs, answer, ticket=ticket, prompt=chosen, options=options)
    return Embedded(answer, forms[0] if len(forms) == 1 and not is_sparse else None, report)


def check_cut(call: Call, service: InferenceService, dimensions: int | None, param: str = "dimensions") -> None:
    """Warn the client, or raise InvalidRequestError, as ``bei.tasks.dimensions`` says of vectors of ``dimensions``."""
    warning = check_dimensions(service.manifest, dimensions, param, untrained=service.untrained_dimensions)
    if warning is not None:
        call.warn(warning)


async def reported(
    call: Call,
    service: InferenceService,
    inputs: Seq[ModelInput],
    answer: Fates,
    *,
    ticket: Ticket,
    prompt: str,
    options: EncodingOptions,
) -> Items | None:
    """What became of each of ``inputs`` in ``answer``, if the request asks for it."""
    if not call.has_report:
        return None
    dropped = await dropped_tokens(service, inputs, answer, ticket=ticket, prompt=prompt, options=options)
    return report_of(answer, dropped)


def wrong_of(call: Call, inputs: Seq[ModelInput], param: str) -> dict[int, BeiError] | None:
    """What has no text among ``inputs``, for a request that is answered in part; of others it is an error."""
    if not call.has_report:
        call.check_inputs(inputs, param)
        return None
    call.check_count(inputs, param)
    empty = {index: empty_text(index, param) for index, value in enumerate(inputs) if value == ""}
    return {**empty, **call.unreadable}


def asked_prompt(
    call: Call,
    service: InferenceService,
    prompt_name: str | None = None,
    input_type: str | None = None,
    prompt: str | None = None,
    *,
    has_texts: bool = True,
) -> str:
    """The prompt that is asked for (``bei.tokenizer.prompts``). Texts that get none because nobody said what they are, of
    a model that was trained with prompts, are answered with a warning. Raises InvalidRequestError."""
    if prompt_name is None and input_type is None and prompt is None:
        asked = service.unsaid_prompt
    else:
        asked = prompts.asked_prompt(service.manifest, prompt_name, input_type, prompt)
    if asked.warning is not None and has_texts:
        call.warn(asked.warning)
    return asked.text


async def ranked(
    call: Call,
    service: InferenceService,
    query: str,
    documents: Seq[str],
    *,
    param: str,
    bytes_per_result: int,
    raw: bool = False,
    options: EncodingOptions = AS_CONFIGURED,
) -> tuple[Scores, list[int]]:
    """The scores of ``documents``, which the field ``param`` holds, against ``query``, and their order, best first."""
    call.check_inputs([query], "query")
    call.check_inputs(documents, param)
    call.check_answer(len(documents) * bytes_per_result)
    ticket = call.admit(service, [(query, document) for document in documents])
    scores = await rerank(service, query, documents, ticket=ticket, raw=raw, options=options)
    return scores, order_of(scores)


def order_of(scores: Scores) -> list[int]:
    """Indices by descending score; equal ones stay in order."""
    return descending(scores.values[:, 0])
