"""How each kind of model reads a question's options about a text, and their scores, of which the softmax is taken.

    natural language inference   the text entails "INSTRUCTIONS OPTION", or the instructions with the option in {}
    rerankers, reward models     the text as document of the query "INSTRUCTIONS OPTION"
    GLiClass                     all of these statements as labels of the text, choices sorted
    GLiNER2                      the options as labels of a task that is called INSTRUCTIONS, choices sorted; no and yes
                                 too
    Laya, OpenDecider            "KIND question: INSTRUCTIONS", and each option behind a marker, choices sorted
    language models              a template with text, question and options; the scores of the tokens that stand for the
                                 options, or the likelihood of each option's own text behind it

The first two read every option by itself (arXiv:1909.00161), so the order of options changes nothing. A language model
whose template shows the options sees an order: choices are shown sorted by their texts, so that the same set has the
same answer; the levels of a score keep their order, which is part of the question, and no stands before yes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np

from bei.artifact.label_layouts import KINDS_OF_QUESTIONS, Labelling, OptionMarkers, Schema
from bei.artifact.manifest import DecideTemplate
from bei.core import Encoding, Float32Array, Row
from bei.errors import InvalidRequestError
from bei.service.admission import Ticket
from bei.service.call import InferenceResult, ModelRequest, Reduce
from bei.service.model_service import ModelService
from bei.tasks.classify import logits_of
from bei.tasks.questions import AskedOption, AskedQuestion
from bei.tasks.rerank import asked_pairs
from bei.tasks.support import off_loop_if_large, token_keys
from bei.tasks.zero_shot import OUTPUT as LABEL_LOGITS
from bei.tasks.zero_shot import around_text, label_row, of_markers, of_schema, own_token, schema_prompt
from bei.tokenizer.alike import check_told_apart
from bei.tokenizer.encoder import EncodingOptions, Input, TextEncoder
from bei.tokenizer.option_prompt import OptionPrompt
from bei.tokenizer.schema_prompt import SchemaPart
from bei.tokenizer.templates import filled

# Nothing of a text or an option is cut: an answer to half of them would look like one to all.
_WHOLE = EncodingOptions(truncate=False)
_PROMPT = EncodingOptions(truncate=False, add_special_tokens=False)
_CONTINUED = EncodingOptions(truncate=False, add_special_tokens=False, continues=True)
_PER_OPTION = 50  # numbers that take as long
_LIKELIHOOD, _OPTIONS = "token_likelihood", "option_logits"
# What Laya reads of no and of yes where a question says nothing of them.
_NOUL = (("false", "no, the statement does not hold"), ("true", "yes, the statement holds"))

# Of inputs that stand by text, and of each text by question.
Ask: TypeAlias = Callable[[ModelService, Seq[Input], Seq[AskedQuestion], Ticket], Awaitable[InferenceResult]]


def _check_tokens(encoder: TextEncoder, questions: Seq[AskedQuestion]) -> None:
    """Raise InvalidRequestError for options with the same tokens, InputTooLongError where they would be cut off."""
    for question in questions:
        statements = _statements(question)
        shown = [option.shown for option in question.options]
        what = f"The options of the question {question.name[:40]!r}, number"
        check_told_apart(what, shown, token_keys(encoder, statements, _PROMPT), "questions")


class Reading(NamedTuple):
    """``inputs`` of a text and a question, ``ask`` for the ``output`` of inputs, and ``scores`` [options] of their rows
    of it. ``check`` comes first, in a thread: it raises InvalidRequestError for options that the model's tokens do not
    tell apart."""

    inputs: Callable[[str, AskedQuestion], Seq[Input]]
    ask: Ask
    scores: Callable[[AskedQuestion, Seq[Float32Array]], Float32Array]
    output: str = "logits"
    check: Callable[[TextEncoder, Seq[AskedQuestion]], None] = _check_tokens


def of_inference(entails: int, contradicts: int) -> Reading:
    """``entails``, ``contradicts``: the labels' columns."""

    def pairs(text: str, question: AskedQuestion) -> Seq[Input]:
        return [(text, statement) for statement in _statements(question)]

    async def ask(
        service: ModelService, inputs: Seq[Input], questions: Seq[AskedQuestion], ticket: Ticket
    ) -> InferenceResult:
        return (await logits_of(service, ModelRequest(inputs, _WHOLE), ticket))[0]

    def scores(question: AskedQuestion, rows: Seq[Float32Array]) -> Float32Array:
        if len(rows) < len(question.options):  # entailment of the only statement against its contradiction
            return rows[0][[contradicts, entails]]
        return np.stack(rows)[:, entails]

    return Reading(pairs, ask, scores)


