"""What is written around images and texts for a decoder that reads both: by transformers' ColPaliProcessor and
ColQwen2Processor (processor_config.json), or by a chat template (Qwen2-VL's and Qwen3-VL's embedders, and
EmbeddingGemma 2, ``gemma_processor``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from bei.artifact.image_sequence import MOST_IMAGES, ImageSequence
from bei.artifact.manifest import RerankTemplate, Tokenization
from bei.artifact.sides import SIDES, Side
from bei.errors import CheckpointError, ConfigError
from bei.tokenizer.prompts import SLOT
from bei.tokenizer.templates import filled
from bei_build.checkpoint.checkpoint import Checkpoint
from bei_build.checkpoint.colbert import SideSettings
from bei_build.checkpoint.gemma_processor import IMAGE as GEMMA_IMAGE
from bei_build.checkpoint.gemma_processor import NO_TEXTS, image_markers_of, with_plain_prompts
from bei_build.checkpoint.sentence_transformers import SentenceTransformersFiles, read_sentence_transformers
from bei_build.families import colpali, colqwen2, embedding_gemma2, qwen2_vl, qwen3_vl
from bei_build.families.base import Family
from bei_build.files.json_settings import read_object
from bei_build.spec.patches import PatchesSpec
from bei_build.tokenizer.chat_template import (
    ChatSettings,
    Frame,
    derive_frame,
    image_markers,
    mixed_markers,
    repeats_markers,
)
from bei_build.tokenizer.library_tokenizer import stored_tokenizer, token_of

_NUM_BEHIND_QUERIES = 10
# Settings that such files may have beside the prompts: the class, the image processor, which ``image_processor`` reads,
# and what must not be set.
_READ = ("processor_class", "image_processor", "image_seq_length", "auto_map")


# Of jina-reranker-m0's own code: a pair, and the token behind it, which is a byte that no character begins with.
_RANKER_TEMPLATE = RerankTemplate(
    prefix="",
    body="**Document**:\n{document}\n**Query**:\n{query}",
    suffix="",
    instruction="",
    last_id=100,
)


class _Turns(NamedTuple):
    """Of a model's own code: the system's turn, where no other is asked for, and what stands behind the beginning of
    the assistant's, where every text ends."""

    instruction: str
    end: str = ""


# By types of models. Of Qwen3-VL-Embedding's code (scripts/qwen3_vl_embedding.py); of gme's (gme_inference.py) and
# Ops-MM-embedding's, and of the examples of DSE.
_TURNS: Mapping[str, _Turns] = {
    qwen3_vl.MODEL_TYPE: _Turns("Represent the user's input."),
    **dict.fromkeys(qwen2_vl.MODEL_TYPES, _Turns("You are a helpful assistant.", "<|endoftext|>")),
}
_OF_SCRIPT = ChatSettings("structured", {"add_generation_prompt": True})
_IMAGE_PAD = "<|image_pad|>"
# What the reranker's own code (scripts/qwen3_vl_reranker.py) writes for a query of nothing.
_NO_QUERY = "NULL"
# The prompt of a request that names none.
_DEFAULT = "default"


@dataclass(frozen=True)
class _Processor:
    """``image``: the token that stands for an image; ``image_id``: the key of its id in the model's config. ``bos``:
    the default of the token in front of texts; None: there is none. ``pad``: the default of that behind queries.
    ``prompts``: the defaults of both. ``has_place``: the prompt of images has the image's place in it; else the image
    is in front of BOS, prompt and a line's end. ``ignored``: settings that texts and images do not depend on.
    ``end``: what stands behind the padding. ``like``: other names of such processors. ``is_fixed``: prompts and padding
    are the class's own, whatever the files say."""

    name: str
    image: str
    image_id: str
    bos: str | None
    pad: str
    prompts: Mapping[str, str]
    has_place: bool
    ignored: tuple[str, ...] = ()
    end: str = "\n"
    like: tuple[str, ...] = ()
    is_fixed: bool = False


