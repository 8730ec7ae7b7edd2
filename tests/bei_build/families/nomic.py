"""NomicBERT's original code: random checkpoints as it saves them, and its computation in torch.

Written from nomic-ai/contrastors; text-embeddings-inference's nomic.rs and vLLM's bert_with_rope.py follow it. It runs
token by token and expert by expert. The names of tensors and keys of config.json are those of nomic-embed-text-v2-moe.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bei.core import Encoding
from tests.support.checkpoints import read_tensors, save_tokenizer, unigram_tokenizer, write_json, write_tensors

HIDDEN, HEADS, INNER, LAYERS, EXPERTS, LONGEST = 32, 4, 24, 4, 8, 64
VOCABULARY = unigram_tokenizer().get_vocab_size() + 5  # filled up to a round number, as the original is
functional = torch.nn.functional


def config_of(**changes: Any) -> dict[str, Any]:
    """A config.json."""
    return {
        "activation_function": "gelu",
        "add_pooling_layer": False,
        "architectures": ["NomicBertModel"],
        "auto_map": {"AutoModel": "nomic-ai/nomic-bert-2048--modeling_hf_nomic_bert.NomicBertModel"},
        "causal": False,
        "expert_choice_router": False,
        "ffn_div": 1,
        "layer_norm_epsilon": 1e-05,
        "max_trained_positions": 2048,
        "mlp_fc1_bias": True,
        "mlp_fc2_bias": True,
        "model_type": "nomic_bert",
        "moe_every_n_layers": 2,
        "moe_impl": "megablocks",
        "moe_normalize_expert_weights": False,
        "moe_top_k": 2,
        "n_embd": HIDDEN,
        "n_head": HEADS,
        "n_inner": INNER,
        "n_layer": LAYERS,
        "n_positions": LONGEST,
        "num_experts": EXPERTS,
        "num_shared_experts": 0,
        "parallel_block": False,
        "prenorm": False,
        "qkv_proj_bias": True,
        "rotary_emb_base": 100.0,
        "rotary_emb_fraction": 1.0,
        "rotary_emb_interleaved": False,
        "rotary_emb_scale_base": None,
        "rotary_scaling_factor": None,
        "type_vocab_size": 1,
        "use_rms_norm": False,
        "vocab_size": VOCABULARY,
        **changes,
    }


def has_experts(config: dict[str, Any], layer: int) -> bool:
    """From the second layer on, one in ``moe_every_n_layers`` has experts."""
    return bool(config["num_experts"]) and layer % int(config["moe_every_n_layers"]) == 1


def save(folder: Path, prefix: str = "", **changes: Any) -> Path:
    """Save a checkpoint into ``folder``; ``changes`` apply to config.json."""
    config, generator = config_of(**changes), torch.Generator().manual_seed(7)

    def normal(*shape: int, mean: float = 0.0) -> torch.Tensor:
        return mean + 0.3 * torch.randn(*shape, generator=generator)

    def linear(name: str, out: int, width: int, bias: bool) -> dict[str, torch.Tensor]:
        return {f"{name}.weight": normal(out, width)} | ({f"{name}.bias": normal(out)} if bias else {})

    def norm(name: str) -> dict[str, torch.Tensor]:
        return {f"{name}.weight": normal(HIDDEN, mean=1.0), f"{name}.bias": normal(HIDDEN)}

    tensors = {
        "embeddings.word_embeddings.weight": normal(VOCABULARY, HIDDEN),
        "embeddings.token_type_embeddings.weight": normal(1, HIDDEN),
        **norm("emb_ln"),
    }
    gated = config["activation_function"] != "gelu"
    for index in range(LAYERS):
        layer = f"encoder.layers.{index}"
        tensors |= linear(f"{layer}.attn.Wqkv", 3 * HIDDEN, HIDDEN, config["qkv_proj_bias"])
        tensors |= linear(f"{layer}.attn.out_proj", HIDDEN, HIDDEN, config["qkv_proj_bias"])
        tensors |= norm(f"{layer}.norm1") | norm(f"{layer}.norm2")
        if has_experts(config, index):
            tensors[f"{layer}.mlp.router.layer.weight"] = 3 * normal(EXPERTS, HIDDEN)
            tensors[f"{layer}.mlp.experts.mlp.w1"] = normal(EXPERTS * INNER, HIDDEN)
            tensors[f"{layer}.mlp.experts.mlp.w2"] = normal(EXPERTS * INNER, HIDDEN)
            tensors[f"{layer}.mlp.experts.bias"] = normal(HIDDEN)
            continue
        for name in ("fc11", "fc12") if gated else ("fc1",):
            tensors |= linear(f"{layer}.mlp.{name}", INNER, HIDDEN, config["mlp_fc1_bias"])
        tensors |= linear(f"{layer}.mlp.fc2", HIDDEN, INNER, config["mlp_fc2_bias"])
    write_json(folder / "config.json", config)
    save_tokenizer(folder, unigram_tokenizer())
    tensors = {f"{prefix}{name}": tensor for name, tensor in tensors.items()}
    if "id2label" in changes:
        tensors |= linear(f"{prefix}pooler.dense", HIDDEN, HIDDEN, True)
        tensors |= linear("classifier", len(changes["id2label"]), HIDDEN, True)
    return write_tensors(folder, tensors)


def rotated(heads: torch.Tensor, base: float) -> torch.Tensor:
    """``heads`` [tokens, heads, width]: the halves rotate by position / base ** (2 i / width)."""
    width = heads.shape[-1]
    angles = torch.arange(len(heads))[:, None] / base ** (torch.arange(0, width, 2) / width)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = heads.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Oracle:
    """The original code's transformer on one text."""

    def __init__(self, folder: Path, prefix: str = "") -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self.tensors = {name.removeprefix(prefix): tensor for name, tensor in read_tensors(folder).items()}

    def states(self, encoding: Encoding) -> torch.Tensor:
        """The last layer's states."""
        ids = torch.from_numpy(encoding.input_ids.astype(np.int64))
        value = self.tensors["embeddings.word_embeddings.weight"][ids]
        value = self.norm("emb_ln", value + self.tensors["embeddings.token_type_embeddings.weight"][0])
        for index in range(LAYERS):
            layer = f"encoder.layers.{index}"
            value = self.norm(f"{layer}.norm1", self.attention(f"{layer}.attn", value) + value)
            mlp = self.experts if has_experts(self.config, index) else self.mlp
            value = self.norm(f"{layer}.norm2", mlp(f"{layer}.mlp", value) + value)
        return value

    def linear(self, name: str, value: torch.Tensor) -> torch.Tensor:
        return functional.linear(value, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def norm(self, name: str, value: torch.Tensor) -> torch.Tensor:
        weight, bias = self.tensors[f"{name}.weight"], self.tensors[f"{name}.bias"]
        return functional.layer_norm(value, (HIDDEN,), weight, bias, self.config["layer_norm_epsilon"])

    def attention(self, name: str, value: torch.Tensor) -> torch.Tensor:
        parts = self.linear(f"{name}.Wqkv", value).view(len(value), 3, HEADS, -1).unbind(1)
        base = self.config["rotary_emb_base"]
        query, key, rows = rotated(parts[0], base), rotated(parts[1], base), parts[2]
        weights = torch.einsum("qhd,khd->hqk", query, key) / (HIDDEN // HEADS) ** 0.5
        mixed = torch.einsum("hqk,khd->qhd", weights.softmax(-1), rows)
        return self.linear(f"{name}.out_proj", mixed.reshape(len(value), HIDDEN))

    def mlp(self, name: str, value: torch.Tensor) -> torch.Tensor:
        if self.config["activation_function"] == "gelu":
            return self.linear(f"{name}.fc2", functional.gelu(self.linear(f"{name}.fc1", value)))
        activation = functional.silu if self.config["activation_function"] == "swiglu" else functional.gelu
        gate = activation(self.linear(f"{name}.fc12", value))
        return self.linear(f"{name}.fc2", self.linear(f"{name}.fc11", value) * gate)

    def experts(self, name: str, value: torch.Tensor) -> torch.Tensor:
        up, down = (self.tensors[f"{name}.experts.mlp.{w}"].view(EXPERTS, INNER, HIDDEN) for w in ("w1", "w2"))
        rows = []
        for token in value:
            shares = self.linear(f"{name}.router.layer", token).softmax(-1)
            best = shares.argsort(descending=True)[: self.config["moe_top_k"]]
            total = shares[best].sum() if self.config["moe_normalize_expert_weights"] else 1.0
            outputs = [shares[e] / total * (functional.gelu(up[e] @ token) @ down[e]) for e in best.tolist()]
            rows.append(torch.stack(outputs).sum(0) + self.tensors[f"{name}.experts.bias"])
        return torch.stack(rows)
