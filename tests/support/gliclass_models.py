"""Random GLiClass checkpoints, as the gliclass library's save_pretrained writes them, without the library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer

from tests.support.checkpoints import change_json, save_tokenizer, write_json
from tests.support.gliner_models import ENCODERS, SHAPE, encoder_config, encoder_model, with_one_table

TOKENS = ("<<LABEL>>", "<<SEP>>")


def gliclass_tokenizer(kind: str = "deberta-v2") -> Tokenizer:
    tokenizer: Tokenizer = ENCODERS[kind][1]()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in TOKENS])
    return tokenizer


def save_gliclass(folder: Path, kind: str = "deberta-v2", *, spread: float = 0.2, **settings: Any) -> Path:
    """A random model with an encoder of ``kind``; ``settings`` of its config.json. ``spread``: standard deviation of
    its matrices."""
    tokenizer = gliclass_tokenizer(kind)
    vocab_size, width = tokenizer.get_vocab_size(), SHAPE["hidden_size"]
    encoder = encoder_config(kind, vocab_size)
    settings = {
        "architectures": ["GLiClassModel"],
        "model_type": "GLiClass",
        "architecture_type": "uni-encoder",
        "encoder_model_name": f"random/{kind}",
        "hidden_size": width,
        "vocab_size": vocab_size,
        "class_token_index": tokenizer.token_to_id(TOKENS[0]),
        "text_token_index": tokenizer.token_to_id(TOKENS[1]),
        "pooling_strategy": "first",
        "scorer_type": "simple",
        "prompt_first": True,
        "normalize_features": False,
        "embed_class_token": True,
        **settings,
    }
    with torch.random.fork_rng():
        torch.manual_seed(39)
        tensors = _of_encoder(encoder_model(kind, encoder))
        for module in ("text_projector", "classes_projector"):
            tensors |= _named(f"{module}.linear_1", width, width) | _named(f"{module}.linear_2", width, width)
        tensors |= _scorer(settings["scorer_type"], width)
        tensors = {
            name: torch.randn_like(value) * spread if value.ndim > 1 else value for name, value in tensors.items()
        }
        tensors = with_one_table(tensors)
    tensors["model.logit_scale"] = torch.tensor(2.6592)
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: value.detach().contiguous() for name, value in tensors.items()}, folder / "model.safetensors")
    write_json(folder / "config.json", {**settings, "encoder_config": encoder.to_dict()})
    save_tokenizer(folder, tokenizer)
    change_json(folder / "tokenizer_config.json", pad_token="<pad>")  # the library pads
    return folder


def _of_encoder(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {f"model.encoder_model.{name}": value for name, value in model.state_dict().items()}


def _scorer(kind: str, width: int, inner: int = 256) -> dict[str, torch.Tensor]:
    if kind == "weighted-dot":
        rows = _named("scorer.proj_text", width, 2 * width) | _named("scorer.proj_label", width, 2 * width)
        return rows | _named("scorer.out_mlp.0", 3 * width, 4 * width) | _named("scorer.out_mlp.3", 4 * width, 1)
    if kind == "mlp":
        first = _named("scorer.mlp.0", 2 * width, inner) | _named("scorer.mlp.2", inner, inner // 2)
        return first | _named("scorer.mlp.4", inner // 2, 1)
    return {}


def _named(module: str, entering: int, leaving: int) -> dict[str, torch.Tensor]:
    linear = torch.nn.Linear(entering, leaving)
    return {f"model.{module}.{name}": value for name, value in linear.state_dict().items()}
