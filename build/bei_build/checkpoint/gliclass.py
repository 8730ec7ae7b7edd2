"""How a GLiClass checkpoint reads labels and a text: figures of the gliclass library's pipeline, and of its config."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer

from bei.artifact.label_layouts import Labelling
from bei.errors import CheckpointError
from bei_build.spec.model_spec import ModelSpec

# The library's pipeline writes these, whatever the config says.
_LABEL, _SEPARATOR = "<<LABEL>>", "<<SEP>>"


def labelling_of(spec: ModelSpec, config: Any, tokenizer: Tokenizer) -> Labelling | None:
    """How labels are laid out for a model that scores them; None for others. Raises CheckpointError."""
    if spec.head("label_logits") is None:
        return None
    settings, ids = config.gliclass, {}
    for key, token in (("class_token_index", _LABEL), ("text_token_index", _SEPARATOR)):
        index = tokenizer.token_to_id(token)
        if index is None:
            raise CheckpointError(f"The tokenizer has no token {token}, which GLiClass reads: download it again.")
        if settings.get(key, index) != index:
            raise CheckpointError(
                f"config.json has {key} = {settings[key]!r}, and the tokenizer has {token} at {index}: they are not of "
                "one checkpoint."
            )
        ids[token] = int(index)
    return Labelling(
        label_token=_LABEL,
        label_id=ids[_LABEL],
        separator_token=_SEPARATOR,
        text_first=not settings.get("prompt_first", False),
        reads_marker=bool(settings.get("embed_class_token", True)),
    )
