"""Random GLiNER2 checkpoints, as the gliner2 library's save_pretrained writes them (2.1.0), without the library."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer
from torch import nn

from tests.support.checkpoints import change_json, save_tokenizer, write_json
from tests.support.gliner_models import ENCODERS, SHAPE

TOKENS = (
    *("[SEP_STRUCT]", "[SEP_TEXT]", "[P]", "[C]", "[E]", "[R]", "[L]"),
    *("[EXAMPLE]", "[OUTPUT]", "[DESCRIPTION]"),
)
MAX_WIDTH = 5
_COUNTS = 20
_INNER = 128


def gliner2_tokenizer(kind: str = "deberta-v2") -> Tokenizer:
    tokenizer: Tokenizer = ENCODERS[kind][1]()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in TOKENS])
    return tokenizer


def save_gliner2(
    folder: Path,
    kind: str = "deberta-v2",
    *,
    spread: float = 0.2,
    none: float = 0.0,
    counts: Mapping[int, float] | None = None,
    encoder: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Path:
    """A random model with an encoder of ``kind``; ``settings`` of config.json. ``spread``: standard deviation of its
    matrices. ``none``: what is added to its score of a count of 0. ``counts``: to those of others.
    ``encoder``: settings of its config."""
    prefix, _, own = ENCODERS[kind]
    tokenizer = gliner2_tokenizer(kind)
    shape = {**SHAPE, **own, **(encoder or {}), "vocab_size": tokenizer.get_vocab_size()}
    width = shape["hidden_size"]
    config = getattr(transformers, f"{prefix}Config")(**shape)
    settings = {
        "model_type": "extractor",
        "model_name": f"random/{kind}",
        "counting_layer": "count_lstm",
        "max_width": MAX_WIDTH,
        "token_pooling": "first",
        "max_len": 40,
        **settings,
    }
    with torch.random.fork_rng():
        torch.manual_seed(39)
        modules: dict[str, nn.Module] = {
            "encoder": getattr(transformers, f"{prefix}Model")(config),
            "classifier": _mlp(width, 2 * width, 1),
            "count_pred": _mlp(width, 2 * width, _COUNTS),
            "count_embed.pos_embedding": nn.Embedding(_COUNTS, width),
            "count_embed.gru": nn.GRU(width, width),
        }
        for part, entering in (("project_start", width), ("project_end", width), ("out_project", 2 * width)):
            modules[f"span_rep.span_rep_layer.{part}"] = nn.Sequential(
                nn.Linear(entering, 4 * width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(4 * width, width)
            )
        if settings["counting_layer"] == "count_lstm":
            modules["count_embed.projector"] = _mlp(2 * width, 4 * width, width)
        else:
            layer = nn.TransformerEncoderLayer(_INNER, 4, 2 * _INNER, batch_first=True)
            modules["count_embed.transformer.in_projector"] = nn.Linear(width, _INNER)
            modules["count_embed.transformer.transformer"] = nn.TransformerEncoder(layer, 2)
            modules["count_embed.transformer.out_projector"] = _mlp(_INNER + width, width, width, width)
        tensors = {
            f"{place}.{name}": torch.randn_like(value) * spread if value.ndim > 1 else value
            for place, module in modules.items()
            for name, value in module.state_dict().items()
        }
        # So that scores are not near 0 and 1, where they would be equal.
        for name in ("weight", "bias"):
            tensors[f"span_rep.span_rep_layer.out_project.3.{name}"] *= 0.02
        tensors["count_pred.2.bias"][0] += none
        for count, added in (counts or {}).items():
            tensors["count_pred.2.bias"][count] += added
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: value.detach().contiguous() for name, value in tensors.items()}, folder / "model.safetensors")
    write_json(folder / "config.json", settings)
    (folder / "encoder_config").mkdir(exist_ok=True)
    write_json(folder / "encoder_config" / "config.json", config.to_dict())
    save_tokenizer(folder, tokenizer)
    # The library pads, and looks tokens up by their spelling.
    unknown = {"unk_token": "<unk>"} if tokenizer.token_to_id("<unk>") is not None else {}
    change_json(folder / "tokenizer_config.json", pad_token="<pad>", **unknown)
    return folder


def _mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for entering, leaving in pairwise(widths):
        layers += [nn.Linear(entering, leaving), nn.ReLU()]
    return nn.Sequential(*layers[:-1])
