"""GLiNER2's checkpoints: a config.json of its own, and the encoder's in ``encoder_config``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec import UNSET
from tokenizers import Tokenizer

from bei.artifact.label_layouts import Extraction, Labelling, Schema
from bei.errors import CheckpointError
from bei.tokenizer.schema_prompt import DESCRIPTION, EXAMPLE, OUTPUT
from bei_build.families.gliner2 import ARCHITECTURE, BY_ENCODER, ENCODER, MODEL_TYPE, OF_BOUNDARIES
from bei_build.families.gliner2_boundary import candidates_of
from bei_build.files.json_settings import read_object
from bei_build.spec.head_layers import CountingSpec
from bei_build.spec.model_spec import ModelSpec
from bei_build.weights.model_weights import stored_shape

ENCODER_FOLDER = "encoder_config"
# The tokens that the gliner2 library adds to a tokenizer without them, in its order.
_TOKENS = (
    *("[SEP_STRUCT]", "[SEP_TEXT]", "[P]", "[C]", "[E]", "[R]", "[L]"),
    *(EXAMPLE, OUTPUT, DESCRIPTION),
)
_PART, _ENTITY, _LABEL, _FIELD, _RELATION = "[P]", "[E]", "[L]", "[C]", "[R]"
_BETWEEN, _SEPARATOR = "[SEP_STRUCT]", "[SEP_TEXT]"
# The name of the library's task of spans, and ours of the task of classification, which has to have one there.
_SPANS, _CLASSES = "entities", "category"
# Words of a window of a long text, in the library's ``extract_entities_long``.
_MAX_WORDS = 384
_MOST_WORDS = 1 << 20


def gliner2_config(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """The encoder's config with GLiNER2's ``settings``, which config.json has; raises CheckpointError."""
    path = folder / ENCODER_FOLDER / "config.json"
    if (pooling := settings.get("token_pooling") or "first") != "first":
        raise CheckpointError(
            f"config.json has token_pooling = {pooling!r}; bei's GLiNER2 is computed with 'first' only: choose a model "
            "with that."
        )
    if not path.is_file():
        raise CheckpointError(
            f"{path} is missing: load the model with the gliner2 library and save it with save_pretrained, which "
            "writes the encoder's config beside the weights."
        )
    encoder = read_object(path)
    kind = encoder.get("model_type")
    if not isinstance(kind, str) or kind not in BY_ENCODER:
        raise CheckpointError(f"{path} has model_type = {kind!r}; bei builds GLiNER2 on {', '.join(BY_ENCODER)}.")
    rows, _ = stored_shape("embeddings.word.weight", BY_ENCODER[kind], folder)
    return {
        **encoder,
        "vocab_size": rows,  # the library takes those of the weights
        "model_type": MODEL_TYPE,
        ENCODER: kind,
        "architectures": [OF_BOUNDARIES if settings.get("architecture") == "boundary" else ARCHITECTURE],
        "gliner2": settings,
    }


def own_tokens(config: Any) -> tuple[str, ...]:
    """The tokens that the library adds to a tokenizer; none for other models."""
    return _TOKENS if hasattr(config, "gliner2") else ()


def extraction_of(spec: ModelSpec, config: Any, tokenizer: Tokenizer) -> Extraction | None:
    """How labels and texts are laid out for a model that scores spans, as the library's SchemaTransformer does it; None
    for others. Raises CheckpointError."""
    if spec.head("span_logits") is None:
        return None
    most = config.gliner2.get("max_len") or _MAX_WORDS
    if isinstance(most, bool) or not isinstance(most, int) or not 1 <= most <= _MOST_WORDS:
        raise CheckpointError(
            f"config.json has max_len = {most!r}: it must be a number of words from 1 to {_MOST_WORDS}."
        )
    is_of_boundaries = spec.architecture == OF_BOUNDARIES
    return Extraction(
        label_id=_token(_ENTITY, tokenizer),
        separator_id=_token(_SEPARATOR, tokenizer),
        reads_marker=True,
        max_width=most if is_of_boundaries else spec.dimensions["span_logits"],
        max_words=most,
        schema=_schema(_SPANS, spec, tokenizer),
        candidates=candidates_of(config) if is_of_boundaries else UNSET,
    )


def labelling_of(spec: ModelSpec, config: Any, tokenizer: Tokenizer) -> Labelling | None:
    """The same for a model that scores labels."""
    if spec.head("label_logits") is None:
        return None
    return Labelling(
        label_token=_LABEL,
        label_id=_token(_LABEL, tokenizer),
        separator_token=_SEPARATOR,
        text_first=False,
        reads_marker=True,
        schema=_schema(_CLASSES, spec, tokenizer),
    )


def _schema(task: str, spec: ModelSpec, tokenizer: Tokenizer) -> Schema:
    """What stands around the labels of ``task``: ``( [P] task ( [E] label [E] label ) ) [SEP_TEXT]``."""
    if spec.embeddings.type_vocab_size > 1:
        raise CheckpointError(f"{ENCODER_FOLDER} has token types, which bei's words do not read.")
    opening, closing = (
        tokenizer.encode([word], is_pretokenized=True, add_special_tokens=False).ids for word in ("(", ")")
    )
    for token in (DESCRIPTION, EXAMPLE, OUTPUT):
        _token(token, tokenizer)
    return Schema(
        task=task,
        opening=opening,
        closing=closing,
        part_id=_token(_PART, tokenizer),
        field_id=_token(_FIELD, tokenizer),
        relation_id=_token(_RELATION, tokenizer),
        between_id=_token(_BETWEEN, tokenizer),
        separator_id=_token(_SEPARATOR, tokenizer),
        num_counts=CountingSpec.num_counts,
    )


def _token(token: str, tokenizer: Tokenizer) -> int:
    index: int | None = tokenizer.token_to_id(token)
    if index is None:
        raise CheckpointError(
            f"The tokenizer has no token {token}, or the model no row for it: download the checkpoint again."
        )
    return index
