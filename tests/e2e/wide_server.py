"""``bei serve`` of one model of each kind with the widths of real ones, over an engine that costs next to nothing: what
takes time and memory is the server. ``save_models(folder)`` writes the artifacts that it serves.

Texts are tokenized by a WordPiece tokenizer of the size of BERT's.
"""

from __future__ import annotations

import resource
import string
import sys
from collections.abc import Set
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.processors import TemplateProcessing

from bei.artifact.label_layouts import Extraction
from bei.artifact.manifest import Classification, Manifest, OutputInfo
from bei.cli import main
from bei.core import EngineInfo, Float32Array, Limits, Outputs, PackedBatch
from tests.support.artifacts import save_artifact

VOCAB_SIZE = 30_000
LIMITS = Limits(max_num_tokens=4096, max_batch_size=256, max_seq_len=512)
WIDTH = 384

# Name of the model -> its task, its output and the output's width.
MODELS = {
    "embedder": ("embed", "embedding", WIDTH),
    "colbert": ("embed_tokens", "token_embedding", WIDTH),
    "ner": ("classify_tokens", "token_logits", 9),
    "splade": ("embed_sparse", "sparse", VOCAB_SIZE),
    "classifier": ("classify", "logits", 1000),
    "reranker": ("rerank", "logits", 1),
    "spans": ("extract", "span_logits", 12),
}
MOST_LABELS = 25  # of a request to "spans", whose engine scores as many
_FIRST_LETTER = 4  # behind the special tokens
_WEIGHTS_A_TEXT = 100  # of a sparse vector


def wide_tokenizer() -> Tokenizer:
    """Letters, and words of three letters, which are ``VOCAB_SIZE`` tokens."""
    letters = string.ascii_lowercase
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *letters, *(f"##{letter}" for letter in letters)]
    words = (a + b + c + d for a in letters for b in letters for c in letters for d in letters)
    vocabulary += [word for word, _ in zip(words, range(VOCAB_SIZE - len(vocabulary)), strict=False)]
    numbers = {word: index for index, word in enumerate(vocabulary)}
    tokenizer = Tokenizer(WordPiece(numbers, unk_token="[UNK]"))
    tokenizer.normalizer = BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = BertPreTokenizer()
    special = [(token, numbers[token]) for token in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = TemplateProcessing("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", special)
    return tokenizer


def save_models(folder: Path) -> list[Path]:
    """Artifacts of ``MODELS``."""
    paths = []
    for name, (task, output, width) in MODELS.items():
        per_token = output.startswith(("token_", "span_"))
        labels = None if "logits" not in output or task == "extract" else [f"LABEL_{index}" for index in range(width)]
        fields: dict[str, Any] = {
            "name": name,
            "tasks": [task],
            "outputs": [OutputInfo(name=output, dimension=width, per_token=per_token, unit_length=name == "colbert")],
            "classification": Classification(labels=labels, function="sigmoid") if labels else None,
            "max_num_tokens": LIMITS.max_num_tokens,
            "max_batch_size": LIMITS.max_batch_size,
            "max_seq_len": LIMITS.max_seq_len,
        }
        if task != "embed":
            fields["embedding"] = None
        if task == "extract":
            fields["extraction"] = Extraction(
                label_id=_FIRST_LETTER,
                separator_id=_FIRST_LETTER + 1,
                reads_marker=True,
                max_width=width,
                max_words=384,
            )
        with (
            mock.patch("tests.support.artifacts.tiny_tokenizer", wide_tokenizer),
            mock.patch("tests.support.artifacts.VOCAB_SIZE", VOCAB_SIZE),
        ):
            save_artifact(folder / name, canary=[1.0] * width, output=output, **fields)
        paths.append(folder / name)
    return paths


class WideEngine:
    """Answers with rows of a table, as many as there are tokens or sequences."""

    def __init__(self, manifest: Manifest) -> None:
        (output,) = manifest.outputs
        per_token = frozenset({output.name} if output.per_token else ())
        self.info = EngineInfo("fake", "fp32", "none", LIMITS, {output.name: output.dimension}, per_token)
        self._output, self._width, self._per_token = output.name, output.dimension, output.per_token
        width = output.dimension * (MOST_LABELS if output.name == "span_logits" else 1)
        table = np.random.default_rng(0).normal(size=(256, min(width, 1000))) / 20
        self._table: Float32Array = table.astype(np.float32)

    def run(self, batch: PackedBatch, outputs: Set[str] | None = None) -> Outputs:
        """Nothing is computed."""
        ids = batch.input_ids if self._per_token else batch.input_ids[batch.cu_seqlens[1:] - 2]
        if self._output != "sparse":
            return {self._output: self._table[ids % 256]}
        rows = np.zeros((len(ids), self._width), np.float32)
        columns = (ids[:, None] + np.arange(_WEIGHTS_A_TEXT) * 271) % self._width
        np.put_along_axis(rows, columns, 0.1234567, axis=1)
        return {self._output: rows}

    def warmup(self) -> None:
        """Nothing to allocate."""

    def close(self) -> None:
        """Nothing to free."""


def load_engine(_: Path, manifest: Manifest, *__: Any) -> WideEngine:
    """Instead of the real one."""
    return WideEngine(manifest)


if __name__ == "__main__":
    if sys.argv[1] == "--memory":  # bytes of address space, as in a small container
        limit = int(sys.argv[2])
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        del sys.argv[1:3]
    sys.argv[1:1] = ["serve"]
    # Rows of the table are no canary's, and their costs not worth measuring.
    sys.argv.append("--tune=off")
    with (
        mock.patch("bei.service.loader.load_engine", load_engine),
        mock.patch("bei.artifact.certificate.canary.deviation", return_value=None),
    ):
        main.main(sys.argv[1:])
