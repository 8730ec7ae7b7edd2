"""The Hugging Face model as sentence-transformers runs it: padded, batched, masked; and static embeddings, in numpy.
Shares nothing with the builder.

``bei_build.reference.hf_model`` runs one text at a time without padding, so the two agree only if both are right.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModel

from bei.core import Encoding, Float32Array
from tests.support.checkpoints import WEIGHTS, Dense, Normalize

_ACTIVATIONS = {
    "Identity": lambda x: x,
    "Tanh": torch.tanh,
    "ReLU": torch.relu,
    "GELU": torch.nn.functional.gelu,
    "SiLU": torch.nn.functional.silu,
}


def hf_embed(
    folder: Path,
    encodings: Sequence[Encoding],
    pooling: Sequence[str] = ("mean",),
    tail: Sequence[Dense | Normalize] = (),
) -> Float32Array:
    """Vectors of ``encodings`` from the checkpoint in ``folder``, float32 [n, E]."""
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    ids = _padded([encoding.input_ids for encoding in encodings], model.config.pad_token_id)
    mask = _padded([np.ones_like(encoding.input_ids) for encoding in encodings], 0)
    inputs = {"input_ids": ids, "attention_mask": mask}
    if all(encoding.token_type_ids is not None for encoding in encodings):
        types = [encoding.token_type_ids for encoding in encodings if encoding.token_type_ids is not None]
        inputs["token_type_ids"] = _padded(types, 0)
    with torch.no_grad():
        states = model(**inputs).last_hidden_state
        vectors = torch.cat([_pool(states, mask, mode) for mode in pooling], dim=1)
        for index, layer in enumerate(tail, start=2):
            if isinstance(layer, Normalize):
                vectors = torch.nn.functional.normalize(vectors, dim=1)
            else:
                weights = load_file(folder / f"{index}_Dense" / "model.safetensors")
                vectors = vectors @ weights["linear.weight"].T + weights.get("linear.bias", torch.zeros(()))
                vectors = _ACTIVATIONS[layer.activation](vectors)
    array: Float32Array = vectors.numpy()
    return array


def _padded(rows: Sequence[np.ndarray[tuple[int, ...], np.dtype[np.int32]]], value: int) -> torch.Tensor:
    width = max(len(row) for row in rows)
    padded = np.full((len(rows), width), value, np.int64)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = row
    return torch.from_numpy(padded)


def _pool(states: torch.Tensor, mask: torch.Tensor, mode: str) -> torch.Tensor:
    """As in sentence-transformers' Pooling module."""
    weights = mask[:, :, None].float()
    if mode == "cls":
        return states[:, 0]
    if mode == "last":
        return states[torch.arange(len(states)), mask.sum(1) - 1]
    if mode == "max":
        return states.masked_fill(weights == 0, float("-inf")).max(1).values
    if mode == "weighted_mean":
        weights = weights * torch.arange(1, states.shape[1] + 1)[None, :, None]
    total, count = (states * weights).sum(1), weights.sum(1)
    return total / (count.sqrt() if mode == "mean_sqrt_len" else count)


def static_embed(folder: Path, texts: Sequence[str], max_seq_len: int, *, with_unknown: bool) -> Float32Array:
    """Means of the rows of the first ``max_seq_len`` tokens, float32 [n, E]; zeros for a text without any.

    ``folder`` holds table and tokenizer, and what model2vec has of tokens that share rows. ``with_unknown`` as in
    sentence-transformers, without as in model2vec.
    """
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    model = json.loads(tokenizer.to_str())["model"]
    unknown = tokenizer.token_to_id(model["unk_token"]) if model.get("unk_token") else model.get("unk_id")
    tensors = {name: tensor.float().numpy() for name, tensor in load_file(folder / WEIGHTS).items()}
    row_of, weight_of = tensors.pop("mapping", None), tensors.pop("weights", None)
    (table,) = tensors.values()
    vectors = np.zeros((len(texts), table.shape[1]), np.float32)
    for vector, text in zip(vectors, texts, strict=True):
        ids = tokenizer.encode(text, add_special_tokens=False).ids[:max_seq_len]
        if kept := [token_id for token_id in ids if with_unknown or token_id != unknown]:
            rows = table[kept if row_of is None else row_of[kept].astype(int)]
            vector[:] = (rows if weight_of is None else rows * weight_of[kept, None]).mean(axis=0)
    return vectors
