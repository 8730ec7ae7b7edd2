"""Which of an artifact's adapters a request means, by the names that it gives."""

from __future__ import annotations

from collections.abc import Iterable

from bei.artifact.manifest import NO_ADAPTER, Adapters, Manifest
from bei.artifact.sides import SIDES
from bei.errors import ConfigError, InvalidRequestError

# The adapter of jina-embeddings-v5 for both sides of retrieval, which have prompts instead of adapters of their own.
_RETRIEVAL = "retrieval"


def adapter_of(
    manifest: Manifest, prompt_name: str | None = None, input_type: str | None = None, *, asked: int = 0
) -> int:
    """The id of the adapter that ``prompt_name`` or ``input_type`` (Jina's ``task``) names; ``asked``: the one that the
    model's name has. 0: the base model's weights.

    Raises InvalidRequestError for names that contradict each other, and for none where the model needs one.
    """
    if not isinstance(adapters := manifest.adapters, Adapters):
        return 0
    names = [name for name in (prompt_name, input_type) if name is not None]
    found = {number for name in names if (number := _task_named(adapters, name)) is not None}
    if asked:
        found.add(asked)
    if not found:
        found = {number for name in names if (number := _task_of_side(adapters, name)) is not None}
    if len(found) > 1:
        several = ", ".join(adapter_name(manifest, number) for number in sorted(found))
        raise InvalidRequestError(f"The request names several adapters ({several}): name one.", _param(prompt_name))
    if found:
        return found.pop()
    if input_type is not None and adapters.tasks:
        raise InvalidRequestError(
            f"{manifest.name} has no task {input_type!r}. Its tasks: {', '.join(adapters.tasks)}.", "input_type"
        )
    check_named(manifest)
    return 0


def check_named(manifest: Manifest) -> None:
    """Raise InvalidRequestError if requests to the model have to name an adapter."""
    if isinstance(adapters := manifest.adapters, Adapters) and adapters.is_required:
        raise InvalidRequestError(
            f"{manifest.name} has an adapter for each of its tasks and reads no text without one: say by task "
            f"(input_type) which, or name the model {manifest.name}:TASK. Tasks: {', '.join(adapters.names)}.",
            "input_type",
        )


def _task_named(adapters: Adapters, name: str) -> int | None:
    """The id of the task ``name``, which may have a side behind it ("retrieval.query"); None: there is no such task."""
    if name == NO_ADAPTER and adapters.tasks:
        return 0
    return _first(adapters, (name, name.rpartition(".")[0]))


def _task_of_side(adapters: Adapters, side: str) -> int | None:
    """The id of the task for texts of ``side``: the one called so, or that of retrieval."""
    names = next((names for names in SIDES.values() if side in names), None)
    return None if names is None else _first(adapters, (*names, _RETRIEVAL))


def _first(adapters: Adapters, names: Iterable[str]) -> int | None:
    found = next((name for name in names if name in adapters.tasks), None)
    return None if found is None else adapters.names.index(found) + 1


def adapter_called(manifest: Manifest, name: str) -> int:
    """The id of the adapter ``name``. Raises ConfigError, which lists them, where there is none."""
    names = manifest.adapter_names
    if name not in names:
        raise ConfigError(f"{manifest.name} has no adapter {name!r}. Its adapters: {', '.join(names) or 'none'}.")
    return names.index(name) + 1


def is_task(manifest: Manifest, name: str) -> bool:
    """True if ``name`` is a task's adapter, or none, and no side."""
    adapters = manifest.adapters
    return isinstance(adapters, Adapters) and bool(adapters.tasks) and name in (*adapters.tasks, NO_ADAPTER)


def adapter_name(manifest: Manifest, number: int) -> str:
    """The name of adapter ``number``."""
    return manifest.adapter_names[number - 1] if number else NO_ADAPTER


def _param(prompt_name: str | None) -> str:
    return "input_type" if prompt_name is None else "prompt_name"
