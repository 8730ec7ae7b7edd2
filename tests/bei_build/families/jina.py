"""JinaBERT v2: random checkpoints as its authors' code saves them, and its computation in torch.

Two models of the same names: the one of the papers, and that of jina-embeddings-v2-base-code, ``CODE`` here, written
from text-embeddings-inference's jina_code.rs and Python port of the authors' modeling_bert.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from bei.core import Encoding
from tests.support.checkpoints import save_tokenizer, wordpiece_tokenizer, write_json, write_tensors

HIDDEN, HEADS, INNER, LAYERS, LONGEST = 36, 6, 20, 3, 64  # six heads: slopes of a number that is no power of two
VOCABULARY = wordpiece_tokenizer().get_vocab_size()
PAPERS, CODE = "jinaai/jina-bert-implementation", "jinaai/jina-bert-v2-qk-post-norm"
functional = torch.nn.functional


def save(
    folder: Path,
    prefix: str = "",
    code: str = PAPERS,
    tokenizer: Callable[[], Tokenizer] = wordpiece_tokenizer,
    **changes: Any,
) -> Path:
    """Save a checkpoint of the model ``code`` into ``folder``; ``changes`` apply to config.json."""
    vocabulary = tokenizer().get_vocab_size()
    generator = torch.Generator().manual_seed(11)

    def normal(*shape: int, mean: float = 0.0) -> torch.Tensor:
        return mean + 0.3 * torch.randn(*shape, generator=generator)

    def norm(name: str) -> dict[str, torch.Tensor]:
        return {f"{name}.weight": normal(HIDDEN, mean=1.0), f"{name}.bias": normal(HIDDEN)}

    def linear(name: str, out: int, width: int = HIDDEN) -> dict[str, torch.Tensor]:
        return {f"{name}.weight": normal(out, width), f"{name}.bias": normal(out)}

    tensors = {
        "embeddings.word_embeddings.weight": normal(vocabulary, HIDDEN),
        "embeddings.token_type_embeddings.weight": normal(2, HIDDEN),
        **norm("embeddings.LayerNorm"),
        **linear("pooler.dense", HIDDEN),
        **(linear("classifier", 3) if "id2label" in changes else {}),
    }
    for index in range(LAYERS):
        layer = f"encoder.layer.{index}"
        for name in ("self.query", "self.key", "self.value", "output.dense"):
            tensors |= linear(f"{layer}.attention.{name}", HIDDEN)
        tensors |= norm(f"{layer}.attention.output.LayerNorm")
        if code == CODE:
            for name in ("attention.self.layer_norm_q", "attention.self.layer_norm_k", "layer_norm_1", "layer_norm_2"):
                tensors |= norm(f"{layer}.{name}")
        else:
            tensors |= norm(f"{layer}.mlp.layernorm")
        up, down = ("up_gated_layer", "down_layer") if code == CODE else ("gated_layers", "wo")
        tensors[f"{layer}.mlp.{up}.weight"] = normal(2 * INNER, HIDDEN)
        tensors |= linear(f"{layer}.mlp.{down}", HIDDEN, INNER)
    config = {
        "architectures": ["JinaBertForMaskedLM"],
        "auto_map": {"AutoModel": f"{code}--modeling_bert.JinaBertModel"},
        "emb_pooler": "mean",
        "feed_forward_type": "geglu",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "layer_norm_eps": 1e-12,
        "max_position_embeddings": LONGEST,
        "model_type": "bert",
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "position_embedding_type": "alibi",
        "type_vocab_size": 2,
        "vocab_size": vocabulary,
        **changes,
    }
    write_json(folder / "config.json", config)
    save_tokenizer(folder, tokenizer())
    heads = {name for name in tensors if name.startswith("classifier.")}
    return write_tensors(
        folder, {name if name in heads else f"{prefix}{name}": tensor for name, tensor in tensors.items()}
    )


def slopes(count: int) -> list[float]:
    """2 ** (-8 i / n) for n a power of two; else those of the lower power, then every other one of twice as many."""
    below = 1 << (count.bit_length() - 1)
    first = [2 ** (-8 * (index + 1) / below) for index in range(below)]
    return first if below == count else first + slopes(2 * below)[0::2][: count - below]


def states(
    tensors: dict[str, torch.Tensor], encoding: Encoding, activation: Any = functional.gelu, code: str = PAPERS
) -> torch.Tensor:
    """The last layer's states of one text."""

    def norm(name: str, value: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(value, (HIDDEN,), tensors[f"{name}.weight"], tensors[f"{name}.bias"], 1e-12)

    def linear(name: str, value: torch.Tensor) -> torch.Tensor:
        return functional.linear(value, tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))

    ids = torch.from_numpy(encoding.input_ids.astype(np.int64))
    types = (
        torch.from_numpy(encoding.token_type_ids.astype(np.int64)) if encoding.token_type_ids is not None else ids * 0
    )
    value = (
        tensors["embeddings.word_embeddings.weight"][ids] + tensors["embeddings.token_type_embeddings.weight"][types]
    )
    value = norm("embeddings.LayerNorm", value)
    positions = torch.arange(len(ids))
    bias = -torch.tensor(slopes(HEADS))[:, None, None] * (positions[:, None] - positions[None]).abs()
    for index in range(LAYERS):
        layer = f"encoder.layer.{index}"
        query, key, rows = (linear(f"{layer}.attention.self.{name}", value) for name in ("query", "key", "value"))
        if code == CODE:
            query = norm(f"{layer}.attention.self.layer_norm_q", query)
            key = norm(f"{layer}.attention.self.layer_norm_k", key)
        query, key, rows = (part.view(len(ids), HEADS, -1).transpose(0, 1) for part in (query, key, rows))
        weights = torch.softmax(query @ key.transpose(1, 2) / (HIDDEN // HEADS) ** 0.5 + bias, -1)
        mixed = (weights @ rows).transpose(0, 1).reshape(len(ids), HIDDEN)
        attended = norm(f"{layer}.attention.output.LayerNorm", linear(f"{layer}.attention.output.dense", mixed) + value)
        if code == CODE:
            value = norm(f"{layer}.layer_norm_1", value + attended)
            up, gate = torch.chunk(linear(f"{layer}.mlp.up_gated_layer", value), 2, -1)
            value = norm(f"{layer}.layer_norm_2", value + linear(f"{layer}.mlp.down_layer", up * activation(gate)))
        else:
            gate, up = torch.chunk(linear(f"{layer}.mlp.gated_layers", attended), 2, -1)
            value = norm(f"{layer}.mlp.layernorm", linear(f"{layer}.mlp.wo", activation(gate) * up) + attended)
    return value
