"""What EmbeddingGemma 2's processor and chat template write around texts and images: the special tokens of the
tokenizer around all, and a token before and behind each image."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import msgspec
from tokenizers import Tokenizer

from bei.artifact.image_sequence import MOST_IMAGES
from bei.errors import CheckpointError, ConfigError
from bei_build.checkpoint.checkpoint import Checkpoint
from bei_build.checkpoint.sentence_transformers import SentenceTransformersFiles
from bei_build.tokenizer.chat_template import ChatSettings, derive_frame, has_template, mixed_markers, repeats_markers
from bei_build.tokenizer.library_tokenizer import token_of

# The token that stands for an image; transformers' processor writes as many as the tower gives states.
IMAGE = "<|image|>"
# Tokens that the library's class reads as padding in a text where nothing is sent for them.
NO_TEXTS = (IMAGE, "<|video|>", "<|audio|>")
# Before and behind these, where the tokenizer's files name none.
_BEGIN, _END = "<|image>", "<image|>"
_AS_MESSAGES = ChatSettings("structured")


class ImageMarkers(NamedTuple):
    """``before`` and ``after``: the tokens around an image that is read alone. ``around``: the texts before and behind
    one among texts, and ``most_images`` of one input; None and unset where nothing says how both are written."""

    before: list[int]
    after: list[int]
    around: tuple[str, str] | None
    most_images: int | msgspec.UnsetType


def with_plain_prompts(files: SentenceTransformersFiles) -> SentenceTransformersFiles:
    """``files`` whose chat template writes a prompt and a text one behind the other, and nothing else. Raises
    CheckpointError where it writes more."""
    if files.chat is None:
        return files
    for prompt in {"", *files.prompts.values()}:
        frame = derive_frame(files.transformer_folder, files.chat, prompt or None, IMAGE)
        if (frame.before, frame.behind) != (prompt, ""):
            raise CheckpointError(
                f"The chat template in {files.transformer_folder} writes more around a text than its prompt: not "
                "supported of this model. Download the checkpoint again."
            )
    # sentence-transformers leaves no prompt out of the mean where a chat template writes it.
    return replace(files, include_prompt=None)


def image_markers_of(checkpoint: Checkpoint) -> ImageMarkers:
    """What stands around images of ``checkpoint``. Raises CheckpointError, ConfigError."""
    folder, files, tokenizer = checkpoint.folder, checkpoint.files, checkpoint.tokenizer
    if checkpoint.spec.heads[0].pooling != ("mean",):
        raise ConfigError(
            f"{checkpoint.spec.architecture} has images by the mean of its tokens' states alone: leave pooling out, or "
            "build it for texts alone (--no-images)."
        )
    begin, end = _marker(folder, tokenizer, "boi", _BEGIN), _marker(folder, tokenizer, "eoi", _END)
    chat = files.chat or (_AS_MESSAGES if has_template(folder) else None)
    before, behind, around = "", "", None
    most: int | msgspec.UnsetType = msgspec.UNSET
    if chat is not None:
        prompt = files.prompts.get(files.default_prompt_name or "")
        frame = derive_frame(folder, chat, prompt or None, IMAGE)
        before, behind = frame.before_image, frame.behind_image
        if (own := mixed_markers(folder, chat, IMAGE)) is not None:
            around = (own[0] + begin, end + own[1])
            most = MOST_IMAGES if repeats_markers(folder, chat, ("user",), IMAGE, own) else msgspec.UNSET
    first, last = _special_tokens(tokenizer)
    parts = (tokenizer.encode(part, add_special_tokens=False).ids for part in (before + begin, end + behind))
    return ImageMarkers([*first, *next(parts)], [*next(parts), *last], around, most)


def _marker(folder: Path, tokenizer: Tokenizer, kind: str, usual: str) -> str:
    """The ``kind`` token as the tokenizer's files spell it, else as Gemma 4's do. Raises CheckpointError."""
    found = token_of(folder, kind) or usual
    if tokenizer.token_to_id(found) is None:
        raise CheckpointError(
            f"The tokenizer in {folder} has no {found}, which the processor writes beside an image ({kind}_token): "
            "download the checkpoint again, or build without images (--no-images)."
        )
    return found


def _special_tokens(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """The tokens that the tokenizer itself puts before and behind every text."""
    encoded = tokenizer.encode("a")
    places = [index for index, text in enumerate(encoded.sequence_ids) if text is not None]
    return encoded.ids[: places[0]], encoded.ids[places[-1] + 1 :]
