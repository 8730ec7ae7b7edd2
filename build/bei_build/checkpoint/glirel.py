"""GLiREL's checkpoints: glirel_config.json and weights, which the library's save_pretrained writes; the encoder's
config and tokenizer are those of the model that ``model_name`` names (``checkpoint.gliner_folder``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from bei.artifact.label_layouts import Extraction
from bei.errors import CheckpointError
from bei_build.checkpoint.gliner import encoder_config, has_tokenizer, max_words, token_ids
from bei_build.families.glirel import ARCHITECTURE, BY_ENCODER, ENCODER, MODEL_TYPE
from bei_build.files.json_settings import read_object
from bei_build.spec.model_spec import ModelSpec
from bei_build.weights.model_weights import stored_shape

FILE = "glirel_config.json"
_LABEL, _SEPARATOR = "[REL]", "[SEP]"
# The tokens that the library adds to a tokenizer without them, in its order.
_TOKENS = ("[FLERT]", _LABEL, _SEPARATOR, "[E]", "[/E]")


def glirel_config(folder: Path) -> dict[str, Any] | None:
    """The encoder's config with GLiREL's settings, as a config.json would have them; None: no GLiREL checkpoint.
    Raises CheckpointError."""
    path = folder / FILE
    if not path.is_file():
        return None
    settings = read_object(path)
    encoder = encoder_config(settings)
    if encoder is None:
        raise CheckpointError(
            f"{path} names the encoder {settings.get('model_name')!r}, whose config is not there: set model_name to a "
            "folder that holds it, or to a model of the hub."
        )
    kind = encoder.get("model_type")
    if not isinstance(kind, str) or kind not in BY_ENCODER:
        raise CheckpointError(
            f"{path} has an encoder of model_type {kind!r}; bei builds GLiREL on {', '.join(BY_ENCODER)}."
        )
    if not has_tokenizer(folder):
        raise CheckpointError(
            f"{folder} has no tokenizer: put the tokenizer's files of {settings.get('model_name')!r} beside {FILE}."
        )
    rows, _ = stored_shape("embeddings.word.weight", BY_ENCODER[kind], folder)  # after the library's tokens were added
    return {
        **encoder,
        "vocab_size": rows,
        "model_type": MODEL_TYPE,
        ENCODER: kind,
        "architectures": [ARCHITECTURE],
        "glirel": {key: value for key, value in settings.items() if key != "encoder_config"},
    }


def own_tokens(config: Any) -> tuple[str, ...]:
    """The tokens that the library adds to a tokenizer; none for other models."""
    return _TOKENS if hasattr(config, "glirel") else ()


def extraction_of(spec: ModelSpec, config: Any, tokenizer: Tokenizer) -> Extraction | None:
    """How labels and texts are laid out, and how many entities a text may have; None for a spec without scores. Raises
    CheckpointError."""
    if spec.head("span_logits") is None:
        return None
    if spec.embeddings.type_vocab_size > 1:
        raise CheckpointError(f"{FILE} has an encoder with token types, which bei's entities do not read.")
    most = max_words(FILE, config.glirel)
    ids = token_ids(FILE, {"label": _LABEL, "separator": _SEPARATOR}, tokenizer)
    return Extraction(
        label_id=ids["label"],
        separator_id=ids["separator"],
        reads_marker=config.glirel["label_embed_strategy"] != "label",
        max_width=most,
        max_words=most,
        max_entities=spec.dimensions["span_logits"],
    )
