"""Random Laya checkpoints, as its code saves them (0.4.15), and their probabilities computed in torch by themselves."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import nn
from transformers import ModernBertConfig, ModernBertModel

from tests.support.checkpoints import bpe_tokenizer, change_json, save_tokenizer, write_json
from tests.support.gliner_models import encoder_config, encoder_model

KINDS = ("choice", "score", "noul")
NO, YES = "false: no, the statement does not hold", "true: yes, the statement holds"
TEMPERATURES = {"temperature": [1.5, 0.8, 2.5], "temperature_by_options": {"choice:3-5": 0.7, "score:2": 0.1}}


def head_layer(width: int) -> nn.TransformerEncoderLayer:
    heads = max(1, width // 64)
    return nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)


def save_laya(
    folder: Path, *, width: int = 32, head_layers: int = 2, spread: float = 0.2, length: int = 2048, **settings: Any
) -> Path:
    """A random model; ``settings`` of rl_agent_config.json. ``spread``: standard deviation of its matrices. ``length``:
    the longest text of its encoder."""
    tokenizer = bpe_tokenizer()
    config = encoder_config(
        "modernbert",
        tokenizer.get_vocab_size(),
        hidden_size=width,
        num_hidden_layers=4,
        local_attention=16,
        max_position_embeddings=length,
    )
    with torch.random.fork_rng():
        torch.manual_seed(39)
        parts: dict[str, nn.Module] = {"encoder": encoder_model("modernbert", config)}
        parts |= {f"head.layers.{index}": head_layer(width) for index in range(head_layers)}
        parts |= {"type_emb": nn.Embedding(3, width), "scorer.0": nn.LayerNorm(width)}
        parts |= {"scorer.1": nn.Linear(width, width), "scorer.3": nn.Linear(width, 1)}
        parts |= {"act_head.0": nn.Linear(width + 4, 256), "act_head.2": nn.Linear(256, 2)}
        tensors = {f"{name}.{key}": it for name, part in parts.items() for key, it in part.state_dict().items()}
        for name, value in tensors.items():
            is_norm = value.ndim == 1 and name.endswith("weight")
            tensors[name] = torch.randn_like(value) * (spread if value.ndim > 1 else 0.1) + is_norm
    tensors["temperature"] = torch.ones(3)
    (folder / "tokenizer").mkdir(parents=True)
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors")
    save_tokenizer(folder / "tokenizer", tokenizer)
    named = {"cls_token": "<s>", "sep_token": "</s>", "mask_token": "<mask>", "pad_token": "<pad>"}
    change_json(folder / "tokenizer" / "tokenizer_config.json", model_input_names=["input_ids"], **named)
    config.save_pretrained(folder / "encoder")
    known = {"encoder": "random/modernbert", "head_layers": head_layers, "act_costs": {"escalate": 0.5}, "max_len": 512}
    write_json(folder / "rl_agent_config.json", {**known, "head_max_len": 192, **TEMPERATURES, **settings})
    return folder


class LayaReference:
    """The model of ``folder`` by transformers' ModernBERT and torch's layers."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        tensors = load_file(folder / "model.safetensors")

        def filled(module: nn.Module, prefix: str) -> Any:
            own = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
            module.load_state_dict(own)
            return module.to(dtype).eval()

        config = ModernBertConfig.from_pretrained(folder / "encoder")
        width = config.hidden_size
        self._encoder = filled(ModernBertModel(config), "encoder.")
        count = json.loads((folder / "rl_agent_config.json").read_text())["head_layers"]
        self._layers = [filled(head_layer(width), f"head.layers.{index}.") for index in range(count)]
        self._types = filled(nn.Embedding(3, width), "type_emb.")
        scorer = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 1))
        self._scorer = filled(scorer, "scorer.")
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
        self._settings = json.loads((folder / "rl_agent_config.json").read_text())

    def ids(self, text: str) -> list[int]:
        found: list[int] = self._tokenizer.encode(text.replace("<mask>", " "), add_special_tokens=False).ids
        return found

    def logits(self, text: str, kind: str, instructions: str, options: Sequence[str]) -> list[float]:
        """Of each option, before any temperature."""
        start, end, mark = (self._tokenizer.token_to_id(token) for token in ("<s>", "</s>", "<mask>"))
        ids, places = [start, *self.ids(f"{kind} question: {instructions}"), end], []
        for option in options:
            places.append(len(ids))
            ids += [mark, *self.ids(f" {option}")]
        ids += [end, *self.ids(text), end]
        with torch.no_grad():
            states = self._encoder(input_ids=torch.tensor([ids])).last_hidden_state
            states = states + self._types.weight[KINDS.index(kind)]
            for layer in self._layers:
                states = layer(states)
            found = self._scorer(states[0, places])[:, 0].float()
        return [float(score) for score in found]

    def probabilities(self, text: str, question: Mapping[str, Any]) -> list[float]:
        """Of a question in the form of /v1/systemone, choices in the order of their texts."""
        kind, criteria = question["type"], question.get("criteria") or {}
        if kind == "choice":
            options = sorted(f"{name}: {said}" if said else name for name, said in criteria.items())
        elif kind == "score":
            options = [f"level {place}: {said}" for place, said in enumerate(criteria)]
        else:
            no, yes = (criteria.get(word) for word in ("false", "true"))
            options = [f"false: {no}" if no else NO, f"true: {yes}" if yes else YES]
        logits = self.logits(text, kind, question.get("instructions") or "", options)
        scale = self._temperature(kind, len(options))
        shares = torch.softmax(torch.tensor(logits) / scale, 0)
        return [float(share) for share in shares]

    def _temperature(self, kind: str, count: int) -> float:
        size = next((name for most, name in ((2, "2"), (5, "3-5"), (10, "6-10")) if count <= most), "11+")
        of_kind = self._settings["temperature"][KINDS.index(kind)]
        value: float = self._settings["temperature_by_options"].get(f"{kind}:{size}", of_kind)
        assert math.isfinite(value)
        return min(5.0, max(0.5, value))
