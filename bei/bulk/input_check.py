"""Refuses jobs in which every row would be an error, before anything is computed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bei.artifact.manifest import Manifest
from bei.bulk.sources.kinds import ColumnKinds, Kind
from bei.errors import ConfigError
from bei.tasks.mixed import most_images, reads_both

_WORDS: Mapping[Kind, str] = {
    "text": "texts",
    "ids": "token ids",
    "texts": "pairs of texts",
    "image": "images (bytes of files, or structs with such bytes)",
    "images": "lists of images",
    "both": "structs of a text and an image",
    "text and images": "structs of a text and a list of images",
}
# Of strings, where they are images.
_BESIDE_BYTES = "data URLs or whole paths of images"
_READ_BY: Mapping[str, tuple[Kind, ...]] = {
    "embed": ("text", "ids"),
    "sparse": ("text", "ids"),
    "tokens": ("text",),
    "classify": ("text", "texts"),
    "rerank": ("text",),
    "extract": ("text",),
}
# Of a column that is said to hold images.
_AS_IMAGES: Mapping[Kind, Kind] = {"text": "image", "texts": "images"}
# A list is taken to have so many where the rows of a shard are counted.
_IMAGES_OF_A_LIST = 4
# Options that say how texts are read, by bei.Model's names, and the flags that give them.
FLAGS_OF_TEXTS: Mapping[str, str] = {
    "prompt": "--prompt",
    "prompt_name": "--prompt-name",
    "input_type": "--input-type",
    "truncate": "--truncate",
    "truncation_direction": "--truncate",
    "truncate_prompt_tokens": "--max-tokens",
}


def check_inputs(
    columns: Mapping[str, ColumnKinds],
    file: str,
    manifest: Manifest,
    task: str,
    options: Mapping[str, Any],
    *,
    chunks: bool,
    image: str | None = None,
) -> None:
    """Raise ConfigError where the model reads nothing of what ``columns`` of ``file`` hold, or reads images alone and
    gets ``options`` of texts. ``chunks``: texts are to be cut into such. ``image``: the column of images that are one
    input with the text beside them; alone where there is no other."""
    if not manifest.reads_texts:
        for name, flag in {**FLAGS_OF_TEXTS, "chunks": "--chunk-tokens"}.items():
            if options.get(name) is not None or (name == "chunks" and chunks):
                raise ConfigError(f"{flag} is for texts, and {manifest.name} reads images alone: leave it out.")
    read = _read(manifest, task, chunks=chunks)
    if image is not None and ("both" if columns.keys() != {image} else "image") not in read:
        raise ConfigError(
            f"--image-column is for models that have one vector of a text and an image, by --task embed; "
            f"{manifest.name} reads {_words(read)} here. For images alone name their column by --text-column too."
        )
    for column, found in columns.items():
        wanted, words = read, _words(read)
        if image is not None:
            wanted = frozenset(("text",)) if column != image else read & {"image", "images"}
            words = _words(wanted) + f", or {_BESIDE_BYTES}" * (column == image)
        held = found.kinds if column != image else {_AS_IMAGES.get(kind, kind) for kind in found.kinds}
        if not wanted & held:
            flags = "--text-column and --query-column" if task == "rerank" else "--text-column"
            raise ConfigError(
                f"The column {column!r} of {file} holds {found.shown}, and {manifest.name} reads {words} for "
                f"--task {task}{' with --chunk-tokens' * chunks}: every row would be an error. Name a column of these "
                f"by {flags if column != image else '--image-column'}, or ask another model."
            )


def images_a_row(columns: Mapping[str, ColumnKinds], manifest: Manifest, image: str | None) -> int:
    """About how many images a row of ``columns`` has that ``manifest`` reads: 0 where they hold none. ``image``: as of
    ``check_inputs``."""
    kinds = frozenset[Kind]().union(*(found.kinds for found in columns.values()))
    if image is not None:
        kinds = frozenset(_AS_IMAGES.get(kind, kind) for kind in columns[image].kinds)
    if kinds & {"images", "text and images"} and most_images(manifest) > 1:
        return _IMAGES_OF_A_LIST
    return 1 if manifest.image_tower is not None and kinds & {"image", "both"} else 0


def _words(kinds: frozenset[Kind]) -> str:
    return " or ".join(_WORDS[kind] for kind in _WORDS if kind in kinds)


def _read(manifest: Manifest, task: str, *, chunks: bool) -> frozenset[Kind]:
    if chunks:
        return frozenset(("text",))
    tower = manifest.image_tower
    if tower is None or task != ("tokens" if manifest.reads_images_by_token else "embed"):
        return frozenset(_READ_BY[task])
    read: set[Kind] = {"image", *(_READ_BY[task] if manifest.reads_texts else ())}
    if reads_both(manifest):
        read |= {"both", "images", "text and images"} if most_images(manifest) > 1 else {"both"}
    return frozenset(read)
