"""GLiNER's checkpoints: gliner_config.json, which has the encoder's config inside, and no config.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from bei.artifact.label_layouts import Extraction
from bei.errors import CheckpointError
from bei.tokenizer.special_tokens import layout_of
from bei_build.families.gliner import (
    ARCHITECTURE,
    BI_ARCHITECTURE,
    BI_WORDS_ARCHITECTURE,
    BY_ENCODER,
    MODEL_TYPE,
    TOKEN_LEVEL,
    WORDS_ARCHITECTURE,
    has_two_encoders,
    scores_words,
    width_of,
)
from bei_build.files.json_settings import read_object
from bei_build.spec.model_spec import ModelSpec
from bei_build.weights.model_weights import stored_shape

FILE = "gliner_config.json"
# By the number of encoders; the first of each is that of versions before 0.2.23.
_KINDS = {
    1: ("gliner", "gliner_uni_encoder_span", TOKEN_LEVEL[0]),
    2: ("gliner", "gliner_bi_encoder_span", TOKEN_LEVEL[1]),
}
_ARCHITECTURES = {1: (ARCHITECTURE, WORDS_ARCHITECTURE), 2: (BI_ARCHITECTURE, BI_WORDS_ARCHITECTURE)}
_DEFAULTS: Mapping[str, object] = {
    "max_len": 384,
    "embed_ent_token": True,
    "ent_token": "<<ENT>>",
    "sep_token": "<<SEP>>",
}
_MOST_WORDS = 1 << 20
# microsoft's DeBERTa v3 (arXiv:2111.09543), by name, as their config.json have them: layers, width, heads, width of the
# MLP. The weights confirm all but the heads, which are 64 wide in each.
_BACKBONES = {
    "microsoft/deberta-v3-xsmall": (12, 384, 6, 1536),
    "microsoft/deberta-v3-small": (6, 768, 12, 3072),
    "microsoft/deberta-v3-base": (12, 768, 12, 3072),
    "microsoft/deberta-v3-large": (24, 1024, 16, 4096),
    "microsoft/mdeberta-v3-base": (12, 768, 12, 3072),
}


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
    num_encoders = 1 + has_two_encoders(settings)
    if kind not in _KINDS[num_encoders] or other:
        raise CheckpointError(
            f"{path} describes a GLiNER of another kind ({other or settings.get('span_mode')}, {kind}); with "
            f"{num_encoders} encoder{'s' * (num_encoders - 1)} bei builds {' and '.join(_ARCHITECTURES[num_encoders])}."
        )
    encoder = encoder_config(settings)
    if encoder is None:
        raise CheckpointError(
            f"{path} has no encoder_config, and model_name is {settings.get('model_name')!r}; bei knows the configs of "
            f"{', '.join(_BACKBONES)}. Load the model with the gliner library and save it with save_pretrained, which "
            "writes config and tokenizer beside the weights."
        )
    family = BY_ENCODER.get(str(encoder.get("model_type")))
    if family is None:
        raise CheckpointError(
            f"{path} has an encoder of model_type {encoder.get('model_type')!r}; bei reads {', '.join(BY_ENCODER)}."
        )
    if not has_tokenizer(folder):
        raise CheckpointError(
            f"{folder} has no tokenizer. Load the model with the gliner library and save it with save_pretrained, or "
            f"put the tokenizer's files of {settings.get('model_name')!r} beside {FILE} (spm.model, "
            "tokenizer_config.json)."
        )
    own = {key: value for key, value in settings.items() if key != "encoder_config"}
    vocab_size = settings.get("vocab_size") if num_encoders == 1 else None  # tables of two encoders are not resized
    if isinstance(vocab_size, int) and vocab_size > 0:  # after its own tokens were added
        encoder = {**encoder, "vocab_size": vocab_size}
    elif "vocab_size" not in encoder:
        rows, _ = stored_shape("embeddings.word.weight", family, folder)
        encoder = {**encoder, "vocab_size": rows}
    return {
        **encoder,
        "model_type": MODEL_TYPE,
        "encoder_model_type": encoder["model_type"],
        "architectures": [_ARCHITECTURES[num_encoders][scores_words(settings)]],
        "gliner": own,
    }


def has_tokenizer(folder: Path) -> bool:
    """True for a folder with the encoder's tokenizer."""
    return any((folder / name).is_file() for name in _TOKENIZERS)


