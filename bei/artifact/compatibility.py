"""Checks that an artifact may replace a served one without a restart.

Clients must not be misled: everything they use must still be there, and stored vectors must be comparable with new
ones. A larger change needs a restart, which is a deliberate decision.
"""

from __future__ import annotations

from collections.abc import Iterator

from bei.artifact.held_files import FileInfo
from bei.artifact.manifest import ENGINE_DIR, IMAGE_ENGINE_DIR, LABEL_ENGINE_DIR, TOKENIZER, Artifact, Manifest
from bei.errors import SwapRefusedError
from bei.utils.free_memory import available_bytes

# int8 vectors have a step size that the build derives from its engine's answers. It may change as long as no component
# moves by more than a step.
_STEPS = 127


def check_swap(served: Manifest, new: Manifest, *, vectors_may_change: bool) -> None:
    """Raise SwapRefusedError if ``new`` may not replace ``served``.

    ``vectors_may_change``: stored vectors need not be comparable with new ones.
    """
    changes = [*_model_changes(served, new)]
    if changes:
        raise SwapRefusedError(f"It has {_listed(changes)} than the model that is served: restart the server with it.")
    changes = [*_vector_changes(served, new)]
    if changes and not vectors_may_change:
        raise SwapRefusedError(
            f"It has {_listed(changes)}: its vectors are not comparable with those that clients have stored. Give it "
            "a name of its own, restart the server, or start it with --swap-vectors."
        )


def check_room(artifact: Artifact, num_engines: int = 1) -> None:
    """Raise SwapRefusedError if ``num_engines`` more engines exceed the memory: the system would kill the process."""
    size = num_engines * sum(info.size for info in _engine_files(artifact.manifest))
    available, of_each = available_bytes(), f" of each of {num_engines} devices" if num_engines > 1 else ""
    if available is not None and size > available:
        raise SwapRefusedError(
            f"Two engines are in memory{of_each} during a swap: the new one takes {size / 1e9:.1f} GB at least, and "
            f"{available / 1e9:.1f} GB are available. Free some, or restart the server with it."
        )


def _model_changes(served: Manifest, new: Manifest) -> Iterator[str]:
    if new.name != served.name:
        yield f"another name ({new.name})"
    if missing := [task for task in served.tasks if task not in new.tasks]:
        yield f"fewer tasks (not {', '.join(missing)})"
    elif new.tasks[0] != served.tasks[0]:
        yield f"another first task ({new.tasks[0]})"
    if fewer := [name for name in served.adapter_names if name not in new.adapter_names]:
        yield f"fewer adapters (not {', '.join(fewer)})"
    if served.image_tower is not None and new.image_tower is None:
        yield "no image tower"
    if (served.label_tower is None) != (new.label_tower is None):
        yield "labels that are read otherwise"
    if _tokenizer(new) != _tokenizer(served):
        yield "another tokenizer"


def _vector_changes(served: Manifest, new: Manifest) -> Iterator[str]:
    """Differences that make new vectors incomparable with stored ones."""
    if not any(task.startswith("embed") for task in served.tasks):
        return
    if new.source.sha256 != served.source.sha256:
        yield "another checkpoint"
    if _adapted(new) != _adapted(served):
        yield "another attention or adapter"
    if _vector_settings(new) != _vector_settings(served):
        yield "other outputs or another pooling"
    if _text_settings(new) != _text_settings(served):
        yield "other prompts, roles or routes"
    if served.image_tower is not None and new.image_tower is not None and _pixels(new) != _pixels(served):
        yield "another image processor"
    if not _same_steps(served, new):
        yield "another size of the steps of int8 vectors"


def _adapted(manifest: Manifest) -> tuple[object, ...]:
    """Settings of the weights that requests without an adapter's name get, and of those with one."""
    return manifest.spec.attention, manifest.spec.adapter, manifest.adapters


def _text_settings(manifest: Manifest) -> tuple[object, ...]:
    """Settings of how texts are read."""
    return manifest.prompts, manifest.default_prompt_name, manifest.roles, manifest.routes


def _pixels(manifest: Manifest) -> object:
    """How images are read."""
    tower = manifest.image_tower
    return None if tower is None else (tower.processor, tower.image_size, tower.sequence)


def _vector_settings(manifest: Manifest) -> tuple[object, ...]:
    """Settings of how vectors are computed from token states."""
    embedding = manifest.embedding
    pooling = None if embedding is None else (embedding.pooling, embedding.normalize, embedding.pools_prompt)
    return pooling, manifest.outputs, manifest.engine.unit_vectors


def _same_steps(served: Manifest, new: Manifest) -> bool:
    if served.embedding is None or served.embedding.int8_largest is None:
        return True  # no int8 vectors are stored
    if new.embedding is None or new.embedding.int8_largest is None:
        return False
    before, now = served.embedding.int8_largest, new.embedding.int8_largest
    return abs(now - before) * _STEPS <= before


def _tokenizer(manifest: Manifest) -> tuple[object, ...]:
    """The settings that determine token ids, without the version of the library that wrote the file."""
    if manifest.tokenization is None:
        return ()
    file = next(info.sha256 for info in manifest.files if info.path == TOKENIZER)
    settings = manifest.tokenization
    texts = settings.filled_with, settings.refused_text, settings.chars_per_token
    return file, settings.truncation_side, settings.splits_special_tokens, *texts


def _engine_files(manifest: Manifest) -> list[FileInfo]:
    folders = tuple(f"{folder}/" for folder in (ENGINE_DIR, IMAGE_ENGINE_DIR, LABEL_ENGINE_DIR))
    return [info for info in manifest.files if info.path.startswith(folders)]


def _listed(changes: list[str]) -> str:
    return " and ".join([", ".join(changes[:-1]), changes[-1]] if len(changes) > 1 else changes)
