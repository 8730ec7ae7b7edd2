"""What the processor of a decoder that reads images writes around images and queries (processor_config.json):
transformers' ColPaliProcessor and ColQwen2Processor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from bei.artifact.image_sequence import ImageSequence
from bei.artifact.manifest import Tokenization
from bei.artifact.sides import SIDES, Side
from bei.errors import CheckpointError, ConfigError
from bei_build.checkpoint.checkpoint import Checkpoint
from bei_build.checkpoint.colbert import SideSettings
from bei_build.checkpoint.sentence_transformers import SentenceTransformersFiles
from bei_build.families import colpali, colqwen2
from bei_build.families.base import Family
from bei_build.files.json_settings import read_object
from bei_build.spec.parts import PatchesSpec
from bei_build.tokenizer.library_tokenizer import token_of

_NUM_BEHIND_QUERIES = 10
# Settings that such files may have beside the prompts: the class, the image processor, which ``image_processor`` reads,
# and what must not be set.
_READ = ("processor_class", "image_processor", "image_seq_length", "auto_map")


@dataclass(frozen=True)
class _Processor:
    """``image``: the token that stands for an image; ``image_id``: the key of its id in the model's config. ``bos``:
    the default of the token in front of texts; None: there is none. ``pad``: the default of that behind queries.
    ``prompts``: the defaults of both. ``has_place``: the prompt of images has the image's place in it; else the image
    is in front of BOS, prompt and a line's end. ``ignored``: settings that texts and images do not depend on."""

    name: str
    image: str
    image_id: str
    bos: str | None
    pad: str
    prompts: Mapping[str, str]
    has_place: bool
    ignored: tuple[str, ...] = ()


_PROCESSORS: Mapping[str, _Processor] = {
    colpali.MODEL_TYPE: _Processor(
        name="ColPaliProcessor",
        image="<image>",
        image_id="image_token_index",
        bos="<bos>",
        pad="<pad>",
        prompts={"query_prefix": "Question: ", "visual_prompt_prefix": "Describe the image."},
        has_place=False,
    ),
    colqwen2.MODEL_TYPE: _Processor(
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
    ),
}


def with_prompts(files: SentenceTransformersFiles, family: Family) -> SentenceTransformersFiles:
    """``files`` with the prefix of queries, which all texts get, on whatever side a request puts them. Raises
    CheckpointError."""
    processor = _PROCESSORS.get(family.model_type)
    if processor is None:
        return files
    prefix = _settings(files.transformer_folder, processor)["query_prefix"]
    prompts: dict[str, str] = dict.fromkeys(SIDES, prefix)
    sides: dict[Side, SideSettings] = dict.fromkeys(SIDES, SideSettings())
    return replace(files, prompts={**prompts, **files.prompts}, default_prompt_name="query", sides=sides)


def around_texts(folder: Path, family: Family) -> tuple[str, str] | None:
    """What stands before and behind every text; None for other families. Raises CheckpointError."""
    processor = _PROCESSORS.get(family.model_type)
    if processor is None:
        return None
    return _bos(folder, processor), (token_of(folder, "pad") or processor.pad) * _NUM_BEHIND_QUERIES + "\n"


def with_refused_text(tokenization: Tokenization, family: Family) -> Tokenization:
    """``tokenization``, which refuses the place of an image in a text, as the library's processor does."""
    processor = _PROCESSORS.get(family.model_type)
    return tokenization if processor is None else msgspec.structs.replace(tokenization, refused_text=processor.image)


def image_sequence(checkpoint: Checkpoint, patches: PatchesSpec, num_patches: int) -> ImageSequence:
    """How the decoder of ``checkpoint`` reads an image of ``patches``, so many at most. Raises CheckpointError,
    ConfigError."""
    processor = _PROCESSORS[checkpoint.family.model_type]
    folder, whole, tokenizer = checkpoint.folder, checkpoint.config.vlm_config, checkpoint.tokenizer
    index, named = tokenizer.token_to_id(processor.image), getattr(whole, processor.image_id)
    if index is None or index != named:
        raise CheckpointError(
            f"config.json has vlm_config.{processor.image_id} = {named}, and {processor.image} is {index} in the "
            "tokenizer: transformers would find no place for an image. Download the checkpoint again."
        )
    if [head.output for head in checkpoint.spec.heads] != ["token_embedding"]:
        raise ConfigError(
            f"{checkpoint.spec.architecture} has a vector for each token of an image: leave task and pooling out, or "
            "build it for texts alone (--no-images)."
        )
    prompt = _settings(folder, processor)["visual_prompt_prefix"]
    if not processor.has_place:
        prompt = f"{processor.image}{_bos(folder, processor)}{prompt}\n"
    if prompt.count(processor.image) != 1:
        raise CheckpointError(
            f"processor_config.json has a visual_prompt_prefix with {prompt.count(processor.image)} places of an image "
            f"({processor.image}): bei reads one image at a time."
        )
    before, after = (tokenizer.encode(part, add_special_tokens=False).ids for part in prompt.split(processor.image))
    side = patches.block_side
    found = ImageSequence(
        before=before,
        token_id=index,
        after=after,
        width=checkpoint.spec.hidden_size,
        merged_side=side if side > 1 else msgspec.UNSET,
    )
    if (count := found.num_tokens(num_patches)) > checkpoint.max_seq_len:
        raise ConfigError(
            f"max_seq_len {checkpoint.max_seq_len} is less than the {count} tokens of an image: choose at least that, "
            "or build without images (--no-images)."
        )
    return found


def _settings(folder: Path, processor: _Processor) -> dict[str, Any]:
    """The prompts in processor_config.json. Raises CheckpointError."""
    path = folder / "processor_config.json"
    found = read_object(path) if path.is_file() else {}
    read = {*_READ, *processor.prompts, *processor.ignored}
    unread = {name for name, value in found.items() if name not in read and value is not None}
    if found.get("processor_class") not in (None, processor.name):
        unread.add("processor_class")
    unread |= {name for name in processor.prompts if not isinstance(found.get(name, ""), str)}
    if unread:
        name = min(unread)
        raise CheckpointError(
            f"{path} has {name} = {str(found[name])[:80]!r}, which bei does not read: it reads {processor.name}'s "
            f"{' and '.join(processor.prompts)}."
        )
    return {**processor.prompts, **found}


def _bos(folder: Path, processor: _Processor) -> str:
    """The token in front of texts, as transformers' class names it where the files do not."""
    return "" if processor.bos is None else token_of(folder, "bos") or processor.bos
