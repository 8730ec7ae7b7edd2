"""Prompts that config.json has for the tasks of a checkpoint's adapters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from bei.errors import CheckpointError
from bei_build.checkpoint.sentence_transformers import SentenceTransformersFiles
from bei_build.weights.lora import Adapter


def with_adapters_prompt(
    files: SentenceTransformersFiles, adapter: Adapter, instructions: Mapping[str, str] | None
) -> SentenceTransformersFiles:
    """``files`` with the prompt of ``adapter``, which precedes its texts, and without those of other adapters.

    ``instructions``: config.json's prompts by adapter. Raises CheckpointError.
    """
    prompts = with_task_prompts(files, instructions).prompts
    prompts = {name: text for name, text in prompts.items() if name == adapter.name or name not in adapter.names}
    default = files.default_prompt_name if files.default_prompt_name in prompts else None
    default = default or (adapter.name if adapter.name in prompts else None)
    return replace(files, prompts=prompts, default_prompt_name=default)


def with_task_prompts(
    files: SentenceTransformersFiles, instructions: Mapping[str, str] | None
) -> SentenceTransformersFiles:
    """``files`` with ``instructions``, config.json's prompts by task, beside their own. Raises CheckpointError."""
    given = {} if instructions is None else instructions
    if not isinstance(given, Mapping) or not all(isinstance(text, str) for text in given.values()):
        raise CheckpointError("config.json has task_instructions that are not texts: download the checkpoint again.")
    return replace(files, prompts={**given, **files.prompts})