def of_reranker() -> Reading:
    """A reranker's, whose only score is the relevance."""

    def pairs(text: str, question: AskedQuestion) -> Seq[Input]:
        return [(statement, text) for statement in _statements(question)]

    async def ask(
        service: ModelService, inputs: Seq[Input], questions: Seq[AskedQuestion], ticket: Ticket
    ) -> InferenceResult:
        return (await logits_of(service, asked_pairs(service, ModelRequest(inputs, _WHOLE)), ticket))[0]

    def scores(question: AskedQuestion, rows: Seq[Float32Array]) -> Float32Array:
        return _or_alone(question, np.concatenate(rows))

    return Reading(pairs, ask, scores)


def of_labels(layout: Labelling) -> Reading:
    """GLiClass's."""

    def labelled(text: str, question: AskedQuestion) -> Seq[Input]:
        statements = _statements(question)
        if token := next(filter(None, (own_token(layout, one) for one in statements)), None):
            raise InvalidRequestError(
                f"The question {question.name[:40]!r} has {token!r}, a token of the model's own: take it out.",
                "questions",
            )
        shown = [statements[place] for place in _order(question)] if len(statements) > 1 else statements
        return [around_text(layout, shown).filled(text)]

    async def ask(
        service: ModelService, inputs: Seq[Input], questions: Seq[AskedQuestion], ticket: Ticket
    ) -> InferenceResult:
        request = ModelRequest(inputs, _WHOLE)
        return await service.infer(request, ticket=ticket, outputs={LABEL_LOGITS}, reduce=of_markers(layout))

    def scores(question: AskedQuestion, rows: Seq[Float32Array]) -> Float32Array:
        count = len(_statements(question))
        logits = label_row(layout, rows[0], count)
        if count < len(question.options):
            return _or_alone(question, logits)
        found = np.empty(count, np.float32)
        found[_order(question)] = logits
        return found

    return Reading(labelled, ask, scores, LABEL_LOGITS)


def of_tasks(layout: Labelling, schema: Schema) -> Reading:
    """GLiNER2's. Each question is read by itself: the tasks of one schema see each other."""

    def part_of(question: AskedQuestion) -> SchemaPart:
        shown = [question.options[place] for place in _order(question)]
        described = tuple((_answer(option), option.text) for option in shown if option.name and option.text)
        field, labels = f"questions {question.name[:40]!r}", tuple(map(_answer, shown))
        return SchemaPart(field, question.instructions.strip() or schema.task, labels, described)

    def labelled(text: str, question: AskedQuestion) -> Seq[Input]:
        part = part_of(question)
        return [("".join([part.text, *part.labels]), text)]  # to be counted: ``ask`` reads the text

    def options_of(question: AskedQuestion) -> EncodingOptions:
        return replace(_WHOLE, labels=schema_prompt(layout, schema, part_of(question)))

    def scores(question: AskedQuestion, rows: Seq[Float32Array]) -> Float32Array:
        found = np.empty(len(question.options), np.float32)
        found[_order(question)] = rows[0][:, 0]
        return found

    return Reading(labelled, _by_question(options_of, LABEL_LOGITS, of_schema), scores, LABEL_LOGITS, _no_check)


def of_markers_of_options(layout: OptionMarkers) -> Reading:
    """Laya's, and OpenDecider's. Each question is read by itself, as there."""
    is_laya = layout.form == "laya"
    order, written = (_order, _marked) if is_laya else (_yes_first, _written)

    def prompt_of(question: AskedQuestion) -> OptionPrompt:
        if not question.instructions.strip():  # its own code reads none without
            raise InvalidRequestError(
                f"The question {question.name[:40]!r} has no instructions, which the model reads: send some.",
                "questions",
            )
        options = tuple(written(question, place) for place in order(question))
        kind, asked = KINDS_OF_QUESTIONS.index(question.kind), f"question: {question.instructions}"
        if is_laya:
            return OptionPrompt(layout, question.name, kind, f"{question.kind} {asked}", options)
        return OptionPrompt(layout, question.name, 0, asked, options)

    def marked(text: str, question: AskedQuestion) -> Seq[Input]:
        prompt = prompt_of(question)
        return [("".join([prompt.question, *prompt.options]), text)]  # to be counted: ``ask`` reads the text

    def options_of(question: AskedQuestion) -> EncodingOptions:
        return replace(_WHOLE, question=prompt_of(question))

    def scores(question: AskedQuestion, rows: Seq[Float32Array]) -> Float32Array:
        count = len(question.options)
        found = np.empty(count, np.float32)
        found[order(question)] = rows[0][:count, 0]
        return found / np.float32(layout.temperature(question.kind, count))

    def of_markers_alone(row: Row, encoding: Encoding) -> Row:
        return {_OPTIONS: row[_OPTIONS][np.flatnonzero(encoding.input_ids == layout.marker_id)]}

    return Reading(marked, _by_question(options_of, _OPTIONS, of_markers_alone), scores, _OPTIONS, _no_check)


