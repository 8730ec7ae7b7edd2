"""The table of ``bei.Model``'s methods: for each task of ``bei serve`` a function that makes a ``Method`` of a call.

The functions check the options, and that the model has the task; they compute nothing. They raise InvalidRequestError
and TaskNotSupportedError. They warn (UserWarning) if a model with prompts got none, and if ``dimensions`` shortens the
vectors of a model whose config does not allow it. ``stacklevel`` names the caller of the Model's method, which is to
call them directly.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from functools import partial
from typing import Any, TypeAlias, TypeVar, cast

import msgspec

from bei.core import Encoding, Float32Array
from bei.errors import BeiError, EmptyInputError, InvalidImageError, InvalidRequestError, MalformedRequestError
from bei.image.source import ImageInput, MixedInput
from bei.offline.input_checks import (
    GivenText,
    OfPair,
    TextOrIds,
    TextOrImage,
    TextOrPicture,
    names,
    of_pair,
    text,
    text_of_pair,
    text_or_ids,
    text_or_image,
    text_or_pair,
    text_or_picture,
)
from bei.offline.method import (
    ListCollector,
    Method,
    PredictionCollector,
    RankCollector,
    RowCollector,
    Vectors,
    WindowResult,
)
from bei.offline.options import (
    CallOptions,
    EmbedOptions,
    EntityOptions,
    PromptOptions,
    ReadOptions,
    RerankOptions,
    ScoreOptions,
    SparseOptions,
    TokenizeOptions,
    ZeroShotOptions,
    checked,
)
from bei.offline.results import Predictions, Rank, SparseVector, Token
from bei.offline.windows import WINDOW
from bei.service.admission import Ticket
from bei.service.call import ModelInput, ModelRequest
from bei.service.image_side import no_texts
from bei.service.model_service import ModelService
from bei.tasks import classify, embed, rerank
from bei.tasks import zero_shot as zero_shot_task
from bei.tasks.classify import ClassifyTask
from bei.tasks.compare import (
    ComparedPair,
    CompareTask,
    check_alone,
    checked_weights,
    compare,
    has_late_interaction,
)
from bei.tasks.decide import DecideTask, decide, inputs_of, reading_of
from bei.tasks.embed import CheckedTask, EmbedTask, TaskName, check_task
from bei.tasks.entities import Entity
from bei.tasks.mixed import read_inputs
from bei.tasks.questions import Answer, AnyQuestion, AskedQuestion, answer_of, question_of
from bei.tasks.rerank import RerankTask
from bei.tasks.support import require
from bei.tasks.token_classification import TokenTask, classify_tokens
from bei.tasks.vector_formats import DenseDType, check_form, numbers_of
from bei.tasks.zero_shot import ZeroShotTask
from bei.tokenizer import prompts
from bei.tokenizer.encoder import EncodingOptions, Input, TextEncoder
from bei.tokenizer.truncation import encoding_options
from bei.utils.threads import off_loop

Given: TypeAlias = Mapping[str, object]
Wrong: TypeAlias = Mapping[int, BeiError] | None
VectorsT = TypeVar("VectorsT", bound=Vectors)

_FLOAT_BYTES = 4
_question_decoder: msgspec.json.Decoder[AnyQuestion] = msgspec.json.Decoder(AnyQuestion)
_NO_ERRORS: Mapping[int, BeiError] = {}

# From a warning to the caller of a Model's method: ``_warn``, the function for the job, the method.
_TO_THE_CALLER = 4


def embedding(service: ModelService, given: Given) -> Method[TextOrImage, Vectors, Vectors]:
    """Vectors [n, width] of texts, token ids or images, zeros where an input has an error."""
    options = checked(EmbedOptions, given)
    asked = options.get("output_dtype") or "float"
    dtype: DenseDType = "float" if asked == "float32" else asked
    normalize = options.get("normalize")
    task = _checked(service, options, "embed", dimensions=options.get("dimensions"), normalize=normalize)
    check_form(dtype, service.manifest, task.width, normalize, param="output_dtype", dimensions_param="dimensions")
    _warn(task)

    def check(value: object, index: int) -> TextOrImage:
        found = text_or_image(value, index)
        if isinstance(found, ImageInput | MixedInput):
            _check_image(service, task, "embed", index, found)
        elif not service.manifest.reads_texts:
            raise InvalidRequestError(f"inputs {index} is a text. {no_texts(service.name, 'inputs')}", "inputs")
        return found

    async def run(inputs: Seq[TextOrImage], ticket: Ticket, wrong: Wrong) -> WindowResult[Vectors]:
        answer = await embed.embed_inputs(service, task.on(service.manifest, inputs, wrong), ticket=ticket)
        numbers = _owned(numbers_of(dtype, answer.vectors, answer.int8_largest))
        return WindowResult(numbers, answer.num_tokens, answer.truncated, answer.errors)

    return Method(
        name="embed",
        options=options,
        check=check,
        run=run,
        collector=RowCollector,
        model_inputs=partial(read_inputs, service.manifest, task.prompt),
        stand_in="",
    )


def sparse_embedding(service: ModelService, given: Given) -> Method[TextOrIds, list[SparseVector], list[SparseVector]]:
    """A sparse vector of each text or list of token ids, without entries where an input has an error."""
    options = checked(SparseOptions, given)
    task = _checked(service, options, "embed_sparse", top_k=options.get("top_k"))
    _warn(task)

    async def run(inputs: Seq[TextOrIds], ticket: Ticket, wrong: Wrong) -> WindowResult[list[SparseVector]]:
        answer = await embed.embed_sparse(service, task.on(service.manifest, inputs, wrong), ticket=ticket)
        vectors = [SparseVector(indices, weights) for indices, weights in answer.vectors]
        return WindowResult(vectors, answer.num_tokens, answer.truncated, answer.errors)

    return Method(
        name="embed_sparse",
        options=options,
        check=text_or_ids,
        run=run,
        collector=ListCollector[SparseVector],
        stand_in="",
    )


def token_embedding(
    service: ModelService, given: Given
) -> Method[TextOrPicture, list[Float32Array], list[Float32Array]]:
    """Vectors [tokens, width] of each text or image, [0, 0] where it has an error."""
    options = checked(PromptOptions, given)
    task = _checked(service, options, "embed_tokens")
    _warn(task)

    def check(value: object, index: int) -> TextOrPicture:
        found = text_or_picture(value, index)
        if isinstance(found, ImageInput | MixedInput):
            _check_image(service, task, "embed_tokens", index, found)
        return found

    async def run(inputs: Seq[TextOrPicture], ticket: Ticket, wrong: Wrong) -> WindowResult[list[Float32Array]]:
        answer = await embed.embed_tokens(service, task.on(service.manifest, inputs, wrong), ticket=ticket)
        vectors = [vector.copy() for vector in answer.vectors]  # equal texts and the cache have the same arrays
        return WindowResult(vectors, answer.num_tokens, answer.truncated, answer.errors)

    return Method(
        name="embed_all",
        options=options,
        check=check,
        run=run,
        collector=ListCollector[Float32Array],
        stand_in="",
        bytes_per_token=_FLOAT_BYTES * (service.manifest.dimension("token_embedding") or 0),
    )


def classification(service: ModelService, given: Given) -> Method[Input, Predictions, Predictions]:
    """Scores of the model's labels for texts or pairs."""
    options = checked(ScoreOptions, given)
    require(service, "classify")
    raw, read = options.get("raw_scores", False), _reading(options)
    labels = service.manifest.classification.labels if service.manifest.classification else []

    async def run(inputs: Seq[Input], ticket: Ticket, wrong: Wrong) -> WindowResult[Predictions]:
        scores = await classify.classify(service, ClassifyTask(inputs, read, wrong, raw=raw), ticket=ticket)
        predictions = Predictions(scores.labels, _owned(scores.values))
        return WindowResult(predictions, scores.num_tokens, scores.truncated, scores.errors)

    return Method(
        name="classify",
        options=options,
        check=text_or_pair,
        run=run,
        collector=partial(PredictionCollector, labels),
    )


