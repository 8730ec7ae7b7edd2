"""A tiny artifact on disk for tests that need no compiler: a WordPiece tokenizer made in memory, manifest, certificate.

Its engine is ``bei.engine.fake.FakeEngine``; the certificate's canary is what that engine answers.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.processors import TemplateProcessing

from bei.artifact import store
from bei.artifact.certificate import record
from bei.artifact.manifest import (
    ENGINE_DIR,
    SCHEMA_VERSION,
    TOKENIZER,
    Artifact,
    CheckpointSource,
    Embedding,
    EngineRequirements,
    Manifest,
    OutputInfo,
    SpecSummary,
    Tokenization,
)
from bei.core import Float32Array, Limits
from bei.engine.fake import DIMENSION, fake_row
from bei.engine.postprocess import unit_length

CANARY_TEXT = "hello world"
VOCAB_SIZE = 128
LIMITS = Limits(max_num_tokens=64, max_batch_size=8, max_seq_len=16)

_EMBEDDING = Embedding(
    pooling="mean", normalize=True, similarity="cosine", matryoshka_dimensions=None, int8_largest=1.0
)
_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
_WORDS = ["hello", "world", "embed", "##ding", "query", ":", "!", "the", "cat", "##s"]


def tiny_tokenizer() -> Tokenizer:
    """WordPiece over letters and a few words, ``[CLS] ... [SEP]``; lower-cases and strips accents like BERT's."""
    letters = list(string.ascii_lowercase)
    words = [*_SPECIAL, *_WORDS, *letters, *(f"##{letter}" for letter in letters), *string.digits]
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = BertPreTokenizer()
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, vocabulary[token]) for token in ("[CLS]", "[SEP]")],
    )
    return tokenizer


def token_ids(text: str, max_seq_len: int = LIMITS.max_seq_len) -> list[int]:
    """What the tokenizers library makes of ``text``, truncated."""
    tokenizer = tiny_tokenizer()
    tokenizer.enable_truncation(max_seq_len)
    ids: list[int] = tokenizer.encode(text).ids
    return ids


def expected_vectors(
    inputs: Sequence[Sequence[int]], dimensions: int | None = None, *, normalize: bool = True
) -> Float32Array:
    """What a client gets for these token ids from an artifact of ``save_artifact`` over a FakeEngine."""
    rows = np.stack([fake_row(np.array(ids, np.int32)) for ids in inputs])
    return unit_length(rows[:, :dimensions]) if normalize else rows[:, :dimensions]


def save_artifact(
    path: Path, *, canary: Sequence[float] | None = None, output: str = "embedding", **manifest_fields: Any
) -> Artifact:
    """Write an artifact to the new folder ``path``; keyword arguments replace fields of its manifest.

    ``embedding`` is a dict of the fields of ``Embedding`` to replace, or None for a model that does not embed.
    ``canary`` and ``output`` are the certificate's row and what it is a row of.
    """
    if manifest_fields.get("embedding") is not None:
        manifest_fields["embedding"] = msgspec.structs.replace(_EMBEDDING, **manifest_fields["embedding"])
    (path / ENGINE_DIR).mkdir(parents=True)
    (path / ENGINE_DIR / "fake.bin").write_bytes(b"an engine would be here")
    tiny_tokenizer().save(str(path / TOKENIZER))
    manifest = Manifest(
        schema_version=SCHEMA_VERSION,
        bei_version="0.0.0",
        name="tiny",
        source=CheckpointSource(model="tiny", kind="path", revision=None, sha256="0" * 64, transformers="5.24.0"),
        tasks=["embed"],
        spec=SpecSummary(
            family="bert",
            architecture="BertModel",
            num_layers=1,
            hidden_size=DIMENSION,
            num_heads=1,
            vocab_size=VOCAB_SIZE,
            num_parameters=1,
            attention="bidirectional",
            attention_asked=False,
        ),
        outputs=[OutputInfo(name="embedding", dimension=DIMENSION)],
        embedding=_EMBEDDING,
        classification=None,
        rerank_template=None,
        tokenization=Tokenization(library="none", tokenizer_class="tokenizer.json"),
        prompts={},
        default_prompt_name=None,
        roles={},
        target="fake",
        precision="fp32",
        engine=EngineRequirements(compiler="none", compiler_version="0", device="cpu", capabilities=[]),
        max_num_tokens=LIMITS.max_num_tokens,
        max_batch_size=LIMITS.max_batch_size,
        max_seq_len=LIMITS.max_seq_len,
        verification="reference",
        files=[],
    )
    certificate = record.Certificate(
        kind="reference",
        reference="nothing",
        reference_is_independent=True,
        device="none",
        num_texts=1,
        num_held_out_texts=1,
        texts_sha256="0" * 64,
        thresholds=record.Thresholds(mean=0.99, p1=0.9, min=0.5),
        outputs=[
            record.Agreement(
                output=output,
                cosine_mean=1.0,
                cosine_p1=1.0,
                cosine_min=1.0,
                max_abs_difference=0.0,
                ranking_overlap=1.0,
                histogram=record.CosineHistogram(edges=[0.001, 0.1], counts=[1, 0, 0]),
                worst_texts=[record.WorstText(text="the worst text", cosine=1.0)],
                failures=[],
            )
        ],
        passed=True,
        canary_text=CANARY_TEXT,
        canary_output=output,
        canary_row=list(canary if canary is not None else expected_vectors([token_ids(CANARY_TEXT)])[0].tolist()),
    )
    return store.save(path, msgspec.structs.replace(manifest, **manifest_fields), certificate)
