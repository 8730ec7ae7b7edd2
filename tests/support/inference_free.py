"""A sparse retriever whose queries are looked up in a table, in the layout of the public ones. Shares nothing with the
builder.

The layout is that of opensearch-project/opensearch-neural-sparse-encoding-doc-v3-distill at babf71f3: the files of
``PUBLIC`` are the same to the byte (their SHA-256 are published, with the list of all files, in the source of a program
that pins this repository). The tokenizer's files are from memory of what transformers writes; shapes are tiny.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer

from bei.core import Float32Array
from tests.support.checkpoints import MAX_TOKENS, read_tensors, save_checkpoint, wordpiece_tokenizer, write_tensors

TABLE = "query_0_SparseStaticEmbedding"
POOLING = "document_1_SpladePooling"
_CLASSES = "sentence_transformers.sparse_encoder.models"

MODULES = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Router"}]
ROUTER: dict[str, Any] = {
    "types": {
        TABLE: f"{_CLASSES}.SparseStaticEmbedding.SparseStaticEmbedding",
        "": f"{_CLASSES}.MLMTransformer.MLMTransformer",
        POOLING: f"{_CLASSES}.SpladePooling.SpladePooling",
    },
    "structure": {"query": [TABLE], "document": ["", POOLING]},
    "parameters": {"default_route": "document", "allow_empty_key": True},
}
_SETTINGS = {
    "model_type": "SparseEncoder",
    "__version__": {"sentence_transformers": "5.0.0", "transformers": "4.50.3", "pytorch": "2.6.0+cu124"},
    "prompts": {"query": "", "document": ""},
    "default_prompt_name": None,
    "similarity_fn_name": "dot",
}
_POOLING = {"pooling_strategy": "max", "activation_function": "log1p_relu", "word_embedding_dimension": None}

# The SHA-256 of each file of the public repository whose content is known.
PUBLIC = {
    "modules.json": "2e12f8a5fbc625578d7bbaee4c18b748ccd82f0d4549c3d952638693ce4058cf",
    "router_config.json": "c373414574b65ea6612a43c16a17d8a5942e91ccde1cd1433e41619af02a8264",
    "config_sentence_transformers.json": "44e5b5295415281c3f61341f0670bf6752ce1d85880380faeebae3752889d718",
    f"{TABLE}/config.json": "f1aa3269d4139c461e2d3b7b8f1570f507bc59529cffb004c6a3702da4f5087a",
    f"{POOLING}/config.json": "d7a84fb418b94887421b277c5407175e476f0fa629037f4f5db540e98db682f3",
}


def save_inference_free(folder: Path) -> Path:
    """A random DistilBERT and a random table; returns ``folder``. Some weights are 0, and one is negative."""
    save_checkpoint(folder, "distilbert", task="ForMaskedLM")
    _write(folder / "modules.json", MODULES, 2)
    _write(folder / "router_config.json", ROUTER, 4)
    _write(folder / "config_sentence_transformers.json", _SETTINGS, 2)
    _write(folder / POOLING / "config.json", _POOLING, 4)
    _write(folder / TABLE / "config.json", {"frozen": True}, 4)
    tokenizer = wordpiece_tokenizer()
    for home in (folder, folder / TABLE):
        tokenizer.save(str(home / "tokenizer.json"))
        special = {f"{kind}_token": f"[{kind.upper()}]" for kind in ("cls", "mask", "pad", "sep", "unk")}
        _write(home / "special_tokens_map.json", special, 2)
        settings = {"tokenizer_class": "BertTokenizer", "do_lower_case": True, "model_max_length": MAX_TOKENS}
        _write(home / "tokenizer_config.json", {**special, **settings}, 2)
    weights = torch.rand(tokenizer.get_vocab_size(), generator=torch.Generator().manual_seed(5)) * 6
    weights[::7] = 0
    weights[tokenizer.token_to_id("!")] = -0.5
    write_tensors(folder / TABLE, {"weight": weights})
    return folder


def _write(path: Path, content: object, indent: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=indent), encoding="utf-8")


def encode_queries(folder: Path, texts: Sequence[str]) -> Float32Array:
    """After ``SparseStaticEmbedding.preprocess`` and ``forward``, a text at a time: float32 [texts, vocabulary]."""
    tokenizer = AutoTokenizer.from_pretrained(folder / TABLE)
    weight = read_tensors(folder / TABLE)["weight"]
    rows = []
    for text in texts:
        ids = tokenizer(text, truncation=True, add_special_tokens=False, return_tensors="pt")["input_ids"]
        presence = torch.zeros(1, len(weight), dtype=torch.int64)
        presence.scatter_(1, ids, torch.ones_like(ids))
        rows.append((presence * weight)[0].numpy())
    return np.stack(rows)


def encode_documents(folder: Path, texts: Sequence[str]) -> Float32Array:
    """After ``SpladePooling.forward`` with log1p_relu, a text at a time: float32 [texts, vocabulary]."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForMaskedLM.from_pretrained(folder, dtype=torch.float32).eval()
    rows = []
    for text in texts:
        inputs = tokenizer(text, truncation=True, return_tensors="pt", return_token_type_ids=False)
        with torch.no_grad():
            scores = model(**inputs).logits[0]
        rows.append(torch.log1p(torch.log1p(torch.relu(scores))).amax(0).numpy())
    return np.stack(rows)