def zero_shot(
    service: ModelService, labels: Iterable[str] | Mapping[str, str | None], given: Given
) -> Method[str, Predictions, Predictions]:
    """Scores of ``labels`` for texts."""
    options = checked(ZeroShotOptions, given)
    template = options.get("hypothesis_template", zero_shot_task.HYPOTHESIS)
    zero_shot_task.check_zero_shot(service, template)
    found = names(labels, "labels")
    if not found:
        raise EmptyInputError("labels is empty: give at least one.", "labels")
    meanings = labels if isinstance(labels, Mapping) else {}
    for index, meaning in enumerate(meanings.values()):
        if meaning is not None:
            text(meaning, index, "labels")
    guidance = zero_shot_task.label_guidance(service, found, meanings, options.get("examples", []))
    multi_label, read = options.get("multi_label", False), _reading(options)

    def task_of(inputs: Seq[str]) -> ZeroShotTask:
        return ZeroShotTask(inputs, read, labels=found, multi_label=multi_label, template=template, guidance=guidance)

    width = max(1, len(zero_shot_task.inputs_of(service, task_of([""]))))

    async def run(inputs: Seq[str], ticket: Ticket, _: Wrong) -> WindowResult[Predictions]:
        scores = await zero_shot_task.zero_shot(service, task_of(inputs), ticket=ticket)
        return WindowResult(Predictions(found, scores.values), scores.num_tokens, scores.truncated, _NO_ERRORS)

    return Method(
        name="zero_shot",
        options=options,
        check=text,
        run=run,
        collector=partial(PredictionCollector, found),
        model_inputs=lambda inputs: zero_shot_task.inputs_of(service, task_of(inputs)),
        window_inputs=max(1, WINDOW // width),
    )


def reranking(service: ModelService, query: GivenText, given: Given) -> Method[OfPair, Float32Array, list[Rank]]:
    """Ranks of documents, best first."""
    options = checked(RerankOptions, given)
    mode, weights, label = options.get("score_mode"), options.get("score_weights"), options.get("label")
    raw, read, instruction = options.get("raw_scores", False), _reading(options), options.get("instruction")
    manifest = service.manifest
    if mode is None and weights is None and label is None and "rerank" not in manifest.tasks:
        mode = "multi_vector" if has_late_interaction(manifest) else None
    is_comparison = mode is not None or weights is not None
    if is_comparison:
        check_alone(mode, {"label": label, "raw_scores": raw or None, "instruction": instruction})
        checked_weights(service, mode, weights)
    else:
        require(service, "rerank" if label is None else "classify")
    reads_pairs = not is_comparison and rerank.reads_images(manifest)
    check = text_or_picture if is_comparison else of_pair if reads_pairs else text_of_pair
    asked = check(query, 0, "query")

    def paired(documents: Seq[OfPair]) -> Seq[ComparedPair]:
        return [(asked, document) for document in documents]

    async def run(documents: Seq[OfPair], ticket: Ticket, _: Wrong) -> WindowResult[Float32Array]:
        pairs = paired(documents)
        if is_comparison:
            compared = CompareTask(cast("Seq[ModelInput]", pairs), read, mode=mode, weights=weights)
            scores = await compare(service, compared, ticket=ticket)
        else:
            given = cast("Seq[ModelInput]", pairs)
            task = RerankTask(given, read, raw=raw, instruction=instruction, label=label)
            scores = await rerank.rerank(service, task, ticket=ticket)
        return WindowResult(scores.values[:, 0], scores.num_tokens, scores.truncated, _NO_ERRORS)

    def model_inputs(documents: Seq[OfPair]) -> Seq[ModelInput]:
        if not is_comparison:
            return rerank.read_pairs(service, paired(documents), instruction)
        return read_inputs(manifest, "", [*documents, asked] if isinstance(asked, str) else documents)

    return Method(
        name="rerank",
        options=options,
        check=partial(check, param="documents"),
        run=run,
        collector=partial(RankCollector, options.get("top_n")),
        model_inputs=model_inputs,
        param="documents",
        is_one=bool(manifest.listwise),
    )


def token_classification(service: ModelService, given: Given) -> Method[str, list[list[Entity]], list[list[Entity]]]:
    """Labelled tokens or entities of each text."""
    options = checked(EntityOptions, given)
    require(service, "classify_tokens")
    raw, read = options.get("raw_scores", False), _reading(options)
    aggregation = options.get("aggregation_strategy", "none")

    async def run(inputs: Seq[str], ticket: Ticket, _: Wrong) -> WindowResult[list[list[Entity]]]:
        answer = await classify_tokens(
            service, TokenTask(inputs, read, aggregation=aggregation, raw=raw), ticket=ticket
        )
        entities = await off_loop(lambda: [answer.entities_of(index) for index in range(len(inputs))])
        return WindowResult(entities, answer.num_tokens, answer.truncated, _NO_ERRORS)

    return Method(
        name="predict_tokens",
        options=options,
        check=text,
        run=run,
        collector=ListCollector[list[Entity]],
        bytes_per_token=_FLOAT_BYTES * (service.manifest.dimension("token_logits") or 0),
    )


def decision(
    service: ModelService, questions: Mapping[str, Mapping[str, Any]], given: Given
) -> Method[str, list[dict[str, Answer]], list[dict[str, Answer]]]:
    """Answers to ``questions`` about each text, by their names."""
    options = checked(CallOptions, given)
    reading_of(service)
    if not isinstance(questions, Mapping) or not all(isinstance(name, str) for name in questions):
        raise MalformedRequestError("questions must be a mapping from names to questions.", "questions")
    asked = tuple(question_of(name, _question(name, question)) for name, question in questions.items())
    if not asked:
        raise InvalidRequestError("questions is empty: ask at least one.", "questions")
    width = max(1, len(inputs_of(service, [""], asked)))

    async def run(inputs: Seq[str], ticket: Ticket, _: Wrong) -> WindowResult[list[dict[str, Answer]]]:
        found = await decide(service, DecideTask(inputs, questions=asked), ticket=ticket)
        answers = [
            {question.name: answer_of(question, row) for question, row in zip(asked, rows, strict=True)}
            for rows in found.probabilities
        ]
        return WindowResult(answers, found.num_tokens, found.truncated, _NO_ERRORS)

    def pairs(inputs: Seq[str]) -> Seq[ModelInput]:
        return inputs_of(service, inputs, asked)

    return Method(
        name="decide",
        options=options,
        check=text,
        run=run,
        collector=ListCollector[dict[str, Answer]],
        model_inputs=pairs,
        window_inputs=max(1, WINDOW // width),
    )


def decision_scores(
    service: ModelService, question: AskedQuestion
) -> Method[str, list[Float32Array], list[Float32Array]]:
    """The scores [options] of ``question`` about each text, before temperature and softmax."""
    reading_of(service)
    width = len(inputs_of(service, [""], [question]))

    async def run(inputs: Seq[str], ticket: Ticket, _: Wrong) -> WindowResult[list[Float32Array]]:
        found = await decide(service, DecideTask(inputs, questions=(question,), raw=True), ticket=ticket)
        rows = [scores for (scores,) in found.probabilities]
        return WindowResult(rows, found.num_tokens, found.truncated, _NO_ERRORS)

    return Method(
        name="decide",
        options=CallOptions(),
        check=text,
        run=run,
        collector=ListCollector[Float32Array],
        model_inputs=lambda inputs: inputs_of(service, inputs, [question]),
        window_inputs=max(1, WINDOW // width),
    )


def _question(name: str, given: Mapping[str, Any]) -> AnyQuestion:
    try:
        return _question_decoder.decode(msgspec.json.encode(given))
    except (msgspec.ValidationError, TypeError, UnicodeEncodeError, RecursionError) as error:
        raise InvalidRequestError(f"The question {name[:40]!r} is not valid: {error}.", "questions") from error


def tokenization(service: ModelService, given: Given) -> Method[str, list[list[Token]], list[list[Token]]]:
    """The tokens of each text, as the model would read them, but never cut."""
    options = checked(TokenizeOptions, given)
    asked = options.get("prompt_name"), options.get("input_type")
    with_special = options.get("add_special_tokens", True)
    read = EncodingOptions(add_special_tokens=with_special, whole=True, with_spans=True)
    prompt = ""
    if asked != (None, None):
        prompt = prompts.prompt_of(service.manifest, *asked)
        read = prompts.with_role(read, prompts.role_of(service.manifest, *asked))

    async def run(inputs: Seq[str], ticket: Ticket, _: Wrong) -> WindowResult[list[list[Token]]]:
        texts = prompts.apply_prompt(prompt, inputs)
        encodings = await service.encode(ModelRequest(texts, read), ticket=ticket)
        tokens = await off_loop(
            lambda: [_tokens(one, encoding, service.encoder) for one, encoding in zip(texts, encodings, strict=True)]
        )
        return WindowResult(tokens, sum(encoding.num_tokens for encoding in encodings), [], _NO_ERRORS)

    return Method(
        name="tokenize",
        options=options,
        check=text,
        run=run,
        collector=ListCollector[list[Token]],
        whole=True,
    )


def _tokens(content: str, encoding: Encoding, encoder: TextEncoder) -> list[Token]:
    spans = encoding.spans
    assert spans is not None  # they were asked for
    rows = zip(encoding.input_ids.tolist(), spans.special.tolist(), spans.offsets.tolist(), strict=True)
    return [
        Token(token_id, encoder.token(token_id), True, None, None)
        if special
        else Token(token_id, content[start:stop], False, start, stop)
        for token_id, special, (start, stop) in rows
    ]


def _owned(array: VectorsT) -> VectorsT:
    """``array``, or a copy of a view: for a single input it is a view of a row that equal inputs and the cache share,
    and callers may modify their results."""
    return array if array.base is None else array.copy()


def _reading(options: ReadOptions) -> EncodingOptions:
    return encoding_options(
        options.get("truncate"),
        options.get("truncation_direction"),
        options.get("truncate_prompt_tokens"),
        add_special_tokens=options.get("add_special_tokens", True),
    )


def _checked(service: ModelService, options: PromptOptions, name: TaskName, **asked: Any) -> CheckedTask:
    """The task for any inputs; ``asked`` are other fields of EmbedTask."""
    prompt_name, kind, prompt = options.get("prompt_name"), options.get("input_type"), options.get("prompt")
    task = EmbedTask((), _reading(options), prompt_name=prompt_name, input_type=kind, prompt=prompt, **asked)
    return check_task(service, task, name)


def _check_image(
    service: ModelService, checked: CheckedTask, name: TaskName, index: int, value: ImageInput | MixedInput
) -> None:
    """Raise InvalidImageError where the model has no such vectors of ``value``."""
    error = embed.image_error(service, name, checked.task.adapter, "inputs", value)
    if error is not None:
        kind = "an image" if isinstance(value, ImageInput) else "an image beside other parts"
        fault = str(error).removeprefix(f"inputs {index}: ")
        raise InvalidImageError(f"inputs {index} is {kind}. {fault}", "inputs")


def _warn(checked: CheckedTask) -> None:
    for warning in checked.warnings:
        warnings.warn(f"{warning}.", UserWarning, stacklevel=_TO_THE_CALLER)
