"""Static embeddings against means in numpy: model2vec's, without unknown tokens, and sentence-transformers'."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from string import ascii_letters
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import Whitespace

from bei.artifact.manifest import CERTIFICATE, TOKENIZER, Artifact
from bei.config.settings import ServeConfig
from bei.core import Encoding, Float32Array
from bei.errors import BuildError, CheckpointError, ConfigError, TokenizerError, WeightsError
from bei.service.loader import encoder_of
from bei.tokenizer.encoder import EncodingOptions
from bei_build.checkpoint.heads import HeadChoice
from bei_build.checkpoint.locate import locate
from bei_build.checkpoint.read import read_checkpoint
from bei_build.config import BuildConfig
from bei_build.pipeline import build
from bei_build.progress import Progress
from bei_build.reference.held_out import held_out_texts
from tests.support.builds import build_artifact, embed, open_engine, running
from tests.support.checkpoints import (
    HIDDEN,
    Dense,
    add_static_modules,
    bpe_tokenizer,
    read_tensors,
    save_dense,
    save_static,
    share_rows,
    unigram_tokenizer,
    wordpiece_tokenizer,
    write_json,
    write_tensors,
)
from tests.support.cpus import needs_bf16
from tests.support.oracle import static_embed

WRITERS = ("model2vec", "sentence-transformers")
TEXTS = [
    "the cat sat on a mat",
    "hello",
    "the \u2603 sat, \u4eca hello \u2603\u2603",
    "\u2603",  # nothing but an unknown token
    "[CLS] hello </s>",
    "hello the world " * 20,
]


def home_of(folder: Path) -> Path:
    """The folder with table and tokenizer."""
    return folder if (folder / "model.safetensors").is_file() else folder / "0_StaticEmbedding"


def vectors(artifact: Artifact) -> Float32Array:
    """Vectors of ``TEXTS`` in one packed batch, tokenized like the server."""
    tokenizer = Tokenizer.from_file(str(artifact.path / TOKENIZER))
    tokenizer.enable_truncation(artifact.manifest.max_seq_len)
    with running(artifact) as engine:
        return embed(engine, [Encoding(np.array(tokenizer.encode(text).ids, np.int32)) for text in TEXTS])


@pytest.mark.parametrize("make", [wordpiece_tokenizer, unigram_tokenizer, bpe_tokenizer])
@pytest.mark.parametrize("writer", WRITERS)
def test_vectors_are_means_of_rows(writer: str, make: Callable[[], Tokenizer], tmp_path: Path) -> None:
    folder = save_static(tmp_path / "static", writer, make)
    artifact = build_artifact(folder, tmp_path / "artifact", max_seq_len=48, verify=False)
    manifest = artifact.manifest
    assert (manifest.tasks, manifest.spec.num_layers, manifest.spec.num_heads) == (["embed"], 0, 0)
    expected = static_embed(home_of(folder), TEXTS, 48, with_unknown=writer != "model2vec")
    np.testing.assert_allclose(vectors(artifact), expected, atol=1e-6)


@pytest.mark.parametrize(("writer", "zeros"), [("model2vec", [3]), ("sentence-transformers", [])])
def test_model2vec_gives_zeros_for_a_text_of_unknown_tokens(writer: str, zeros: list[int], tmp_path: Path) -> None:
    actual = vectors(build_artifact(save_static(tmp_path / "static", writer), tmp_path / "artifact"))
    assert np.flatnonzero(~actual.any(axis=1)).tolist() == zeros


@pytest.mark.parametrize(
    "stored",
    [
        {},
        {"dtype": torch.float16, "mapping": torch.int32},
        {"dtype": torch.int8, "weights": torch.float64},
        {"dtype": torch.int8, "mapping": None, "weights": None},
        {"weights": None},
        {"mapping": None},
    ],
    ids=["both", "float16", "int8", "int8 alone", "mapping", "weights"],
)
def test_tokens_of_model2vec_may_share_rows(stored: dict[str, Any], tmp_path: Path) -> None:
    folder = share_rows(save_static(tmp_path / "static"), **stored)
    artifact = build_artifact(folder, tmp_path / "artifact")
    expected = static_embed(folder, TEXTS, 512, with_unknown=False)
    np.testing.assert_allclose(vectors(artifact), expected, rtol=1e-6, atol=1e-6)
    assert artifact.certificate.reference.startswith("bei's PyTorch module")
    assert artifact.certificate.outputs[0].cosine_mean >= 0.99999


def test_sentence_transformers_knows_no_shared_rows(tmp_path: Path) -> None:
    folder = save_static(tmp_path / "static", "sentence-transformers")
    tensors = read_tensors(home_of(folder))
    write_tensors(home_of(folder), {**tensors, "mapping": torch.zeros(len(tensors["embedding.weight"]))})
    with pytest.raises(WeightsError, match="Tensor mapping is not part of this architecture"):
        read_checkpoint(locate(str(folder))).weights()


@needs_bf16
@pytest.mark.parametrize("writer", WRITERS)
def test_bf16_is_close(writer: str, tmp_path: Path) -> None:
    folder = save_static(tmp_path / "static", writer)
    actual = vectors(build_artifact(folder, tmp_path / "artifact", precision="bf16"))
    expected = static_embed(home_of(folder), TEXTS, 512, with_unknown=writer != "model2vec")
    lengths = np.linalg.norm(actual, axis=1) * np.linalg.norm(expected, axis=1)
    cosines = (actual * expected).sum(axis=1)[lengths > 0] / lengths[lengths > 0]
    assert len(cosines) >= len(TEXTS) - 1
    assert cosines.min() >= 0.999


def test_held_out_texts_without_tokens_do_not_fail_the_build(tmp_path: Path) -> None:
    def make() -> Tokenizer:
        """A tokenizer of Latin letters that drops all others."""
        tokenizer = Tokenizer(BPE({letter: index for index, letter in enumerate(ascii_letters)}, []))
        tokenizer.pre_tokenizer = Whitespace()
        return tokenizer

    artifact = build_artifact(save_static(tmp_path / "static", tokenizer=make), tmp_path / "artifact", all_texts=True)
    certificate = json.loads((artifact.path / CERTIFICATE).read_bytes())
    assert 90 < certificate["num_texts"] < len(held_out_texts())
    assert certificate["passed"]


def test_modules_behind_the_mean_are_obeyed(tmp_path: Path) -> None:
    folder = save_static(tmp_path / "static", "sentence-transformers")
    add_static_modules(folder, "0_StaticEmbedding", "Dense", "Normalize")
    dense = save_dense(folder / "1_Dense", HIDDEN, Dense(12, "Tanh"))
    artifact = build_artifact(folder, tmp_path / "artifact", verify=False)
    means = static_embed(home_of(folder), TEXTS, 512, with_unknown=True)
    expected = torch.tanh(torch.nn.functional.linear(torch.from_numpy(means), *dense.values()))
    np.testing.assert_allclose(vectors(artifact), expected.numpy(), atol=1e-5)
    assert artifact.manifest.embedding is not None
    assert artifact.manifest.embedding.normalize


@pytest.mark.parametrize(
    ("config", "asked", "length"),
    [({}, None, 512), ({"max_length": 16}, None, 16), ({"max_length": None}, None, 8192), ({}, 2000, 2000)],
    ids=str,
)
def test_model2vec_reads_512_tokens_unless_told_otherwise(
    config: dict[str, Any], asked: int | None, length: int, tmp_path: Path
) -> None:
    folder = save_static(tmp_path / "static", **config)
    write_json(folder / "tokenizer_config.json", {"model_max_length": 77})  # which model2vec does not read
    artifact = build_artifact(folder, tmp_path / "artifact", max_seq_len=asked)
    assert artifact.manifest.max_seq_len == length


def test_model2vec_reads_no_more_characters_than_its_usual_tokens_have(tmp_path: Path) -> None:
    """StaticModel cuts a text at max_length times the median length of its tokens, before it tokenizes (0.10.0)."""
    artifact = build_artifact(save_static(tmp_path / "static", max_length=20), tmp_path / "artifact")
    tokens = wordpiece_tokenizer().get_vocab()
    usual = int(np.median([len(token) for token in tokens]))
    assert artifact.manifest.tokenization is not None
    assert artifact.manifest.tokenization.chars_per_token == usual
    encoder = encoder_of(artifact, ServeConfig())
    assert encoder is not None
    text = "the" + " " * (20 * usual - 6) + "cat sat on a mat"
    whole, cut = encoder.encode([" ".join(text.split()), text])
    assert not whole.truncated
    assert cut.truncated
    assert cut.input_ids.tolist() == wordpiece_tokenizer().encode("the cat", add_special_tokens=False).ids
    assert encoder.encode([text], EncodingOptions(whole=True))[0].num_tokens == whole.num_tokens


def test_model2vec_without_a_length_reads_all_characters(tmp_path: Path) -> None:
    tokenization = build_artifact(save_static(tmp_path / "static", max_length=None), tmp_path / "artifact")
    assert tokenization.manifest.tokenization is not None
    assert not tokenization.manifest.tokenization.chars_per_token


@pytest.mark.parametrize(("truncation", "length"), [(None, 8192), (20, 20)])
def test_sentence_transformers_reads_what_tokenizer_json_leaves(
    truncation: int | None, length: int, tmp_path: Path
) -> None:
    def make() -> Tokenizer:
        tokenizer = wordpiece_tokenizer()
        if truncation:
            tokenizer.enable_truncation(truncation)
        return tokenizer

    folder = save_static(tmp_path / "static", "sentence-transformers", make)
    assert build_artifact(folder, tmp_path / "artifact").manifest.max_seq_len == length


@pytest.mark.parametrize(
    ("config", "modules", "normalize"),
    [
        ({}, False, False),  # model2vec's default
        ({"normalize": None}, False, False),
        ({"normalize": True}, False, True),
        ({"normalize": True}, True, False),  # modules.json without Normalize says more
    ],
)
def test_vectors_have_unit_length_where_the_files_say_so(
    config: dict[str, Any], modules: bool, normalize: bool, tmp_path: Path
) -> None:
    folder = save_static(tmp_path / "static", **config)
    if not modules:
        (folder / "modules.json").unlink()
    embedding = build_artifact(folder, tmp_path / "artifact").manifest.embedding
    assert embedding is not None
    assert (embedding.pooling, embedding.normalize) == ("mean", normalize)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"max_length": "512"}, "max_length = '512': correct it to a number of tokens, or null"),
        ({"max_length": 0}, "max_length = 0: correct"),
        ({"normalize": "yes"}, "normalize = 'yes': correct it to true or false"),
    ],
)
def test_a_config_that_is_not_understood_is_refused(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_checkpoint(locate(str(save_static(tmp_path, **config))))


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"weights": torch.ones(3)}, WeightsError, r"Tensor weights has shape \[3\] for \d+ tokens"),
        ({"mapping": torch.ones(200)}, WeightsError, "Tensor mapping is F32, and must hold integers"),
        ({"mapping": torch.full((200,), 999)}, WeightsError, r"mapping does not say .* which of the \d+ rows"),
        ({"mapping": torch.full((200,), -1)}, WeightsError, r"mapping does not say .* which of the \d+ rows"),
        ({"mapping": torch.zeros(3, dtype=torch.int64)}, TokenizerError, "the embedding table has 3 rows"),
        ({"head": torch.ones(3)}, WeightsError, "Tensor head is not part of this architecture"),
        ({"embeddings": torch.ones(200, 4, dtype=torch.int16)}, WeightsError, "Tensor embeddings is I16, not 16-"),
        ({"embeddings": torch.ones(7)}, WeightsError, "Tensor embeddings is missing or no matrix"),
        ({"embeddings": torch.ones(7, 4)}, TokenizerError, "the embedding table has 7 rows"),
    ],
)
def test_tensors_that_are_not_understood_are_refused(
    changed: dict[str, torch.Tensor], error: type[BuildError], message: str, tmp_path: Path
) -> None:
    folder = save_static(tmp_path / "static")
    write_tensors(folder, {**read_tensors(folder), **changed})
    with pytest.raises(error, match=message), read_checkpoint(locate(str(folder))).weights() as weights:
        weights.read("embeddings.word.weight")


@pytest.mark.parametrize("choice", [HeadChoice(pooling="cls"), HeadChoice(token_states=True)])
@pytest.mark.parametrize("writer", WRITERS)
def test_there_are_means_only(writer: str, choice: HeadChoice, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Static.* gives means .* leave pooling and token_embeddings out"):
        read_checkpoint(locate(str(save_static(tmp_path, writer))), choice)
    assert read_checkpoint(locate(str(tmp_path)), HeadChoice(pooling="mean")).spec.heads[0].pooling == ("mean",)


@pytest.mark.parametrize("writer", WRITERS)
def test_notes_say_what_limits_a_text_and_nothing_of_pooling(writer: str, tmp_path: Path) -> None:
    config_json: dict[str, Any] = {"max_length": None} if writer == "model2vec" else {}
    folder = save_static(tmp_path / "static", writer, **config_json)
    if writer == "model2vec":
        (folder / "modules.json").unlink()
    text = io.StringIO()
    config = BuildConfig(model=str(folder), out=str(tmp_path / "artifact"), precision="fp32")
    build(config, open_engine, Progress(Console(file=text, width=200)))
    assert "the model takes any number of tokens; built for 8,192 (see --max-seq-len)" in text.getvalue()
    assert "pooling" not in text.getvalue()


def test_there_is_no_hf_reference(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"transformers has no StaticModel\. Use --reference engine"):
        build_artifact(save_static(tmp_path / "static"), tmp_path / "artifact", reference="hf")


def test_another_models_config_is_not_taken_for_a_static_one(tmp_path: Path) -> None:
    folder = save_static(tmp_path, model_type="bert", architectures=["BertModel"], num_hidden_layers=0)
    with pytest.raises(CheckpointError, match=r"modules\.json asks for StaticEmbedding, but .* describes a BertModel"):
        read_checkpoint(locate(str(folder)))
    (folder / "modules.json").unlink()
    with pytest.raises(CheckpointError, match="a model without layers"):
        read_checkpoint(locate(str(folder)))