_COLQWEN2 = _Processor(
    name="ColQwen2Processor",
    image="<|image_pad|>",
    image_id="image_token_id",
    bos=None,
    pad="<|endoftext|>",
    prompts={
        "query_prefix": "Query: ",
        "visual_prompt_prefix": "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Describe the image."
        "<|im_end|><|endoftext|>",
    },
    has_place=True,
    ignored=("chat_template",),
)
# By families; colpali-engine's processors end queries without a line's end.
_PROCESSORS: tuple[tuple[Family, _Processor], ...] = (
    (colqwen2.FAMILY, _COLQWEN2),
    (
        colqwen2.ENGINE_FAMILY,
        replace(
            _COLQWEN2,
            name="ColQwen2_5_Processor",
            ignored=("chat_template", "video_processor"),
            end="",
            like=("ColQwen2Processor", "Qwen2VLProcessor", "Qwen2_5_VLProcessor"),
            is_fixed=True,
        ),
    ),
    (
        colpali.FAMILY,
        _Processor(
            name="ColPaliProcessor",
            image="<image>",
            image_id="image_token_index",
            bos="<bos>",
            pad="<pad>",
            prompts={"query_prefix": "Question: ", "visual_prompt_prefix": "Describe the image."},
            has_place=False,
        ),
    ),
)


def _processor_of(family: Family) -> _Processor | None:
    return next((processor for of, processor in _PROCESSORS if of is family), None)


def with_prompts(
    files: SentenceTransformersFiles, family: Family, *, scores_pairs: bool = False
) -> SentenceTransformersFiles:
    """``files`` with what is written before all texts, on whatever side a request puts them, as prompts;
    ``scores_pairs``: not of a model that the user builds for scores of tokens. Raises CheckpointError."""
    if family.model_type in _TURNS and not files.score_ids and not scores_pairs:
        return _with_frames(files, _TURNS[family.model_type])
    if family is embedding_gemma2.FAMILY:
        return with_plain_prompts(files)
    processor = _processor_of(family)
    if processor is None:
        return files
    prefix = _settings(files.transformer_folder, processor)["query_prefix"]
    prompts: dict[str, str] = dict.fromkeys(SIDES, prefix)
    sides: dict[Side, SideSettings] = dict.fromkeys(SIDES, SideSettings())
    return replace(files, prompts={**prompts, **files.prompts}, default_prompt_name="query", sides=sides)


def _with_frames(files: SentenceTransformersFiles, turns: _Turns) -> SentenceTransformersFiles:
    """``files`` with prompts as the turns around a text, of which theirs are the system's."""
    # The library's files leave the system's turn to the template; without them the model's own code is followed.
    usual = None if files.chat else turns.instruction
    asked: dict[str, str | None] = {**dict.fromkeys((_DEFAULT, *SIDES), usual), **files.prompts}
    prompts = {}
    for name, instruction in asked.items():
        frame = _frame(files, turns, instruction)
        if SLOT in frame.before + frame.behind:
            raise CheckpointError(f"The chat template writes {SLOT}, which bei reads as the place of the text.")
        prompts[name] = f"{frame.before}{SLOT}{frame.behind}"
    return replace(files, prompts=prompts, default_prompt_name=files.default_prompt_name or _DEFAULT)


def _frame(files: SentenceTransformersFiles, turns: _Turns, instruction: str | None) -> Frame:
    found = derive_frame(files.transformer_folder, files.chat or _OF_SCRIPT, instruction, _IMAGE_PAD)
    if files.chat:
        return found
    return found._replace(behind=found.behind + turns.end, behind_image=found.behind_image + turns.end)


def around_texts(folder: Path, family: Family) -> tuple[str, str] | None:
    """What stands before and behind every text; None for other families. Raises CheckpointError."""
    processor = _processor_of(family)
    if processor is None:
        return None
    pad = processor.pad if processor.is_fixed else token_of(folder, "pad") or processor.pad
    return _bos(folder, processor), pad * _NUM_BEHIND_QUERIES + processor.end


def _behind_all(folder: Path) -> str:
    """The tokens that the tokenizer itself puts behind every text, in which a sequence ends."""
    stored = stored_tokenizer(folder)
    if stored is None:
        raise CheckpointError(f"{folder} has no tokenizer.json, which bei reads for this model. Download it.")
    encoded = stored.encode("a")
    places = [index for index, text in enumerate(encoded.sequence_ids) if text is not None]
    if not places or places[0]:
        raise CheckpointError(f"The tokenizer in {folder} puts {encoded.tokens[:1]} before texts: not supported.")
    return "".join(encoded.tokens[places[-1] + 1 :])


