"""SigLIP: texts are filled up with padding that is attended, and pooled at its end; its own tokenizer class."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
import torch
import transformers
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers, processors
from tokenizers.models import Unigram
from transformers.convert_slow_tokenizer import import_protobuf

import bei
from bei.artifact.manifest import TOKENIZER, Artifact
from bei.errors import CheckpointError, ConfigError, TokenizerError
from bei.tokenizer.encoder import EncodingOptions, TextEncoder
from bei_build.reference.held_out import held_out_texts
from tests.support.builds import build_artifact
from tests.support.reading import read, refused
from tests.support.two_towers import change_tokenizer, library_vectors, save_siglip

LIMIT = 48
TEXTS = ["a cat on a mat", "!", "x", "words " * 200, "hello world, hello!"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_siglip(tmp_path_factory.mktemp("siglip") / "siglip")


@pytest.fixture(scope="module")
def artifact(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return build_artifact(checkpoint, tmp_path_factory.mktemp("artifact") / "siglip")


def filling_of(artifact: Artifact) -> int:
    assert artifact.manifest.tokenization is not None
    filling = artifact.manifest.tokenization.filled_with
    assert filling is not None
    return filling


def test_texts_have_the_librarys_vectors(checkpoint: Path, artifact: Artifact) -> None:
    assert artifact.certificate.reference.startswith("transformers, FP32")
    with bei.Model(artifact.path, tune="off") as model:
        found = model.embed(TEXTS)
        assert len(model.tokenize("x")) < LIMIT
    expected = library_vectors(checkpoint, transformers.SiglipModel, [], TEXTS)
    np.testing.assert_allclose(found, expected, atol=2e-4)


@pytest.mark.parametrize("architecture", ["SiglipModel", "SiglipTextModel"])
def test_the_text_tower_alone_has_the_librarys_vectors(architecture: str, checkpoint: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "siglip")
    if architecture == "SiglipTextModel":
        (folder / "config.json").unlink()
        (folder / "model.safetensors").unlink()
        transformers.SiglipModel.from_pretrained(checkpoint).text_model.save_pretrained(folder)
    assert json.loads((folder / "config.json").read_text())["architectures"] == [architecture]
    artifact = build_artifact(folder, tmp_path / "out", images=False, verify=False)
    with bei.Model(artifact.path, tune="off") as model:
        found = model.embed(TEXTS)
    np.testing.assert_allclose(found, library_vectors(checkpoint, transformers.SiglipModel, [], TEXTS), atol=2e-4)


def test_the_filling_changes_the_vector(checkpoint: Path, artifact: Artifact) -> None:
    """Else the test above would hold nothing."""
    model_class: Any = transformers.SiglipModel
    model = model_class.from_pretrained(checkpoint).eval()
    ids = transformers.AutoTokenizer.from_pretrained(checkpoint)(TEXTS[0], return_tensors="pt")["input_ids"]
    with torch.no_grad(), bei.Model(artifact.path, tune="off") as served:
        alone = model.get_text_features(input_ids=ids).pooler_output[0].numpy()
        found = served.embed(TEXTS[0])
    assert np.abs(found - alone / np.linalg.norm(alone)).max() > 1e-2


def test_every_text_is_filled_up_to_the_limit_and_counted_without_it(artifact: Artifact) -> None:
    filling = filling_of(artifact)
    encoder = TextEncoder(artifact.path / TOKENIZER, LIMIT, filling_id=filling)
    short, long = encoder.encode(["x", TEXTS[3]], EncodingOptions(truncate=True))
    assert short.num_tokens == long.num_tokens == LIMIT
    assert short.num_keys is None
    assert (short.input_ids[3:] == filling).all()
    assert not short.truncated
    assert long.truncated
    assert encoder.encode(["x"], EncodingOptions(whole=True))[0].num_tokens < LIMIT


def test_what_would_fill_texts_in_another_way_is_refused(tmp_path: Path) -> None:
    folder = save_siglip(tmp_path / "siglip")
    with pytest.raises(ConfigError, match="filled up to 48"):
        read(folder, max_seq_len=20)
    change_tokenizer(folder, padding_side="left")
    refused(folder, CheckpointError, "padding_side = left")
    change_tokenizer(folder, padding_side="right", model_input_names=["input_ids", "attention_mask"])
    refused(folder, CheckpointError, "model_input_names")


def sentencepiece_files(folder: Path) -> int:
    """A SentencePiece model, which SigLIP's class reads, and a tokenizer.json that reads texts as the class does: lower
    case, no ASCII punctuation, single spaces, then the model's own normalization. From memory of the file beside
    google/siglip-base-patch16-224. Returns the size of the vocabulary."""
    model = folder / "spiece.model"
    texts = io.BytesIO()
    options: dict[str, Any] = {
        "pad_id": 0,
        "eos_id": 1,
        "unk_id": 2,
        "bos_id": -1,
        "hard_vocab_limit": False,
        "minloglevel": 2,
    }
    lower = (text.lower() for text in held_out_texts())
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=lower, model_writer=texts, vocab_size=600, **options)
    model.write_bytes(texts.getvalue())
    read = sentencepiece.SentencePieceProcessor(model_file=str(model))
    size = read.get_piece_size()
    tokenizer = Tokenizer(Unigram([(read.id_to_piece(one), read.get_score(one)) for one in range(size)], unk_id=2))
    protobuf: Any = import_protobuf
    stored = protobuf().ModelProto.FromString(texts.getvalue())
    punctuation = Regex(r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]")
    tokenizer.normalizer = normalizers.Sequence(
        [
            normalizers.Lowercase(),
            normalizers.Replace(punctuation, ""),
            normalizers.Precompiled(stored.normalizer_spec.precompiled_charsmap),
            normalizers.Replace(Regex(r" {2,}"), " "),
            normalizers.Strip(),
        ]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "SiglipTokenizer", "model_max_length": LIMIT, "model_input_names": ["input_ids"]}
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "pad_token": "</s>", "eos_token": "</s>"}))
    return size


def test_the_class_in_python_is_compared_with_tokenizer_json_which_may_be_taken_as_it_stands(tmp_path: Path) -> None:
    folder = tmp_path / "siglip"
    folder.mkdir()
    tokens = sentencepiece_files(folder)
    kept = {path.name: path.read_bytes() for path in folder.iterdir()}
    save_siglip(folder, vocab_size=tokens)
    for path in folder.glob("*token*.json"):
        path.unlink()
    for name, content in kept.items():
        (folder / name).write_bytes(content)
    with pytest.raises(TokenizerError, match="--tokenizer file"):  # they differ in control characters
        build_artifact(folder, tmp_path / "out", all_tokens=True, images=False)
    artifact = build_artifact(folder, tmp_path / "out", images=False, tokenizer="file")
    assert filling_of(artifact) == 1
    with bei.Model(artifact.path, tune="off") as model:
        texts = ["A cat, on a mat!", "hello"]
        np.testing.assert_allclose(
            model.embed(texts), library_vectors(folder, transformers.SiglipModel, [], texts), atol=2e-4
        )
