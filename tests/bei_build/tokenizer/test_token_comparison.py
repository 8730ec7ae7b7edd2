"""A build in which the artifact's tokenizer and the library's differ fails, and names the text."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from rich.console import Console
from tokenizers import AddedToken, Tokenizer, normalizers, processors
from transformers import AutoModel, AutoTokenizer

from bei.artifact import store
from bei.artifact.manifest import TOKENIZER, CheckpointSource
from bei.errors import ArtifactError, TokenizerError
from bei.offline.model import Model
from bei_build import pipeline
from bei_build.checkpoint import read
from bei_build.checkpoint import read as checkpoints
from bei_build.checkpoint.checkpoint import Checkpoint
from bei_build.config import BuildConfig
from bei_build.progress import Progress
from bei_build.tokenizer.artifact_tokenizer import artifact_tokenizer
from bei_build.tokenizer.library_tokenizer import LibraryTokenizer, TokenizerSettings
from tests.support.builds import build_artifact, open_engine
from tests.support.checkpoints import bpe_tokenizer, save_checkpoint, wordpiece_tokenizer, write_json


def with_marker(folder: Path) -> Path:
    """The tests' BERT with a marker token in its tokenizer."""
    save_checkpoint(folder, vocab_size=96)
    tokenizer = wordpiece_tokenizer()
    tokenizer.add_special_tokens([AddedToken("[DOC]", normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "BertTokenizer", "do_lower_case": True})
    return folder


def without_marker(tokenizer: Tokenizer) -> Tokenizer:
    parts = json.loads(tokenizer.to_str())
    parts["added_tokens"] = [token for token in parts["added_tokens"] if token["content"] != "[DOC]"]
    return Tokenizer.from_str(json.dumps(parts))


def in_its_case(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False)
    return tokenizer


def without_types(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return tokenizer


def without_end(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A", special_tokens=[("[CLS]", 2)])
    return tokenizer


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_marker, r"give '\[DOC\] in\[DOC\]side and \[DOC\]' other tokens"),
        (in_its_case, "give 'The quick brown fox jumps over the lazy dog.' other tokens"),
        (without_types, r"with .* other tokens, .* Their types are \[.*1.*\] and \[0, 0"),
        (without_end, "give '' other tokens"),
    ],
)
def test_a_tokenizer_that_is_not_the_librarys_fails_by_name(
    change: Callable[[Tokenizer], Tokenizer], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def changed(library: LibraryTokenizer, settings: TokenizerSettings, folder: Path) -> Tokenizer:
        return change(artifact_tokenizer(library, settings, folder))

    monkeypatch.setattr(checkpoints, "artifact_tokenizer", changed)
    with pytest.raises(TokenizerError, match=message) as info:
        build_artifact(with_marker(tmp_path / "bert"), tmp_path / "artifact", all_tokens=True)
    assert "transformers" in str(info.value)
    assert "BertTokenizer" in str(info.value)
    assert "\n" not in str(info.value)
    assert not (tmp_path / "artifact").exists()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", bpe_tokenizer().to_str()),
        ("tokenizer_config.json", '{"tokenizer_class": "BertTokenizer", "do_lower_case": false}'),
        (
            "tokenizer_config.json",
            '{"tokenizer_class": "BertTokenizer", "do_lower_case": true, "truncation_side": "left"}',
        ),
    ],
)
def test_a_tokenizer_that_is_swapped_after_the_builds_start_is_found(
    name: str, content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, source_of = with_marker(tmp_path / "bert"), read.source_of

    def swapped(checkpoint: Checkpoint, labels: Checkpoint | None) -> CheckpointSource:
        (folder / name).write_text(content)
        return source_of(checkpoint, labels)

    monkeypatch.setattr(pipeline, "source_of", swapped)
    with pytest.raises(TokenizerError, match=r"give .* other tokens|fails on a text"):
        build_artifact(folder, tmp_path / "artifact")


def test_what_was_compared_is_what_is_sealed(bert: Path, tmp_path: Path) -> None:
    artifact = build_artifact(bert, tmp_path / "artifact", all_tokens=True, verify=False)
    certificate, manifest = artifact.certificate, artifact.manifest
    assert certificate.tokens is not None
    assert certificate.tokens.library.startswith("transformers 5")
    assert certificate.tokens.num_texts > 100
    assert certificate.tokens.num_pairs > 100
    assert certificate.tokens.sha256 == next(info.sha256 for info in manifest.files if info.path == TOKENIZER)
    other = msgspec.structs.replace(certificate, tokens=msgspec.structs.replace(certificate.tokens, sha256="0" * 64))
    copied = tmp_path / "copied"
    copied.mkdir()
    for info in manifest.files:
        (copied / info.path).parent.mkdir(exist_ok=True, parents=True)
        (copied / info.path).write_bytes((artifact.path / info.path).read_bytes())
    store.save(copied, manifest, other)
    with pytest.raises(ArtifactError, match=r"token ids were those of another tokenizer\.json"):
        store.load(copied)


def test_token_ids_are_compared_without_verification_too(tmp_path: Path) -> None:
    artifact = build_artifact(with_marker(tmp_path / "bert"), tmp_path / "artifact", verify=False)
    assert artifact.certificate.kind == "none"
    assert artifact.certificate.tokens is not None


def build_noted(folder: Path, out: Path, **settings: Any) -> str:
    """The notes of a build."""
    shown = io.StringIO()
    config = BuildConfig(model=str(folder), out=str(out), precision="fp32", verify=False, **settings)
    pipeline.build(config, open_engine, Progress(Console(file=shown, width=1000)))
    return shown.getvalue()


def test_a_build_says_where_the_class_reads_otherwise_than_tokenizer_json(tmp_path: Path) -> None:
    folder = with_marker(tmp_path / "bert")
    assert "otherwise" not in build_noted(folder, tmp_path / "same")
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "BertTokenizer", "do_lower_case": False})
    said = build_noted(folder, tmp_path / "class")
    assert "(BertTokenizer) reads" in said
    assert "--tokenizer file" in said
    assert "otherwise" not in build_noted(folder, tmp_path / "file", tokenizer="file")
    with Model(tmp_path / "class", tune="off") as own, Model(tmp_path / "file", tune="off") as as_stored:
        ids = [[token.id for token in model.tokenize(["The Cat"])[0]] for model in (own, as_stored)]
    assert ids[0] != ids[1]
    assert ids[1] == wordpiece_tokenizer().encode("the cat").ids
    tokenization = store.load(tmp_path / "file").manifest.tokenization
    assert tokenization is not None
    assert (tokenization.library.split()[0], tokenization.tokenizer_class) == ("tokenizers", "tokenizer.json")