def with_refused_text(tokenization: Tokenization, family: Family, *, reads_images: bool) -> Tokenization:
    """``tokenization``, which refuses the place of an image (or of audio or video) in a text, as the library's
    processor does. ``reads_images``: images may stand among the tokens."""
    processor = _processor_of(family)
    if family is embedding_gemma2.FAMILY and reads_images:
        return msgspec.structs.replace(tokenization, refused_text=[*NO_TEXTS])
    if processor is None and family.model_type not in _TURNS:
        return tokenization
    return msgspec.structs.replace(tokenization, refused_text=processor.image if processor else _IMAGE_PAD)


def pair_template(checkpoint: Checkpoint) -> RerankTemplate | None:
    """The text in which the code of the checkpoint's class reads a pair; None where its files say it, or the user."""
    return _RANKER_TEMPLATE if checkpoint.spec.architecture == qwen2_vl.RANKER else None


class _Reading(NamedTuple):
    """How an image is read: the token ``image``, whose id config.json has as ``named``, under ``key``; the tokens
    ``before`` and ``after`` of one that is read alone, or as the document of a pair; ``around`` and ``most_images`` as
    in ``ImageSequence``."""

    image: str
    key: str
    named: int
    before: list[int]
    after: list[int]
    around: tuple[str, str] | None
    most_images: int | msgspec.UnsetType


def image_sequence(
    checkpoint: Checkpoint, patches: PatchesSpec, num_patches: int, template: RerankTemplate | None
) -> ImageSequence:
    """How the decoder of ``checkpoint`` reads an image of ``patches``, so many at most; ``template``: of pairs, of a
    reranker. Raises CheckpointError, ConfigError."""
    spec, side = checkpoint.spec, patches.block_side
    read = _reading(checkpoint, template)
    index = checkpoint.tokenizer.token_to_id(read.image)
    if index is None or index != read.named:
        raise CheckpointError(
            f"config.json has {read.key} = {read.named}, and {read.image} is {index} in the tokenizer: transformers "
            "would find no place for an image. Download the checkpoint again."
        )
    found = ImageSequence(
        before=read.before,
        token_id=index,
        after=read.after,
        width=spec.hidden_size * (1 + spec.embeddings.image_layers),
        merged_side=side if side > 1 else msgspec.UNSET,
        around=read.around or msgspec.UNSET,
        most_images=read.most_images,
    )
    if (count := found.num_tokens(num_patches)) > checkpoint.max_seq_len:
        fewer = ""
        if patches.fits_images and (left := checkpoint.max_seq_len - len(read.before) - len(read.after)) > 0:
            fewer = f"images of fewer pixels (--max-image-pixels {left * (patches.size * side) ** 2}), "
        raise ConfigError(
            f"max_seq_len {checkpoint.max_seq_len} is less than the {count} tokens of an image: choose at least that, "
            f"{fewer}or build without images (--no-images)."
        )
    return found


def _reading(checkpoint: Checkpoint, template: RerankTemplate | None) -> _Reading:
    """How the model reads an image. Raises CheckpointError, ConfigError."""
    spec, tokenizer = checkpoint.spec, checkpoint.tokenizer
    processor = _processor_of(checkpoint.family)
    output = "embedding" if processor is None else "token_embedding"
    around = None if processor is not None or spec.head("logits") is None else _around_in_pairs(checkpoint, template)
    if around is None and [head.output for head in spec.heads] != [output]:
        kind = "one vector of an image" if processor is None else "a vector for each token of an image"
        raise ConfigError(
            f"{spec.architecture} has {kind}: leave task and pooling out, or build it for texts alone (--no-images)."
        )
    if checkpoint.family is embedding_gemma2.FAMILY:
        return _Reading(GEMMA_IMAGE, "image_token_id", checkpoint.config.image_token_id, *image_markers_of(checkpoint))
    image, key, among, last = _IMAGE_PAD, "image_token_id", around, []
    if around is not None:
        assert template is not None, "such pairs have one"
        slots = {"query": _NO_QUERY, "instruction": template.instruction}
        first, second = (filled(part, slots) for part in template.body.split("{document}"))
        parts = (f"{template.prefix}{first}{around[0]}", f"{around[1]}{second}{template.suffix}")
        last = [] if isinstance(template.last_id, msgspec.UnsetType) else [template.last_id]
    elif processor is None:
        frame = _frame_of_prompt(checkpoint)
        among = mixed_markers(checkpoint.folder, checkpoint.files.chat or _OF_SCRIPT, _IMAGE_PAD)
        parts = (frame.before_image, frame.behind_image + _behind_all(checkpoint.folder))
        if spec.heads[0].pooling != ("last",):
            raise ConfigError(
                f"{spec.architecture} has images by its last token's state alone: leave pooling out, or build it for "
                "texts alone (--no-images)."
            )
    else:
        image, key = processor.image, processor.image_id
        parts = _parts_of_prompt(checkpoint.folder, processor)
    config = checkpoint.config if processor is None else checkpoint.config.vlm_config
    before, after = (tokenizer.encode(part, add_special_tokens=False).ids for part in parts)
    most = _most_images(checkpoint, among, in_pair=around is not None)
    return _Reading(image, key, getattr(config, key), before, [*after, *last], among, most)