def encoder_config(settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """The encoder's config that ``settings`` have, or the one that is known here by its name; None: neither."""
    found = settings.get("encoder_config") or _backbone(settings.get("model_name"))
    return found if isinstance(found, dict) else None


def _backbone(name: object) -> dict[str, Any] | None:
    """The config of a known encoder, but for its vocabulary, to which the library adds tokens."""
    if not isinstance(name, str) or name not in _BACKBONES:
        return None
    layers, width, heads, inner = _BACKBONES[name]
    return {
        "model_type": "deberta-v2",
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "intermediate_size": inner,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-7,
        "max_position_embeddings": 512,
        "position_buckets": 256,
        "relative_attention": True,
        "max_relative_positions": -1,
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
        "pos_att_type": ["p2c", "c2p"],
        "position_biased_input": False,
        "type_vocab_size": 0,
    }


def own_tokens(config: Any) -> tuple[str, ...]:
    """The tokens that the gliner library adds to a tokenizer without them, in its order; none where labels have an
    encoder of their own, and for other models."""
    settings = getattr(config, "gliner", None)
    if settings is None or has_two_encoders(settings):
        return ()
    named = [settings.get(key, _DEFAULTS[key]) for key in ("ent_token", "sep_token")]
    return tuple(token for token in ("[FLERT]", *named) if isinstance(token, str))


def max_words(file: str, settings: Mapping[str, Any]) -> int:
    """Words that a model reads at once, by ``settings`` of ``file``. Raises CheckpointError."""
    most = settings.get("max_len", _DEFAULTS["max_len"])
    if isinstance(most, bool) or not isinstance(most, int) or not 1 <= most <= _MOST_WORDS:
        raise CheckpointError(f"{file} has max_len = {most!r}: it must be a number of words from 1 to {_MOST_WORDS}.")
    return most


def token_ids(file: str, tokens: Mapping[str, object], tokenizer: Tokenizer) -> dict[str, int]:
    """The ids of ``tokens``, by the keys that ``file`` has for them. Raises CheckpointError."""
    ids: dict[str, int] = {}
    for key, token in tokens.items():
        index = tokenizer.token_to_id(token) if isinstance(token, str) else None
        if index is None:
            raise CheckpointError(f"{file} has {key} = {token!r}, which is no token of the tokenizer.")
        ids[key] = index
    return ids


# Keys of the library's other models.
_OTHERS = ("labels_decoder", "relations_layer")
_TOKENIZERS = ("tokenizer.json", "spm.model", "vocab.txt")


def extraction_of(spec: ModelSpec, config: Any, tokenizer: Tokenizer) -> Extraction | None:
    """How labels and texts are laid out for a model that scores spans; None for others. Raises CheckpointError."""
    head = spec.head("span_logits")
    if head is None:
        return None
    if spec.embeddings.type_vocab_size > 1:
        raise CheckpointError(f"{FILE} has an encoder with token types, which bei's spans do not read.")
    settings = {**_DEFAULTS, **config.gliner}
    most = max_words(FILE, settings)
    by_word = scores_words(settings)
    max_width = most if by_word else spec.dimensions["span_logits"]
    if has_two_encoders(settings):
        if layout_of(tokenizer, 1, with_special=True).pieces[0].text is not None:
            raise CheckpointError(
                f"The tokenizer beside {FILE} puts no token in front of a text, and bei notes words without tokens at "
                "it: such models are not supported."
            )
        return Extraction(
            label_id=-1,
            separator_id=-1,
            reads_marker=False,
            max_width=max_width,
            max_words=most,
            by_word=by_word,
            label_width=width_of(settings),
        )
    ids = token_ids(FILE, {key: settings[key] for key in ("ent_token", "sep_token")}, tokenizer)
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
        max_width=max_width,
        max_words=most,
        by_word=by_word,
    )