def test_token_types_that_the_class_leaves_out_are_said(tmp_path: Path) -> None:
    folder = with_marker(tmp_path / "bert")
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "TokenizersBackend"})
    assert "(TokenizersBackend) reads" in build_noted(folder, tmp_path / "artifact")
    assert "otherwise" not in build_noted(folder, tmp_path / "file", tokenizer="file")


SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("bert", {"tokenizer_class": "BertTokenizer", "do_lower_case": False}),
    ("bert", {"tokenizer_class": "BertTokenizer", "do_lower_case": True, "strip_accents": False}),
    ("bert", {"tokenizer_class": "BertTokenizer", "do_lower_case": True, "truncation_side": "left"}),
    ("distilbert", {"tokenizer_class": "DistilBertTokenizer", "do_lower_case": False}),
    ("roberta", {"tokenizer_class": "RobertaTokenizer", "add_prefix_space": True}),
    ("roberta", {"tokenizer_class": "RobertaTokenizer", "split_special_tokens": True}),
]


@pytest.mark.parametrize(("family", "settings"), SETTINGS, ids=str)
def test_served_vectors_are_those_of_transformers_with_its_own_tokenizer(
    family: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    folder = save_checkpoint(tmp_path / "checkpoint", family)
    write_json(folder / "tokenizer_config.json", settings)
    build_artifact(folder, tmp_path / "artifact", pooling="mean", normalize=False, max_seq_len=24)
    texts = ["the Cat sat", "héllo the </s> world", "hello", "on a mat the cat sat " * 4]
    library, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    expected = []
    for text in texts:
        inputs = library(text, truncation=True, max_length=24, return_tensors="pt")
        with torch.no_grad():
            expected.append(model(**inputs).last_hidden_state[0].mean(0).numpy())
    with Model(tmp_path / "artifact", tune="off") as served:
        np.testing.assert_allclose(served.embed(texts), np.stack(expected), atol=2e-4)


def test_a_token_that_the_class_adds_and_the_model_has_no_row_for_is_left_out(tmp_path: Path) -> None:
    """Like some DeBERTas without their mask token: transformers loads them, and fails on a text that has it."""
    folder = save_checkpoint(tmp_path / "bert")
    file = folder / "tokenizer.json"
    file.write_text(file.read_text().replace('"[MASK]"', '"[GONE]"'))
    said = build_noted(folder, tmp_path / "artifact")
    assert "BertTokenizer adds '[MASK]', for which the model has no row" in " ".join(said.split())
    with Model(tmp_path / "artifact", tune="off") as model:
        (tokens,) = model.tokenize(["the [MASK]"])
    as_stored = Tokenizer.from_file(str(file))
    assert [token.id for token in tokens] == as_stored.encode("the [MASK]").ids
