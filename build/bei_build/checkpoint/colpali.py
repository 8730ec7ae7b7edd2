"""What ColPali's processor writes around images and queries (transformers' ColPaliProcessor, processor_config.json)."""

from __future__ import annotations

from dataclasses import replace
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
from bei_build.families.base import Family
from bei_build.families.colpali import MODEL_TYPE
from bei_build.files.json_settings import read_object
from bei_build.tokenizer.library_tokenizer import token_of

_IMAGE = "<image>"
_NUM_BEHIND_QUERIES = 10
_DEFAULTS = {"query_prefix": "Question: ", "visual_prompt_prefix": "Describe the image."}
# Of the file: the class, the image processor, which ``image_processor`` reads, and what must not be set.
_CLASSES = (None, "ColPaliProcessor")
_READ = {*_DEFAULTS, "processor_class", "image_processor", "image_seq_length", "auto_map"}


def with_prompts(files: SentenceTransformersFiles, family: Family) -> SentenceTransformersFiles:
    """``files`` with the prefix of queries, which all texts get, on whatever side a request puts them. Raises
    CheckpointError."""
    if family.model_type != MODEL_TYPE:
        return files
    prefix = _settings(files.transformer_folder)["query_prefix"]
    prompts: dict[str, str] = dict.fromkeys(SIDES, prefix)
    sides: dict[Side, SideSettings] = dict.fromkeys(SIDES, SideSettings())
    return replace(files, prompts={**prompts, **files.prompts}, default_prompt_name="query", sides=sides)


def around_texts(folder: Path, family: Family) -> tuple[str, str] | None:
    """What stands before and behind every text; None for other families. Raises CheckpointError."""
    if family.model_type != MODEL_TYPE:
        return None
    return _token(folder, "bos"), _token(folder, "pad") * _NUM_BEHIND_QUERIES + "\n"


def with_refused_text(tokenization: Tokenization, family: Family) -> Tokenization:
    """``tokenization``, which refuses the place of an image in a text, as the library's processor does."""
    if family.model_type != MODEL_TYPE:
        return tokenization
    return msgspec.structs.replace(tokenization, refused_text=_IMAGE)


def image_sequence(checkpoint: Checkpoint, num_patches: int) -> ImageSequence:
    """How the decoder of ``checkpoint`` reads an image of so many patches. Raises CheckpointError, ConfigError."""
    folder, whole, tokenizer = checkpoint.folder, checkpoint.config.vlm_config, checkpoint.tokenizer
    index = tokenizer.token_to_id(_IMAGE)
    if index is None or index != whole.image_token_index:
        raise CheckpointError(
            f"config.json has vlm_config.image_token_index = {whole.image_token_index}, and {_IMAGE} is {index} in the "
            "tokenizer: transformers would find no place for an image. Download the checkpoint again."
        )
    if [head.output for head in checkpoint.spec.heads] != ["token_embedding"]:
        raise ConfigError(
            f"{checkpoint.spec.architecture} has a vector for each token of an image: leave task and pooling out, or "
            "build it for texts alone (--no-images)."
        )
    prompt = f"{_token(folder, 'bos')}{_settings(folder)['visual_prompt_prefix']}\n"
    after = tokenizer.encode(prompt, add_special_tokens=False).ids
    found = ImageSequence(before=[], token_id=index, after=after, width=checkpoint.spec.hidden_size)
    if (count := found.num_tokens(num_patches)) > checkpoint.max_seq_len:
        raise ConfigError(
            f"max_seq_len {checkpoint.max_seq_len} is less than the {count} tokens of an image: choose at least that, "
            "or build without images (--no-images)."
        )
    return found


def _settings(folder: Path) -> dict[str, Any]:
    """The prompts in processor_config.json. Raises CheckpointError."""
    path = folder / "processor_config.json"
    found = read_object(path) if path.is_file() else {}
    unread = {name for name, value in found.items() if name not in _READ and value is not None}
    if found.get("processor_class") not in _CLASSES:
        unread.add("processor_class")
    unread |= {name for name in _DEFAULTS if not isinstance(found.get(name, ""), str)}
    if unread:
        name = min(unread)
        raise CheckpointError(
            f"{path} has {name} = {str(found[name])[:80]!r}, which bei does not read: it reads ColPaliProcessor's "
            f"{' and '.join(_DEFAULTS)}."
        )
    return {**_DEFAULTS, **found}


def _token(folder: Path, kind: str) -> str:
    """The ``kind`` token, as transformers' class names it where the files do not."""
    return token_of(folder, kind) or f"<{kind}>"
