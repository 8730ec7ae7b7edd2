"""Which of a model's outputs sentence-transformers' Transformer hands to the next module.

Its settings name the task, whose class of transformers is loaded, and for each kind of input a method and its output
(TRANSFORMER_TASK_DEFAULTS in base/modules/transformer.py of 6.2). bei reads the output that belongs to the task.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bei.errors import CheckpointError
from bei_build.files.json_settings import setting


@dataclass(frozen=True)
class _Use:
    """The ``tasks`` whose class a form of modules needs, and the one ``output`` of forward, saved as ``feature``."""

    tasks: tuple[str, ...]
    output: str
    feature: str


_STATES = _Use(("feature-extraction",), "last_hidden_state", "token_embeddings")
# By the forms of ``sentence_transformers._form``; a static embedding has no Transformer.
_USES: Mapping[str, _Use] = {
    "pooled": _STATES,
    "layers_pooled": _STATES,
    "per_token": _STATES,
    "classifier": _Use(("sequence-classification",), "logits", "scores"),
    "SpladePooling": _Use(("fill-mask",), "logits", "token_embeddings"),
    "LogitScore": _Use(("text-generation", "any-to-any"), "logits", "causal_logits"),
}


# What a class of modules.json does without a ``transformer_task``; others extract features.
_TASKS_OF_CLASSES = {"MLMTransformer": "fill-mask"}


def check_output(path: Path, config: dict[str, Any], form: str, kind: str) -> None:
    """Raise CheckpointError where the settings at ``path`` of the Transformer, whose class is ``kind``, ask for another
    output than modules of ``form`` get."""
    if (use := _USES.get(form)) is None:
        return
    usual = _TASKS_OF_CLASSES.get(kind, "feature-extraction")
    task = setting(path, config, "transformer_task", str) or usual
    if task not in use.tasks:
        raise CheckpointError(
            f"{path} gives the {kind} the transformer_task {task!r}, said or by default, and what is behind it needs "
            f"{use.tasks[0]}: correct it, or download the checkpoint again."
        )
    inputs = setting(path, config, "modality_config", dict)
    if inputs is None:  # the library uses the task's outputs then, whatever module_output_name says
        return
    if not {"text", "message"} & inputs.keys():
        raise CheckpointError(
            f"{path} has a modality_config for {', '.join(sorted(inputs))} alone, and bei gives such models texts: "
            "add an entry for text if the model reads texts."
        )
    for name in ("text", "message"):
        entry = setting(path, inputs, name, dict)
        if entry is None:
            continue
        method, output = entry.get("method", "forward"), entry.get("method_output_name", use.output)
        if method != "forward" or output not in (use.output, [use.output]):
            raise CheckpointError(
                f"{path} takes {output!r} of the method {method!r} for {name} (modality_config), and bei takes "
                f"{use.output} of forward alone: correct it if that is meant. The model needs another runtime if not."
            )
    if (feature := setting(path, config, "module_output_name", str)) not in (None, use.feature):
        raise CheckpointError(
            f"{path} has module_output_name {feature!r}, and the modules behind it read {use.feature}: correct it, or "
            "download the checkpoint again."
        )