def _marked(question: AskedQuestion, place: int) -> str:
    """An option as Laya's ``render_options`` writes it."""
    option = question.options[place]
    if question.kind == "choice":
        return option.shown
    if question.kind == "score":
        return f"level {place}: {option.shown}"
    word, meaning = _NOUL[place]
    return f"{word}: {option.text or meaning}"


def _yes_first(question: AskedQuestion) -> list[int]:
    """The order in which OpenDecider shows options: as others, but yes before no."""
    return _order(question)[::-1] if question.kind == "noul" else _order(question)


def _written(question: AskedQuestion, place: int) -> str:
    """An option as opendecider's ``options`` and ``nano_ids`` write it."""
    option = question.options[place]
    if question.kind == "score":
        name, meaning = str(place), option.shown
    elif question.kind == "noul":
        name, meaning = option.name, option.text or option.name.capitalize()
    else:
        name, meaning = option
    return f"{name}: {meaning}" if meaning and meaning != name else name


def _by_question(options_of: Callable[[AskedQuestion], EncodingOptions], output: str, reduce: Reduce) -> Ask:
    """Asks each question by itself, of all texts, which are the second of their inputs' two."""

    async def ask(
        service: ModelService, inputs: Seq[Input], questions: Seq[AskedQuestion], ticket: Ticket
    ) -> InferenceResult:
        options = await off_loop_if_large(lambda: [*map(options_of, questions)], work_of_options(questions))

        def asked(place: int) -> Awaitable[InferenceResult]:
            texts = [one[1] for one in inputs[place :: len(questions)] if isinstance(one, tuple)]
            request = ModelRequest(texts, options[place])
            return service.infer(request, ticket=ticket, outputs={output}, reduce=reduce)

        return _by_text(await _all([asked(place) for place in range(len(questions))]))

    return ask


def work_of_options(questions: Seq[AskedQuestion]) -> int:
    """As many numbers take as long as to write the options of ``questions`` once."""
    return _PER_OPTION * sum([len(question.options) for question in questions])


def _no_check(encoder: TextEncoder, questions: Seq[AskedQuestion]) -> None:
    """Where the question is tokenized."""


async def _all(calls: Seq[Awaitable[InferenceResult]]) -> list[InferenceResult]:
    """Of calls that wait together. Where one fails, the others are taken back before its error goes on."""
    waiting = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*waiting)
    except BaseException:  # raised again; also where the request itself is cancelled
        for one in waiting:
            one.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        raise


def _by_text(found: Seq[InferenceResult]) -> InferenceResult:
    """What each question found of the texts, by text."""
    rows, encodings = (
        [one for of_text in zip(*sides, strict=True) for one in of_text]
        for sides in ([one.rows for one in found], [one.encodings for one in found])
    )
    return InferenceResult(rows, encodings, [], {})


def _or_alone(question: AskedQuestion, logits: Float32Array) -> Float32Array:
    """``logits`` [options]; of a single statement against 0, whose softmax is the sigmoid."""
    return logits if len(logits) == len(question.options) else np.append(np.zeros(1, np.float32), logits)


def of_tokens(name: str, template: DecideTemplate, tokens: Seq[str]) -> Reading:
    """A language model's, whose options have a column each; ``tokens``: what stands in front of each where it is shown.

    Raises InvalidRequestError for more options than these.
    """

    def prompts(text: str, question: AskedQuestion) -> Seq[Input]:
        shown = [question.options[place].shown for place in _order(question)]
        if len(shown) > len(tokens):
            raise InvalidRequestError(
                f"The question {question.name[:40]!r} has {len(shown)} options, and {name} tells {len(tokens)} apart: "
                "send fewer.",
                "questions",
            )
        lines = [f"{token}. {one}" for token, one in zip(tokens, shown, strict=False)]
        return [_prompt(template, text, question, lines)]

    async def ask(
        service: ModelService, inputs: Seq[Input], questions: Seq[AskedQuestion], ticket: Ticket
    ) -> InferenceResult:
        return await service.infer(ModelRequest(inputs, _PROMPT), ticket=ticket, outputs={"logits"})

    def scores(question: AskedQuestion, rows: Seq[Float32Array]) -> Float32Array:
        found = np.empty(len(question.options), np.float32)
        found[_order(question)] = rows[0][: len(found)]
        return found

    return Reading(prompts, ask, scores)


