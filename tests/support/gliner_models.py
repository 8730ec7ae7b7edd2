"""Random GLiNER checkpoints, as the gliner library's save_pretrained writes them (0.2.29), without the library."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, processors

from tests.support.checkpoints import (
    bpe_tokenizer,
    change_json,
    save_tokenizer,
    unigram_tokenizer,
    wordpiece_tokenizer,
    write_json,
)


def ending_tokenizer() -> Tokenizer:
    """As T5's: no token in front of a text."""
    tokenizer = unigram_tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 2)]
    )
    return tokenizer


_T5 = {
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
}
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
    "t5": ("T5", ending_tokenizer, _T5),
    "mt5": ("MT5", ending_tokenizer, {**_T5, "feed_forward_proj": "gated-gelu"}),
    "eurobert": (
        "EuroBert",
        bpe_tokenizer,
        {"num_key_value_heads": 2, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2},
    ),
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
    config = encoder_config(kind, vocab_size, **(encoder or {}))
    if labels:
        of_labels = ENCODERS[labels][1]()
        labels_config = encoder_config(labels, of_labels.get_vocab_size(), hidden_size=40)
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
        tensors = named("token_rep_layer.bert_layer.model", encoder_model(kind, config))
        if config.hidden_size != width:
            tensors |= named("token_rep_layer.projection", torch.nn.Linear(config.hidden_size, width))
        if labels:
            tensors |= named("token_rep_layer.labels_encoder.model", encoder_model(labels, labels_config))
            if labels_config.hidden_size != width:
                tensors |= named("token_rep_layer.labels_projection", torch.nn.Linear(labels_config.hidden_size, width))
        if layers := settings["num_rnn_layers"]:
            tensors |= named("rnn.lstm", torch.nn.LSTM(width, width // 2, layers, bidirectional=True))
        tensors |= (
            _of_words(width) if settings["span_mode"] == "token_level" else _of_spans(width, settings["span_mode"])
        )
        # So wide that scores differ, and no wider: equal scores near 1 would be ranked by their rounding.
        tensors = {
            name: torch.randn_like(value) * spread if value.ndim > 1 else value for name, value in tensors.items()
        }
        tensors = with_one_table(tensors)
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


def encoder_config(kind: str, vocab_size: int, **settings: Any) -> Any:
    """The config of a small encoder of ``kind``."""
    prefix, _, own = ENCODERS[kind]
    return getattr(transformers, f"{prefix}Config")(**{**SHAPE, **own, "vocab_size": vocab_size, **settings})


def encoder_model(kind: str, config: Any) -> torch.nn.Module:
    """The encoder of ``config``, of which libraries read that of T5 alone."""
    suffix = "EncoderModel" if kind in ("t5", "mt5") else "Model"
    model: torch.nn.Module = getattr(transformers, f"{ENCODERS[kind][0]}{suffix}")(config)
    return model


def with_one_table(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """``tensors``, in which both names of T5's word table are those of one."""
    tables = {name: name.replace("encoder.embed_tokens.", "shared.") for name in tensors}
    return {name: tensors[table if table in tensors else name].clone() for name, table in tables.items()}


def _of_spans(width: int, mode: str) -> dict[str, torch.Tensor]:
    layer, is_linear = "span_rep_layer.span_rep_layer", mode == "marker"
    tensors: dict[str, torch.Tensor] = {}
    for place in ("project_start", "project_end"):
        tensors |= mlp(f"{layer}.{place}", width, width, inner=2 * width if is_linear else None)
    if is_linear:
        tensors |= named(f"{layer}.out_project", torch.nn.Linear(2 * width, width))
    else:
        tensors |= mlp(f"{layer}.out_project", 2 * width, width)
    return tensors | mlp("prompt_rep_layer", width, width)


def _of_words(width: int) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for part in ("proj_token", "proj_label"):
        tensors |= named(f"scorer.{part}", torch.nn.Linear(width, 2 * width))
    return tensors | mlp("scorer.out_mlp", 3 * width, width, 3)


def named(prefix: str, module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {f"{prefix}.{name}": value for name, value in module.state_dict().items()}


def mlp(
    prefix: str, entering: int, width: int, leaving: int | None = None, inner: int | None = None
) -> dict[str, torch.Tensor]:
    """Two linear layers; ReLU and dropout between them have no tensors."""
    inner = inner or 4 * width
    first, second = torch.nn.Linear(entering, inner), torch.nn.Linear(inner, leaving or width)
    return {**named(f"{prefix}.0", first), **named(f"{prefix}.3", second)}
