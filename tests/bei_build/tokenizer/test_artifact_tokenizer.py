"""From a checkpoint's tokenizer files to the tokenizer.json of an artifact."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from bei.errors import CheckpointError, MissingDependencyError, TokenizerError
from bei_build.tokenizer.artifact_tokenizer import check_vocabulary, model_max_length
from bei_build.tokenizer.library_tokenizer import stored_tokenizer
from tests.support.checkpoints import (
    FAMILIES,
    bpe_tokenizer,
    save_checkpoint,
    unigram_tokenizer,
    wordpiece_tokenizer,
    write_json,
)
from tests.support.tokenizing import tokenizer_of

TEXTS = ["The cat sat on a mat.", "Hello   WORLD!", "Ünïcödé 世界", "", "[CLS] </s>"]
TOKENIZERS = [wordpiece_tokenizer, bpe_tokenizer, unigram_tokenizer]


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    result: list[int] = tokenizer.encode(text).ids
    return result


@pytest.mark.parametrize("make", TOKENIZERS)
def test_tokenizer_json_is_taken_as_it_is(make: Callable[[], Tokenizer], tmp_path: Path) -> None:
    tokenizer = make()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    read = tokenizer_of(tmp_path)
    assert json.loads(read.to_str()) == json.loads(tokenizer.to_str())


def test_truncation_and_padding_are_switched_off(tmp_path: Path) -> None:
    tokenizer = wordpiece_tokenizer()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    read = tokenizer_of(tmp_path)
    for text in TEXTS:
        assert ids(read, text) == ids(wordpiece_tokenizer(), text)


@pytest.mark.parametrize("make", TOKENIZERS)
def test_do_lower_case_lowers_before_everything_else(make: Callable[[], Tokenizer], tmp_path: Path) -> None:
    make().save(str(tmp_path / "tokenizer.json"))
    lowered = tokenizer_of(tmp_path, lowercase=True)
    for text in ("The CAT", "HELLO wörld", "ÀÉÎ"):
        assert ids(lowered, text) == ids(make(), text.lower())
    if make is not wordpiece_tokenizer:  # it lowers by itself
        assert ids(lowered, "HELLO") != ids(make(), "HELLO")


def test_vocab_txt_alone_is_enough(bert: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(bert, tmp_path / "checkpoint"))
    vocabulary = wordpiece_tokenizer().get_vocab()
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.txt").write_text(
        "\n".join(sorted(vocabulary, key=lambda word: vocabulary[word])), encoding="utf-8"
    )
    converted = tokenizer_of(folder)
    for text in TEXTS:
        assert ids(converted, text) == ids(wordpiece_tokenizer(), text)
    pair = converted.encode("the cat", "a mat")
    assert pair.ids == wordpiece_tokenizer().encode("the cat", "a mat").ids
    assert pair.type_ids == wordpiece_tokenizer().encode("the cat", "a mat").type_ids


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_without_tokenizer_files_is_refused(family: str, tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, family)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json.*Download the tokenizer's files too"):
        tokenizer_of(folder)


@pytest.mark.parametrize("content", ["", "{}", '{"model": {"type": "Nonsense"}}', "\x00" * 40])
def test_a_damaged_tokenizer_json_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json is not a readable tokenizer .*Download"):
        stored_tokenizer(tmp_path)


def test_a_vocabulary_must_fit_the_embedding_table() -> None:
    tokenizer = wordpiece_tokenizer()
    size = tokenizer.get_vocab_size()
    check_vocabulary(tokenizer, size)
    check_vocabulary(tokenizer, size + 64)  # tables are often padded
    with pytest.raises(TokenizerError, match=rf"up to {size - 1} \(.*\), but the embedding table has {size - 1} rows"):
        check_vocabulary(tokenizer, size - 1)
    tokenizer.add_tokens(["[NEW]"])
    with pytest.raises(TokenizerError, match="belongs to another checkpoint"):
        check_vocabulary(tokenizer, size)


@pytest.mark.parametrize(
    ("value", "expected"), [(128, 128), (512.0, 512), (int(1e30), None), (1e30, None), (0, None), ("512", None)]
)
def test_model_max_length_is_none_where_it_means_no_limit(value: object, expected: int | None, tmp_path: Path) -> None:
    assert model_max_length(tmp_path) is None
    write_json(tmp_path / "tokenizer_config.json", {"model_max_length": value})
    assert model_max_length(tmp_path) == expected


def test_a_damaged_tokenizer_config_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json does not hold a JSON object"):
        model_max_length(tmp_path)


def test_a_tokenizer_in_python_alone_is_refused_by_name(tmp_path: Path) -> None:
    write_json(tmp_path / "tokenizer_config.json", {"tokenizer_class": "PhobertTokenizer"})
    write_json(tmp_path / "config.json", {"model_type": "roberta"})
    for name in ("vocab.txt", "bpe.codes"):
        (tmp_path / name).write_text("a 1\nb 1\n")
    with pytest.raises(TokenizerError, match=r"PhobertTokenizer\) is written in Python, and bei runs those of"):
        tokenizer_of(tmp_path)


def sentencepiece_alone(folder: Path) -> Path:
    """An XLM-RoBERTa's files without a tokenizer.json, as in old checkpoints."""
    import sentencepiece

    words = folder / "words.txt"
    words.write_text("the quick brown fox\nhello world\nthe cat sat on a mat\n" * 20)
    model = folder / "sentencepiece.bpe"
    sentencepiece.SentencePieceTrainer.train(
        input=str(words), model_prefix=str(model), vocab_size=60, hard_vocab_limit=False, minloglevel=2
    )
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "XLMRobertaTokenizer"})
    write_json(folder / "config.json", {"model_type": "xlm-roberta"})
    return folder


def test_a_sentencepiece_model_alone_is_enough(tmp_path: Path) -> None:
    folder = sentencepiece_alone(tmp_path)
    library = AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        assert ids(tokenizer_of(folder), text) == library(text)["input_ids"]


@pytest.mark.parametrize(("module", "package"), [("sentencepiece", "sentencepiece"), ("google.protobuf", "protobuf")])
def test_what_reads_a_sentencepiece_model_is_named_where_it_is_missing(
    module: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = sentencepiece_alone(tmp_path)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingDependencyError, match=rf"sentencepiece\.bpe\.model .*'{package}': pip install"):
        tokenizer_of(folder)