def _most_images(checkpoint: Checkpoint, around: tuple[str, str] | None, *, in_pair: bool) -> int | msgspec.UnsetType:
    """Of one input or, ``in_pair``, of a query and a document."""
    if around is None:
        return msgspec.UNSET
    chat = checkpoint.files.chat
    roles = ("query", "document") if in_pair and chat else ("user",)
    repeats = repeats_markers(checkpoint.folder, chat or _OF_SCRIPT, roles, _IMAGE_PAD, around)
    return MOST_IMAGES if repeats else msgspec.UNSET


def _around_in_pairs(checkpoint: Checkpoint, template: RerankTemplate | None) -> tuple[str, str]:
    """What stands before and behind an image in a pair. Raises ConfigError, CheckpointError."""
    spec, files = checkpoint.spec, checkpoint.files
    (head,) = spec.heads
    if template is None or any(template.body.count(slot) != 1 for slot in ("{query}", "{document}")):
        raise ConfigError(
            f"{spec.architecture} reads images in pairs whose text has one place for a query and one for a document: "
            "give it as rerank_body, or build for texts alone (--no-images)."
        )
    is_own = checkpoint.spec.architecture == qwen2_vl.RANKER
    if (len(head.layers) != 1 and not is_own) or head.pooling != ("last",):
        raise ConfigError(
            f"{spec.architecture} has scores of images by one or two score_tokens: name these, or build for texts "
            "alone (--no-images)."
        )
    roles = ("query", "document") if files.chat else ("user",)
    return image_markers(checkpoint.folder, files.chat or _OF_SCRIPT, roles, _IMAGE_PAD)


def _frame_of_prompt(checkpoint: Checkpoint) -> Frame:
    """The frame of images: with the prompt that texts have unless a request says otherwise."""
    files, turns = read_sentence_transformers(checkpoint.location.folder), _TURNS[checkpoint.family.model_type]
    default = files.prompts.get(files.default_prompt_name or "")
    return _frame(files, turns, default or (None if files.chat else turns.instruction))


def _parts_of_prompt(folder: Path, processor: _Processor) -> tuple[str, str]:
    """What stands before and behind an image."""
    prompt = _settings(folder, processor)["visual_prompt_prefix"]
    if not processor.has_place:
        prompt = f"{processor.image}{_bos(folder, processor)}{prompt}\n"
    before, *behind = prompt.split(processor.image)
    if len(behind) != 1:
        raise CheckpointError(
            f"processor_config.json has a visual_prompt_prefix with {len(behind)} places of an image "
            f"({processor.image}): bei reads one image at a time."
        )
    return before, behind[0]


def _settings(folder: Path, processor: _Processor) -> dict[str, Any]:
    """The prompts in processor_config.json. Raises CheckpointError."""
    path = folder / "processor_config.json"
    found = read_object(path) if path.is_file() else {}
    prompts = () if processor.is_fixed else tuple(processor.prompts)
    read = {*_READ, *prompts, *processor.ignored}
    unread = {name for name, value in found.items() if name not in read and value is not None}
    if found.get("processor_class") not in (None, processor.name, *processor.like):
        unread.add("processor_class")
    unread |= {name for name in processor.prompts if not isinstance(found.get(name, ""), str)}
    if unread:
        name = min(unread)
        raise CheckpointError(
            f"{path} has {name} = {str(found[name])[:80]!r}, which bei does not read: it reads {processor.name}'s "
            f"{' and '.join(prompts) or 'image_processor'}."
        )
    return {**processor.prompts, **found}


def _bos(folder: Path, processor: _Processor) -> str:
    """The token in front of texts, as transformers' class names it where the files do not."""
    return "" if processor.bos is None else token_of(folder, "bos") or processor.bos
