"""Random OpenDecider-nano checkpoints, as its code reads them (0.9.0), and their probabilities computed in torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import nn
from transformers import ModernBertModel

from tests.support.checkpoints import bpe_tokenizer, change_json, save_tokenizer, write_json
from tests.support.gliner_models import encoder_config, encoder_model


def head_of(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width), nn.Linear(width, 1))


def save_opendecider(folder: Path, *, spread: float = 0.2, length: int = 2048, **settings: Any) -> Path:
    """A random model; ``settings`` of opendecider.json. ``spread``: standard deviation of its matrices. ``length``: the
    longest text of its encoder."""
    tokenizer = bpe_tokenizer()
    config = encoder_config(
        "modernbert",
        tokenizer.get_vocab_size(),
        num_hidden_layers=4,
        local_attention=16,
        max_position_embeddings=length,
    )
    with torch.random.fork_rng():
        torch.manual_seed(40)
        model, head = encoder_model("modernbert", config), head_of(config.hidden_size)
        for name, value in (*model.named_parameters(), *head.named_parameters()):
            is_norm = value.ndim == 1 and name.endswith("weight")
            value.data = torch.randn_like(value) * (spread if value.ndim > 1 else 0.1) + is_norm
    model.save_pretrained(folder)  # type: ignore[operator]
    save_file(head.state_dict(), folder / "head.safetensors")
    save_tokenizer(folder, tokenizer)
    named = {"cls_token": "<s>", "sep_token": "</s>", "mask_token": "<mask>", "pad_token": "<pad>"}
    change_json(folder / "tokenizer_config.json", model_input_names=["input_ids", "attention_mask"], **named)
    write_json(folder / "opendecider.json", {"kind": "nano", "name": "random", "max_len": 512, **settings})
    return folder


class OpenDeciderReference:
    """The model of ``folder`` by transformers' ModernBERT and torch's layers."""

    def __init__(self, folder: Path) -> None:
        encoder: Any = ModernBertModel.from_pretrained(folder, dtype=torch.float32)
        self._encoder = encoder.eval()
        self._head = head_of(self._encoder.config.hidden_size).eval()
        self._head.load_state_dict(load_file(folder / "head.safetensors"))
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.encode_special_tokens = True

    def _ids(self, text: str) -> list[int]:
        found: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return found

    def logits(self, text: str, instructions: str, options: Mapping[str, str | None]) -> dict[str, float]:
        """Of each option in the order given."""
        start, end, mark = (self._tokenizer.token_to_id(token) for token in ("<s>", "</s>", "<mask>"))
        ids, places = [start, *self._ids(f"question: {instructions}"), end], []
        for name, said in options.items():
            places.append(len(ids))
            ids += [mark, *self._ids(f" {name}: {said}" if said and said != name else f" {name}")]
        ids += [end, *self._ids(f"input: {text}"), end]
        with torch.no_grad():
            states = self._encoder(input_ids=torch.tensor([ids])).last_hidden_state[0, places]
            found = self._head(states)[:, 0]
        return dict(zip(options, found.tolist(), strict=True))

    def probabilities(self, text: str, question: Mapping[str, Any]) -> list[float]:
        """Of a question in the form of /v1/systemone: choices in the order of their texts, no before yes."""
        kind, criteria = question["type"], question.get("criteria") or {}
        if kind == "choice":
            options = dict(sorted(criteria.items(), key=lambda one: f"{one[0]}: {one[1]}" if one[1] else one[0]))
        elif kind == "score":
            options = {str(place): said for place, said in enumerate(criteria)}
        else:
            options = {"yes": criteria.get("true") or "Yes", "no": criteria.get("false") or "No"}
        logits = list(self.logits(text, question["instructions"], options).values())
        shares = torch.softmax(torch.tensor(logits), 0).tolist()
        return shares[::-1] if kind == "noul" else shares
