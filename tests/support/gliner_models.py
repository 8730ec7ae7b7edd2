"""Random GLiNER checkpoints, as the gliner library's save_pretrained writes them (0.2.29), without the library."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer

from tests.support.checkpoints import (
    bpe_tokenizer,
    change_json,
    save_tokenizer,
    unigram_tokenizer,
    wordpiece_tokenizer,
    write_json,
)

ENCODERS: dict[str, Any] = {
    "deberta-v2": (
        "DebertaV2",
        unigram_tokenizer,
        {
            "relative_attention": True,
            "position_buckets": 16,
            "max_relative_positions": -1,
            "norm_rel_ebd": "layer_norm",
            "share_att_key": True,
            "pos_att_type": ["p2c", "c2p"],
            "position_biased_input": False,
            "type_vocab_size": 0,
        },
    ),
    "modernbert": ("ModernBert", bpe_tokenizer, {"pad_token_id": 1, "cls_token_id": 0, "sep_token_id": 2}),
    "bert": ("Bert", wordpiece_tokenizer, {}),
}
SHAPE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 512,
}
MAX_WIDTH = 5


def gliner_tokenizer(kind: str = "deberta-v2") -> Tokenizer:
    tokenizer: Tokenizer = ENCODERS[kind][1]()
    names = ("[FLERT]", "<<ENT>>", "<<SEP>>")
    tokenizer.add_tokens([AddedToken(name, normalized=True) for name in names])
    return tokenizer


def save_gliner(
    folder: Path,
    kind: str = "deberta-v2",
    *,
    width: int = 24,
    spread: float = 0.35,
    encoder: Mapping[str, Any] | None = None,
    labels: str | None = None,
    **settings: Any,
) -> Path:
    """A random model with an encoder of ``kind`` and spans of ``width`` numbers; ``settings`` of gliner_config.json.
    ``spread``: standard deviation of its matrices. ``encoder``: settings of its config. ``labels``: the kind of its
    encoder of labels; None: labels stand in front of texts."""
    tokenizer = ENCODERS[kind][1]() if labels else gliner_tokenizer(kind)
    vocab_size = tokenizer.get_vocab_size()
    config = _config(kind, vocab_size, **(encoder or {}))
    if labels:
        of_labels = ENCODERS[labels][1]()
        labels_config = _config(labels, of_labels.get_vocab_size(), hidden_size=40)
        (folder / "labels_tokenizer").mkdir(parents=True)
        save_tokenizer(folder / "labels_tokenizer", of_labels)
        pad = next(token for token in ("[PAD]", "<pad>") if of_labels.token_to_id(token) is not None)
        change_json(folder / "labels_tokenizer" / "tokenizer_config.json", pad_token=pad)
        settings = {
            "model_type": "gliner_bi_encoder_span",
            "labels_encoder": f"random/{labels}",
            "labels_encoder_config": labels_config.to_dict(),
            "class_token_index": -1,
            "vocab_size": -1,
            **settings,
        }
    settings = {
        "model_type": "gliner_uni_encoder_span",
        "model_name": f"random/{kind}",
        "hidden_size": width,
        "max_width": MAX_WIDTH,
        "max_len": 40,
        "num_rnn_layers": 1,
        "span_mode": "markerV0",
        "subtoken_pooling": "first",
        "embed_ent_token": True,
        "ent_token": "<<ENT>>",
        "sep_token": "<<SEP>>",
        "vocab_size": vocab_size,
        "class_token_index": tokenizer.token_to_id("<<ENT>>"),
        **settings,
    }
    with torch.random.fork_rng():
        torch.manual_seed(39)
        tensors = _named("token_rep_layer.bert_layer.model", _model(kind, config))
        if config.hidden_size != width:
            tensors |= _named("token_rep_layer.projection", torch.nn.Linear(config.hidden_size, width))
        if labels:
            tensors |= _named("token_rep_layer.labels_encoder.model", _model(labels, labels_config))
            if labels_config.hidden_size != width:
                tensors |= _named(
                    "token_rep_layer.labels_projection", torch.nn.Linear(labels_config.hidden_size, width)
                )
        if layers := settings["num_rnn_layers"]:
            tensors |= _named("rnn.lstm", torch.nn.LSTM(width, width // 2, layers, bidirectional=True))
        tensors |= _of_words(width) if settings["span_mode"] == "token_level" else _of_spans(width)
        # So wide that scores differ, and no wider: equal scores near 1 would be ranked by their rounding.
        tensors = {
            name: torch.randn_like(value) * spread if value.ndim > 1 else value for name, value in tensors.items()
        }
        if settings["span_mode"] == "token_level":
            tensors["scorer.out_mlp.3.weight"] *= 0.02
        else:
            tensors["prompt_rep_layer.3.weight"] *= 0.001 if labels else 0.02
            if labels:  # else all labels would score nearly the same
                tensors["prompt_rep_layer.3.bias"] *= 0.0
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: value.detach().contiguous() for name, value in tensors.items()}, folder / "model.safetensors")
    write_json(folder / "gliner_config.json", {**settings, "encoder_config": config.to_dict()})
    save_tokenizer(folder, tokenizer)
    change_json(folder / "tokenizer_config.json", pad_token="<pad>")  # the library pads
    return folder


def _config(kind: str, vocab_size: int, **settings: Any) -> Any:
    prefix, _, own = ENCODERS[kind]
    return getattr(transformers, f"{prefix}Config")(**{**SHAPE, **own, "vocab_size": vocab_size, **settings})


def _model(kind: str, config: Any) -> torch.nn.Module:
    model: torch.nn.Module = getattr(transformers, f"{ENCODERS[kind][0]}Model")(config)
    return model


def _of_spans(width: int) -> dict[str, torch.Tensor]:
    places = (("project_start", 1), ("project_end", 1), ("out_project", 2))
    tensors: dict[str, torch.Tensor] = {}
    for place, entering in places:
        tensors |= _mlp(f"span_rep_layer.span_rep_layer.{place}", entering * width, width)
    return tensors | _mlp("prompt_rep_layer", width, width)


def _of_words(width: int) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for part in ("proj_token", "proj_label"):
        tensors |= _named(f"scorer.{part}", torch.nn.Linear(width, 2 * width))
    return tensors | _mlp("scorer.out_mlp", 3 * width, width, 3)


def _named(prefix: str, module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {f"{prefix}.{name}": value for name, value in module.state_dict().items()}


def _mlp(prefix: str, entering: int, width: int, leaving: int | None = None) -> dict[str, torch.Tensor]:
    """Two linear layers; ReLU and dropout between them have no tensors."""
    first, second = torch.nn.Linear(entering, 4 * width), torch.nn.Linear(4 * width, leaving or width)
    return {**_named(f"{prefix}.0", first), **_named(f"{prefix}.3", second)}
