"""Late interaction as its own code has it, in torch: padded, batched, masked. Shares nothing with the builder.

Written after PyLate's ``ColBERT.preprocess`` and ``ColBERT.encode``: markers are put behind the first token, queries
are padded to one length with the mask token, and the skipped words' vectors are dropped.
"""

from __future__ import annotations

import json
import string
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModel

from bei.core import Float32Array
from tests.support.checkpoints import HIDDEN, read_tensors, save_checkpoint, write_json, write_tensors
from tests.support.zoo import Case, save_case

WIDTH = 12
QUERY, DOCUMENT = "[unused0]", "[unused1]"


@dataclass(frozen=True)
class Settings:
    """PyLate's. ``mask`` is the token that queries are filled up with."""

    query_length: int = 32
    document_length: int = 40
    do_query_expansion: bool = True
    attend_to_expansion_tokens: bool = False
    skiplist_words: tuple[str, ...] = tuple(string.punctuation)
    mask: str = "[MASK]"

    def config(self) -> dict[str, object]:
        """config_sentence_transformers.json."""
        names = ("query_length", "document_length", "do_query_expansion", "attend_to_expansion_tokens")
        prefixes = {"query_prefix": QUERY, "document_prefix": DOCUMENT}
        return {**prefixes, **{name: getattr(self, name) for name in names}, "skiplist_words": [*self.skiplist_words]}


def with_markers(folder: Path) -> None:
    """Two words of the vocabulary become the markers."""
    model = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = model["model"]["vocab"]
    for marker, index in zip((QUERY, DOCUMENT), sorted(vocabulary.values())[-2:], strict=True):
        word = next(word for word, known in vocabulary.items() if known == index)
        del vocabulary[word]
        vocabulary[marker] = index
    (folder / "tokenizer.json").write_text(json.dumps(model))


def save_colbert(folder: Path, settings: Settings, case: Case | None = None) -> Path:
    """A random checkpoint in PyLate's layout, BERT or ``case``, with BERT's tokenizer; returns ``folder``."""
    save_case(folder, case) if case else save_checkpoint(folder)
    with_markers(folder)
    kinds = {"": "sentence_transformers.models.Transformer", "1_Dense": "pylate.models.Dense.Dense"}
    modules = [{"idx": i, "name": str(i), "path": p, "type": kind} for i, (p, kind) in enumerate(kinds.items())]
    write_json(folder / "modules.json", modules)
    hidden = case.settings["hidden_size"] if case else HIDDEN
    dense = {"in_features": hidden, "out_features": WIDTH, "bias": False}
    write_json(folder / "1_Dense" / "config.json", {**dense, "activation_function": "torch.nn.Identity"})
    weight = torch.randn(WIDTH, hidden, generator=torch.Generator().manual_seed(3)) / 6
    write_tensors(folder / "1_Dense", {"linear.weight": weight})
    write_json(folder / "config_sentence_transformers.json", settings.config())
    return folder


def as_original(folder: Path, settings: Settings) -> Path:
    """``folder`` in the layout of the original ColBERT instead."""
    (folder / "modules.json").unlink()
    (folder / "config_sentence_transformers.json").unlink()
    tensors = {f"bert.{name}": tensor for name, tensor in read_tensors(folder).items()}
    projection = load_file(folder / "1_Dense" / "model.safetensors")
    write_tensors(folder, {**tensors, **projection})
    config = json.loads((folder / "config.json").read_text())
    write_json(folder / "config.json", {**config, "architectures": ["HF_ColBERT"]})
    metadata = {
        "query_token_id": QUERY,
        "doc_token_id": DOCUMENT,
        "query_maxlen": settings.query_length,
        "doc_maxlen": settings.document_length,
        "attend_to_mask_tokens": settings.attend_to_expansion_tokens,
        "mask_punctuation": bool(settings.skiplist_words),
    }
    write_json(folder / "artifact.metadata", metadata)
    return folder


def encode(folder: Path, texts: Sequence[str], settings: Settings, *, is_query: bool) -> list[Float32Array]:
    """Unit vectors of each text, float32 [tokens, WIDTH], all texts in one padded batch."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    length = settings.query_length if is_query else settings.document_length
    tokenizer.no_padding()
    tokenizer.enable_truncation(length - 1)
    ids = [tokenizer.encode(text).ids for text in texts]
    vocabulary = tokenizer.get_vocab()
    marker, mask_id = vocabulary[QUERY if is_query else DOCUMENT], vocabulary[settings.mask]
    ids = [[row[0], marker, *row[1:]] for row in ids]
    width = length if is_query and settings.do_query_expansion else max(map(len, ids))
    input_ids = torch.tensor([row + [mask_id] * (width - len(row)) for row in ids])
    attention = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in ids])
    kept = torch.ones_like(input_ids).bool() if is_query and settings.do_query_expansion else attention.bool()
    if is_query and settings.do_query_expansion and settings.attend_to_expansion_tokens:
        attention[:] = 1
    if not is_query:
        skipped = [vocabulary[word] for word in settings.skiplist_words if word in vocabulary]
        kept &= ~torch.isin(input_ids, torch.tensor(skipped, dtype=torch.int64))
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    weight = load_file(folder / "1_Dense" / "model.safetensors")["linear.weight"]
    with torch.no_grad():
        states = model(input_ids=input_ids, attention_mask=attention).last_hidden_state @ weight.T
    vectors = torch.nn.functional.normalize(states, dim=-1)
    return [rows[where].numpy() for rows, where in zip(vectors, kept, strict=True)]
