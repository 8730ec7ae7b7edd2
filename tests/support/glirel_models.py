"""Random GLiREL checkpoints, as the glirel library's save_pretrained writes them (1.2.1), without the library: settings
and weights, and in a folder of its own the encoder that the settings name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer

from tests.support.checkpoints import change_json, save_tokenizer, write_json
from tests.support.gliner_models import ENCODERS, SHAPE, encoder_config, encoder_model, mlp, named

TOKENS = ("[FLERT]", "[REL]", "[SEP]", "[E]", "[/E]")
MAX_WORDS = 40


def glirel_tokenizer(kind: str = "deberta-v2") -> Tokenizer:
    """As the library makes it of the encoder's."""
    tokenizer: Tokenizer = ENCODERS[kind][1]()
    tokenizer.add_tokens([AddedToken(name, normalized=True) for name in TOKENS])
    return tokenizer


def save_glirel(
    folder: Path,
    kind: str = "deberta-v2",
    *,
    width: int = 24,
    spread: float = 0.35,
    factor: float = 0.05,
    **settings: Any,
) -> Path:
    """A random model with an encoder of ``kind`` and pairs of ``width`` numbers; ``settings`` of glirel_config.json.
    ``spread``: standard deviation of its matrices, times ``factor`` of those whose products are scores."""
    encoder, tokenizer = Path(f"{folder}-encoder"), ENCODERS[kind][1]()
    vocab_size = tokenizer.get_vocab_size()
    with torch.random.fork_rng():
        torch.manual_seed(39)
        model = encoder_model(kind, encoder_config(kind, vocab_size))
        _save_encoder(encoder, model, tokenizer)
        model = encoder_model(kind, encoder_config(kind, glirel_tokenizer(kind).get_vocab_size()))
        tensors = named("token_rep_layer.bert_layer.model", model)
        if SHAPE["hidden_size"] != width:
            tensors |= named("token_rep_layer.projection", torch.nn.Linear(SHAPE["hidden_size"], width))
        tensors |= named("rnn.lstm", torch.nn.LSTM(width, width // 2, bidirectional=True))
        pairs = "span_rep_layer.rel_rep_layer"
        for place, entering in (("project_start", width), ("project_end", width), ("out_project", 2 * width)):
            tensors |= mlp(f"{pairs}.span_marker.{place}", entering, width)
        tensors |= mlp(f"{pairs}.out_project", 2 * width, width) | mlp("prompt_rep_layer", width, width)
        tensors = {
            name: torch.randn_like(value) * spread if value.ndim > 1 else value for name, value in tensors.items()
        }
        for module in (f"{pairs}.out_project", "prompt_rep_layer"):  # so that scores are not near 0 and 1
            tensors[f"{module}.3.weight"] *= factor
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(tensors, folder / "pytorch_model.bin")
    write_json(
        folder / "glirel_config.json",
        {
            "model_name": str(encoder),
            "hidden_size": width,
            "max_width": 12,
            "max_len": MAX_WORDS,
            "fine_tune": True,
            "dropout": 0.4,
            "subtoken_pooling": "first",
            "rel_mode": "marker",
            "span_marker_mode": "markerv1",
            "label_embed_strategy": "both",
            "scorer": "dot",
            "refine_prompt": False,
            "refine_relation": False,
            "ffn_mul": 4,
            "fixed_relation_types": True,
            "max_entity_pair_distance": None,
            **settings,
        },
    )
    return folder


def _save_encoder(folder: Path, model: Any, tokenizer: Tokenizer) -> None:
    model.save_pretrained(folder)
    save_tokenizer(folder, tokenizer)
    change_json(folder / "tokenizer_config.json", pad_token="<pad>")  # the library pads
