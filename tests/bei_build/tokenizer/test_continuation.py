"""Options behind a text: one blank, whoever writes it."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from bei_build.tokenizer.continuation import continuing

WORDS = ["a", "\u2581", "\u2581a", "\u0120", "\u0120a"]


def tokenizer_of(normalizer: normalizers.Normalizer | None, splitter: pre_tokenizers.PreTokenizer | None) -> Tokenizer:
    merges = [("\u2581", "a"), ("\u0120", "a")]
    tokenizer = Tokenizer(models.BPE({word: place for place, word in enumerate(WORDS)}, merges))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if splitter is not None:
        tokenizer.pre_tokenizer = splitter
    return tokenizer


LLAMA_2 = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])


@pytest.mark.parametrize(
    ("normalizer", "splitter", "expected"),
    [
        (LLAMA_2, None, "{option}"),
        (None, pre_tokenizers.ByteLevel(add_prefix_space=False), " {option}"),
        (None, pre_tokenizers.Metaspace(), " {option}"),
    ],
)
def test_the_blank_is_left_out_where_the_tokenizer_writes_it(
    normalizer: normalizers.Normalizer | None, splitter: pre_tokenizers.PreTokenizer | None, expected: str
) -> None:
    tokenizer = tokenizer_of(normalizer, splitter)
    assert continuing(" {option}", tokenizer) == expected
    assert continuing("{option}!", tokenizer) == "{option}!"
    behind = tokenizer.encode(expected.replace("{option}", "a"), add_special_tokens=False).ids
    before = tokenizer.encode("a", add_special_tokens=False).ids
    assert before + behind == tokenizer.encode("a a", add_special_tokens=False).ids
