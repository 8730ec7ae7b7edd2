"""RikkaBotan's SSE and SSEQ: static embeddings with a tanh behind their mean, written and computed in torch.

Written after the repositories' own module (an EmbeddingBag's mean, then beta * tanh(alpha * x + bias)), as is the form
of 4 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from bei.core import Float32Array
from tests.support.checkpoints import HIDDEN, WEIGHTS, wordpiece_tokenizer, write_json, write_tensors

REST, TABLE = "model_rest.safetensors", "embedding.q4_k_m.bin"


def save_stable_static(
    folder: Path, tokenizer: Callable[[], Tokenizer] = wordpiece_tokenizer, *, quantized: bool = False
) -> Path:
    """Save random embeddings as the module does; returns ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer().save(str(folder / "tokenizer.json"))
    generator = torch.Generator().manual_seed(31)
    table, *vectors = (
        torch.randn(shape, generator=generator)
        for shape in ((tokenizer().get_vocab_size(), HIDDEN), *(((HIDDEN,),) * 3))
    )
    rest = {f"dyt.{name}": vector for name, vector in zip(("alpha", "beta", "bias"), vectors, strict=True)}
    if quantized:
        save_file(rest, folder / REST)
        scales = table.abs().amax(1, keepdim=True) + 1e-8
        codes = ((table / scales + 1) * 7.5).round().clamp(0, 15).to(torch.uint8)
        packed = (codes[:, 0::2] << 4) | codes[:, 1::2]
        (folder / TABLE).write_bytes(packed.numpy().tobytes() + scales.numpy().tobytes())
    else:
        write_tensors(folder, {"embedding.weight": table, **rest})
    kind = "SSEQ" if quantized else "SSE"
    write_json(folder / "modules.json", [{"idx": 0, "name": "0", "path": "", "type": f"modeling.{kind}"}])
    return folder


def stable_embed(folder: Path, texts: Sequence[str]) -> Float32Array:
    """Vectors of ``texts``, float32 [n, width]."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tensors = load_file(folder / (REST if (folder / TABLE).is_file() else WEIGHTS))
    alpha, beta, bias = (tensors[f"dyt.{name}"] for name in ("alpha", "beta", "bias"))
    table = tensors["embedding.weight"] if "embedding.weight" in tensors else _dequantized(folder, len(alpha))
    bag = torch.nn.EmbeddingBag.from_pretrained(table, mode="mean")
    rows = []
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        mean = bag(torch.tensor(ids, dtype=torch.long), torch.tensor([0]))[0]
        rows.append(beta * torch.tanh(alpha * mean + bias))
    vectors: Float32Array = torch.stack(rows).numpy()
    return vectors


def _dequantized(folder: Path, width: int) -> torch.Tensor:
    content = (folder / TABLE).read_bytes()
    rows = len(content) // (width // 2 + 4)
    codes = np.frombuffer(content[: rows * width // 2], np.uint8).reshape(rows, -1)
    scales = np.frombuffer(content[rows * width // 2 :], np.float32)
    numbers = np.empty((rows, width), np.float32)
    numbers[:, 0::2], numbers[:, 1::2] = codes >> 4, codes & 15
    return torch.from_numpy((numbers / np.float32(7.5) - 1) * scales[:, None])