def of_likelihoods(template: DecideTemplate) -> Reading:
    """A language model's, by the logarithm of the probability of each option's text behind the same beginning, which
    engines compute once for all of them.

    Raises InvalidRequestError for an option whose tokens another one begins with: it could not be the less likely one.
    """
    assert template.option is not msgspec.UNSET  # this kind has it
    around: str = template.option

    def continued(text: str, question: AskedQuestion) -> Seq[Input]:
        if "{options}" not in template.body:
            _check_said(question)
        lines = [f"- {question.options[place].shown}" for place in _order(question)]
        prompt = _prompt(template, text, question, lines)
        return [(prompt, filled(around, {"option": _answer(option)})) for option in question.options]

    async def ask(
        service: ModelService, inputs: Seq[Input], questions: Seq[AskedQuestion], ticket: Ticket
    ) -> InferenceResult:
        request = ModelRequest(inputs, _CONTINUED)
        return await service.infer(request, ticket=ticket, outputs={_LIKELIHOOD}, reduce=_total)

    def scores(question: AskedQuestion, rows: Seq[Float32Array]) -> Float32Array:
        return np.concatenate(rows)

    def check(encoder: TextEncoder, questions: Seq[AskedQuestion]) -> None:
        for question in questions:
            # The prompt's tokens are left out of the comparison: any will do.
            pairs = [(".", filled(around, {"option": _answer(option)})) for option in question.options]
            found = encoder.encode(pairs, _CONTINUED)
            _check_apart(question, [one.input_ids[one.num_unpooled :].tobytes() for one in found])

    return Reading(continued, ask, scores, _LIKELIHOOD, check)


def _total(row: Row, encoding: Encoding) -> Row:
    return {_LIKELIHOOD: row[_LIKELIHOOD][encoding.num_unpooled :].sum(axis=0)}


def _check_apart(question: AskedQuestion, answers: Seq[bytes]) -> None:
    order = sorted(range(len(answers)), key=answers.__getitem__)
    names = [_answer(option)[:40] for option in question.options]
    for first, second in pairwise(order):
        if answers[second].startswith(answers[first]):
            raise InvalidRequestError(
                f"The question {question.name[:40]!r} has the options {names[first]!r} and {names[second]!r}, of which "
                "the second begins with the first for this model: word them otherwise, or build it with a "
                "decide_option that ends an answer.",
                "questions",
            )


def _check_said(question: AskedQuestion) -> None:
    """Raise InvalidRequestError for what a template without {options} would not say."""
    described = any(option.shown != _answer(option) for option in question.options)
    if described or not question.instructions.strip():
        raise InvalidRequestError(
            f"The question {question.name[:40]!r} has "
            f"{'options with descriptions' if described else 'no instructions'}, and this model reads instructions and "
            "the options' names alone: put all into these, or build it with {options} in decide_body.",
            "questions",
        )


def _prompt(template: DecideTemplate, text: str, question: AskedQuestion, lines: Seq[str]) -> str:
    parts = {"text": text, "question": question.instructions, "options": "\n".join(lines)}
    return filled(template.body, parts)


def _answer(option: AskedOption) -> str:
    """What a model that was asked would say."""
    return option.name or option.text


def _order(question: AskedQuestion) -> list[int]:
    """The options as they are shown."""
    places = range(len(question.options))
    return sorted(places, key=lambda at: question.options[at].shown) if question.kind == "choice" else [*places]


def _in_place(instructions: str, option: str) -> str:
    if "{}" in instructions:
        return instructions.replace("{}", option, 1)
    return f"{instructions} {option}".strip()


def _statements(question: AskedQuestion) -> list[str]:
    """A text for each option; of yes and no without criteria the question alone."""
    if question.kind == "noul" and not all(option.text for option in question.options):
        return [_in_place(question.instructions, question.options[1].text)]
    shown = [option.text if question.kind == "noul" else option.shown for option in question.options]
    return [_in_place(question.instructions, text) for text in shown]
