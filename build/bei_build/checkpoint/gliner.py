"""GLiNER's checkpoints: gliner_config.json, which has the encoder's config inside, and no config.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from bei.artifact.manifest import Extraction
from bei.errors import CheckpointError
from bei_build.families.gliner import ARCHITECTURE, ENCODERS, MODEL_TYPE
from bei_build.files.json_settings import read_object
from bei_build.spec.model_spec import ModelSpec

FILE = "gliner_config.json"
_KINDS = ("gliner", "gliner_uni_encoder_span")  # of versions before 0.2.23, and since
_DEFAULTS: Mapping[str, object] = {
    "max_len": 384,
    "embed_ent_token": True,
    "ent_token": "<<ENT>>",
    "sep_token": "<<SEP>>",
}
_MOST_WORDS = 1 << 20


def gliner_config(folder: Path) -> dict[str, Any] | None:
    """The encoder's config with GLiNER's settings, as a config.json would have them; None: no GLiNER checkpoint.

    Raises CheckpointError for kinds of GLiNER that are not built, and for files without the encoder's config.
    """
    path = folder / FILE
    if not path.is_file():
        return None
    settings = read_object(path)
    kind = settings.get("model_type", "gliner")
    other = next((key for key in _OTHERS if settings.get(key)), None)
    if kind not in _KINDS or settings.get("span_mode") == "token_level" or other:
        raise CheckpointError(
            f"{path} describes a GLiNER of another kind ({other or settings.get('span_mode')}, {kind}); bei builds "
            "those that score spans, with one encoder for labels and text (UniEncoderSpanGLiNER)."
        )
    encoder = settings.get("encoder_config")
    if not isinstance(encoder, dict):
        raise CheckpointError(
            f"{path} has no encoder_config: the encoder would have to be downloaded ({settings.get('model_name')!r}). "
            "Load the model with the gliner library and save it with save_pretrained, which writes config and "
            "tokenizer beside the weights."
        )
    if encoder.get("model_type") not in ENCODERS:
        raise CheckpointError(
            f"{path} has an encoder of model_type {encoder.get('model_type')!r}; bei reads {', '.join(ENCODERS)}."
        )
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        raise CheckpointError(
            f"{folder} has no tokenizer. Load the model with the gliner library and save it with save_pretrained."
        )
    own = {key: value for key, value in settings.items() if key != "encoder_config"}
    vocab_size = settings.get("vocab_size")
    if isinstance(vocab_size, int) and vocab_size > 0:  # after its own tokens were added
        encoder = {**encoder, "vocab_size": vocab_size}
    return {
        **encoder,
        "model_type": MODEL_TYPE,
        "encoder_model_type": encoder["model_type"],
        "architectures": [ARCHITECTURE],
        "gliner": own,
    }


# Keys of the library's other models.
_OTHERS = ("labels_encoder", "labels_decoder", "relations_layer")
_TOKENIZERS = ("tokenizer.json", "spm.model", "vocab.txt")


def extraction_of(spec: ModelSpec, config: Any, tokenizer: Tokenizer) -> Extraction | None:
    """How labels and texts are laid out for a model that scores spans; None for others. Raises CheckpointError."""
    head = spec.head("span_logits")
    if head is None:
        return None
    if spec.embeddings.type_vocab_size > 1:
        raise CheckpointError(f"{FILE} has an encoder with token types, which bei's spans do not read.")
    settings = {**_DEFAULTS, **config.gliner}
    most = settings["max_len"]
    if isinstance(most, bool) or not isinstance(most, int) or not 1 <= most <= _MOST_WORDS:
        raise CheckpointError(f"{FILE} has max_len = {most!r}: it must be a number of words from 1 to {_MOST_WORDS}.")
    ids: dict[str, int] = {}
    for key in ("ent_token", "sep_token"):
        token = settings[key]
        index = tokenizer.token_to_id(token) if isinstance(token, str) else None
        if index is None:
            raise CheckpointError(f"{FILE} has {key} = {token!r}, which is no token of the tokenizer.")
        ids[key] = index
    index = settings.get("class_token_index", -1)
    if index not in (-1, ids["ent_token"]):
        raise CheckpointError(
            f"{FILE} has class_token_index = {index!r}, and the tokenizer has {settings['ent_token']!r} at "
            f"{ids['ent_token']}: they are not of one checkpoint."
        )
    return Extraction(
        label_id=ids["ent_token"],
        separator_id=ids["sep_token"],
        reads_marker=bool(settings["embed_ent_token"]),
        max_width=spec.dimensions["span_logits"],
        max_words=most,
    )
