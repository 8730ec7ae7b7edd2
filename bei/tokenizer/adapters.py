"""Which of an artifact's adapters a request means, by the names that it gives."""

from __future__ import annotations

from collections.abc import Collection

from bei.artifact.manifest import NO_ADAPTER, Adapters, Manifest
from bei.artifact.sides import SIDES
from bei.errors import InvalidRequestError

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
    given = {name: named_adapter(adapters, name) for name in (prompt_name, input_type) if name is not None}
    found = {number for number in given.values() if number is not None} | ({asked} if asked else set())
    if len(found) > 1:
        names = ", ".join(adapter_name(manifest, number) for number in sorted(found))
        raise InvalidRequestError(f"The request names several adapters ({names}): name one.", _param(prompt_name))
    if found:
        return found.pop()
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


def named_adapter(adapters: Adapters, name: str) -> int | None:
    """The id of the task's adapter that ``name`` means; None: it names none.

    The name of a task, or of one and a side ("retrieval.query"); a side alone means the task of that side, or that of
    retrieval.
    """
    if not adapters.tasks:
        return None
    if name == NO_ADAPTER:
        return 0
    names = (name, name.rpartition(".")[0], *_names_of_side(name))
    found = next((each for each in names if each in adapters.tasks), None)
    return None if found is None else adapters.names.index(found) + 1


def is_task(manifest: Manifest, name: str) -> bool:
    """True if ``name`` is a task's adapter, or none, and no side."""
    adapters = manifest.adapters
    return isinstance(adapters, Adapters) and bool(adapters.tasks) and name in (*adapters.tasks, NO_ADAPTER)


def adapter_name(manifest: Manifest, number: int) -> str:
    """The name of adapter ``number``."""
    return manifest.adapter_names[number - 1] if number else NO_ADAPTER


def _names_of_side(name: str) -> Collection[str]:
    names = next((names for names in SIDES.values() if name in names), None)
    return () if names is None else (*names, _RETRIEVAL)


def _param(prompt_name: str | None) -> str:
    return "input_type" if prompt_name is None else "prompt_name"
