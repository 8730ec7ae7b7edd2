"""Scores of documents against a query."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any, TypeAlias, cast

import msgspec

from bei.artifact.manifest import Manifest, RerankTemplate
from bei.errors import InvalidImageError, InvalidRequestError
from bei.image.source import ImageInput, ImagesInText, MadeOnce, MixedInput
from bei.service.admission import Ticket
from bei.service.call import ModelInput, ModelRequest
from bei.service.model_service import ModelService
from bei.tasks.classify import Scores, label_scores, logits_of, scores_of
from bei.tasks.compare import ComparedPair
from bei.tasks.mixed import texts_between, too_many_images
from bei.tasks.rerank_lists import score_lists
from bei.tasks.support import off_loop_if_large, require
from bei.tokenizer.encoder import AS_CONFIGURED, EncodingOptions
from bei.tokenizer.prompts import num_chars, prompt_of
from bei.tokenizer.templates import PairTemplate

# Texts in pieces (``ImagesInText.texts``).
_Pieces: TypeAlias = tuple[tuple[str, ...], ...]

_PER_IMAGE = 2_000  # as many numbers take as long as to lay out a pair with an image


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
    read = await pairs_to_read(service, cast("Seq[ComparedPair]", task.inputs), task.instruction)
    if (layout := service.manifest.listwise) is not msgspec.UNSET:
        pairs = cast("Seq[tuple[str, str]]", read)
        found = await score_lists(service, layout, pairs, task.options, task.instruction, ticket=ticket)
        return Scores(found.lengths, found.truncated, values=found.values[:, None], labels=["score"])
    column = _column(service, task.label)
    asked = asked_pairs(service, ModelRequest(read, task.options, task.failed), task.instruction)
    answer, classification = await logits_of(service, asked, ticket)
    labels = classification.labels
    function = "none" if task.raw else classification.relevance if len(labels) == 1 else classification.function
    values = await scores_of(answer, lambda rows: label_scores(service, rows, function)[:, column : column + 1], 1)
    return Scores(answer.lengths, answer.truncated, answer.errors, values=values, labels=["score"])


async def pairs_to_read(
    service: ModelService, pairs: Seq[ComparedPair], instruction: str | None = None
) -> list[ModelInput]:
    """``read_pairs``, in a thread where many have images."""
    num_images = sum(not (isinstance(one, str) and isinstance(other, str)) for one, other in pairs)
    return await off_loop_if_large(partial(read_pairs, service, pairs, instruction), num_images * _PER_IMAGE)


def read_pairs(service: ModelService, pairs: Seq[ComparedPair], instruction: str | None = None) -> list[ModelInput]:
    """``pairs`` as a model reads them together: texts, and of a model that reads images in a pair its text with the
    images in their places. Raises InvalidImageError for images of other models, and for more than it reads."""
    # By identity: many pairs have one query, whose parts may be many.
    sides = {id(side): side for pair in pairs for side in pair if isinstance(side, MixedInput)}
    mixed = {key: _parts_of(side) for key, side in sides.items()}
    written: dict[_Pieces, _Pieces] = {}
    asked = [
        cast("tuple[str, str]", pair)
        if isinstance(pair[0], str) and isinstance(pair[1], str)
        else _with_images(service, pair, mixed, instruction, written)
        for pair in pairs
    ]
    # A query's image is fetched, decoded and kept once, not once for each document.
    counts = Counter(id(image) for one in asked if isinstance(one, ImagesInText) for image in one.images)
    shared = {image: MadeOnce[Any]() for image, count in counts.items() if count > 1}
    return [_sharing(one, shared) if shared and isinstance(one, ImagesInText) else one for one in asked]


def _sharing(value: ImagesInText, shared: Mapping[int, MadeOnce[Any]]) -> ImagesInText:
    return replace(value, shared=(*(shared.get(id(image)) for image in value.images),))


def reads_images(manifest: Manifest) -> bool:
    """True of a reranker that reads an image in a pair."""
    tower = manifest.image_tower
    return bool(tower and tower.sequence and tower.sequence.around) and "rerank" in manifest.tasks


def _parts_of(side: MixedInput) -> list[str | ImageInput]:
    """Its images, and between them what the model reads of texts, each in one piece."""
    found: list[str | ImageInput] = []
    for is_text, some in groupby(side.parts, lambda part: isinstance(part, str)):
        parts = [*some]
        found += ["".join(map(str, parts))] if is_text else parts
    return found


def _with_images(
    service: ModelService,
    pair: ComparedPair,
    mixed: Mapping[int, list[str | ImageInput]],
    instruction: str | None,
    written: dict[_Pieces, _Pieces],
) -> ImagesInText:
    """``mixed``: the parts of sides with texts and images, by their identities. ``written``: texts of all pairs, of
    which equal ones are kept once: those between a query's images are in each."""
    parts = [mixed[id(one)] if isinstance(one, MixedInput) else [one] for one in pair]
    images = [part for side in parts for part in side if isinstance(part, ImageInput)]
    tower, template = service.manifest.image_tower, service.manifest.rerank_template
    if tower is None or not tower.sequence or not tower.sequence.around or template is None:
        raise InvalidImageError(
            f"{service.name} reads no images in pairs: leave them out, or ask a reranker that reads them, or an "
            "embedder, which compares their vectors.",
            images[0].param,
        )
    if (error := too_many_images(service.manifest, service.name, images, in_pair=True)) is not None:
        raise error
    if instruction is not None and "{instruction}" not in template.body:
        raise InvalidRequestError(f"{service.name}'s template takes no instruction: leave it out.", "instruction")
    filled = _pair_template(template, instruction).parts({"query": parts[0], "document": parts[1]})
    images = [part for part in filled if isinstance(part, ImageInput)]  # in their order
    last = () if isinstance(template.last_id, msgspec.UnsetType) else (template.last_id,)
    # The template's prefix and suffix are pieces of their own.
    texts: list[_Pieces] = [(one,) for one in texts_between(filled, tower.sequence.around)]
    texts = [written.setdefault(one, one) for one in texts]
    texts[0] = ((template.prefix,), *texts[0])
    texts[-1] = (*texts[-1], (template.suffix,))
    return ImagesInText((*texts,), (*images,), last_ids=last)


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
