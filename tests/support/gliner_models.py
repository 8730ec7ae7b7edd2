"""Random GLiNER checkpoints, as the gliner library's save_pretrained writes them (0.2.29), without the library."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer

from tests.support.checkpoints import bpe_tokenizer, change_json, save_tokenizer, unigram_tokenizer, write_json

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
    **settings: Any,
) -> Path:
    """A random model with an encoder of ``kind`` and spans of ``width`` numbers; ``settings`` of gliner_config.json.
    ``spread``: standard deviation of its matrices. ``encoder``: settings of its config."""
    prefix, _, own = ENCODERS[kind]
    tokenizer = gliner_tokenizer(kind)
    vocab_size = tokenizer.get_vocab_size()
    config = getattr(transformers, f"{prefix}Config")(**{**SHAPE, **own, "vocab_size": vocab_size, **(encoder or {})})
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
        model = getattr(transformers, f"{prefix}Model")(config)
        tensors = {f"token_rep_layer.bert_layer.model.{name}": value for name, value in model.state_dict().items()}
        if config.hidden_size != width:
            tensors |= _named("token_rep_layer.projection", torch.nn.Linear(config.hidden_size, width))
        if layers := settings["num_rnn_layers"]:
            tensors |= _named("rnn.lstm", torch.nn.LSTM(width, width // 2, layers, bidirectional=True))
        tensors |= _of_words(width) if settings["span_mode"] == "token_level" else _of_spans(width)
        # So wide that scores differ, and no wider: equal scores near 1 would be ranked by their rounding.
        tensors = {
            name: torch.randn_like(value) * spread if value.ndim > 1 else value for name, value in tensors.items()
        }
        tensors[
            "scorer.out_mlp.3.weight" if settings["span_mode"] == "token_level" else "prompt_rep_layer.3.weight"
        ] *= 0.02
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: value.detach().contiguous() for name, value in tensors.items()}, folder / "model.safetensors")
    write_json(folder / "gliner_config.json", {**settings, "encoder_config": config.to_dict()})
    save_tokenizer(folder, tokenizer)
    change_json(folder / "tokenizer_config.json", pad_token="<pad>")  # the library pads
    return folder


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
