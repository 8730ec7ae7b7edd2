"""Entities are those of transformers' own token classification pipeline, given the same logits."""

from __future__ import annotations

import functools
import tempfile
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bei.core import Float32Array
from bei.engine.postprocess import apply_function
from bei.tasks.entities import Aggregation, Entity, entities_of
from bei.tokenizer.encoder import EncodingOptions, TextEncoder
from tests.support.checkpoints import bpe_tokenizer, unigram_tokenizer, wordpiece_tokenizer

MAX_TOKENS = 64
WITH_SPANS = EncodingOptions(with_spans=True)
TOKENIZERS = {
    "wordpiece": (wordpiece_tokenizer, {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}),
    "byte-level bpe": (bpe_tokenizer, {"unk_token": "<unk>", "cls_token": "<s>", "sep_token": "</s>"}),
    "unigram": (unigram_tokenizer, {"unk_token": "<unk>", "cls_token": "<s>", "sep_token": "</s>"}),
}
LABELS = {
    "BIO": ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"],
    "plain": ["O", "PER", "LOC"],
    "other forms": ["S-PER", "E-PER", "B-O", "I-MISC-X", "O", "half-time"],
}

# Composed characters, and spaces as the only blanks: what else differs is pinned below.
_pieces = st.sampled_from(
    [
        "the",
        "cat",
        "hello",
        "Anna-Maria",
        "o'neil",
        "inn",
        "é",
        "ß",
        "世界",
        "😀",
        "☃",
        "x" * 30,
        ".",
        ", ",
        "(",
        " ",
        "  ",
    ]
)
texts = st.lists(_pieces, max_size=25).map("".join)


@functools.cache
def encoder(kind: str) -> TextEncoder:
    with tempfile.TemporaryDirectory() as folder:
        TOKENIZERS[kind][0]().save(f"{folder}/tokenizer.json")
        return TextEncoder(Path(folder) / "tokenizer.json", MAX_TOKENS)


@functools.cache
def pipeline(kind: str, labels: str) -> Any:
    """transformers' pipeline around a model that is never run."""
    transformers: Any = pytest.importorskip("transformers")
    make, special = TOKENIZERS[kind]
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=make(), model_max_length=MAX_TOKENS, **special)
    shape = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    config = transformers.BertConfig(vocab_size=8, id2label=dict(enumerate(LABELS[labels])), **shape)
    model = transformers.BertForTokenClassification(config)
    return transformers.TokenClassificationPipeline(model=model, tokenizer=tokenizer)


def theirs(kind: str, labels: str, text: str, logits: Float32Array, aggregation: Aggregation) -> list[dict[str, Any]]:
    """What the pipeline makes of these logits; without aggregation, tokens outside too."""
    import torch

    pipe = pipeline(kind, labels)
    (inputs,) = pipe.preprocess(text, is_split_into_words=False, delimiter=None)
    assert inputs["input_ids"].shape[1] == len(logits)
    outputs = {**inputs, "logits": torch.from_numpy(logits)[None]}
    ignored: list[str] | None = [] if aggregation == "none" else None
    entities: list[dict[str, Any]] = pipe.postprocess([outputs], pipe_strategy(aggregation), ignored)
    return entities


def pipe_strategy(aggregation: Aggregation) -> Any:
    from transformers.pipelines.token_classification import AggregationStrategy

    return AggregationStrategy(aggregation)


def ours(kind: str, labels: str, text: str, seed: int, aggregation: Aggregation) -> tuple[list[Entity], Float32Array]:
    """Our entities of ``text`` over random logits, and the logits."""
    encoding = encoder(kind).encode([text], WITH_SPANS)[0]
    shape = (encoding.num_tokens, len(LABELS[labels]))
    logits = (3 * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)
    scores = apply_function(logits, "softmax")
    return entities_of(text, encoding, scores, LABELS[labels], aggregation), logits


def place(entity: Entity) -> tuple[str, int, int]:
    return entity.label, entity.start, entity.end


@pytest.mark.filterwarnings("ignore:Tokenizer does not support real words")
@pytest.mark.parametrize("aggregation", get_args(Aggregation))
@pytest.mark.parametrize("labels", list(LABELS))
@pytest.mark.parametrize("kind", list(TOKENIZERS))
@settings(max_examples=15, deadline=None)
@given(text=texts, seed=st.integers(0, 2**32 - 1))
@example(text="Anna-Maria o'neil, (the) cat.", seed=0)
@example(text="", seed=0)
@example(text="the cat " * 40, seed=1)  # cut
def test_entities_are_those_of_the_pipeline(
    kind: str, labels: str, aggregation: Aggregation, text: str, seed: int
) -> None:
    entities, logits = ours(kind, labels, text, seed, aggregation)
    expected = theirs(kind, labels, text, logits, aggregation)
    name = "entity" if aggregation == "none" else "entity_group"
    assert [place(entity) for entity in entities] == [(e[name], e["start"], e["end"]) for e in expected]
    np.testing.assert_allclose([e.score for e in entities], [e["score"] for e in expected], rtol=1e-5)
    for entity in entities:
        assert entity.text == text[entity.start : entity.end]


def words(kind: str, text: str) -> list[str]:
    """The words by which scores are aggregated: every token says something else, so nothing else is joined."""
    encoding = encoder(kind).encode([text], WITH_SPANS)[0]
    assert encoding.spans is not None
    labels = [f"L{index}" for index in range(int(encoding.spans.words.max()) + 1)]
    scores = np.eye(len(labels), dtype=np.float32)[np.maximum(encoding.spans.words, 0)]
    return [entity.text for entity in entities_of(text, encoding, scores, labels, "first")]


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        ("wordpiece", "hello, the cats.", ["hello", ",", "the", "cats", "."]),
        ("byte-level bpe", "hello, the", ["hello,", "the"]),
        ("unigram", "the, cats.", ["the,", "cats."]),
    ],
)
def test_words_are_the_tokenizer_s_where_it_marks_them_else_what_stands_between_blanks(
    kind: str, text: str, expected: Sequence[str]
) -> None:
    assert [word.strip() for word in words(kind, text)] == expected


@pytest.mark.parametrize("blank", ["\n", "\t", "\u00a0"])
@pytest.mark.parametrize("kind", ["byte-level bpe", "unigram"])
def test_a_word_ends_at_any_blank_where_the_pipeline_knows_spaces_only(kind: str, blank: str) -> None:
    assert words(kind, f"the{blank}the")[-1].strip() == "the"


# Astral characters, combining marks, scripts from right to left, joiners and variation selectors: where a character is
# several bytes, several UTF-16 units, or several of them are one to the eye.
_marked = st.text(
    st.sampled_from("aetzä世😀👩💻🏽𝔘𐍈אבمرحبا ﷺﬁ①")
    | st.sampled_from("\u0301\u0308\u200d\u200c\u202e\u200f\ufe0f\u20e3"),
    max_size=20,
)
_any_text = _marked | st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


def is_written_at(kind: str, token: str, text: str, start: int, end: int) -> bool:
    """Whether the vocabulary's ``token`` stands in this part of the text, as the tokenizer's normalizer reads it.

    Blanks around a token are not in its part, nor are marks that the normalizer composed with its last letter.
    """
    if token in ("[UNK]", "<unk>"):
        return start < end
    if kind == "byte-level bpe":
        byte_of = {symbol: byte for byte, symbol in zip(*_byte_level_alphabet(), strict=True)}
        return bytes(byte_of[symbol] for symbol in token).strip(b" ") in text[start:end].encode()
    while end < len(text) and unicodedata.combining(text[end]):
        end += 1
    written = TOKENIZERS[kind][0]().normalizer.normalize_str(text[start:end])
    return token.removeprefix("##") in written if kind == "wordpiece" else token.replace("▁", "") in written


@functools.cache
def _byte_level_alphabet() -> tuple[list[int], list[str]]:
    """Bytes and the characters that stand for them in byte-level vocabularies (GPT-2's table)."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return [*shown, *hidden], [*map(chr, shown), *(chr(256 + index) for index in range(len(hidden)))]


@pytest.mark.parametrize("aggregation", get_args(Aggregation))
@pytest.mark.parametrize("kind", list(TOKENIZERS))
@settings(max_examples=60, deadline=None)
@given(text=_any_text, seed=st.integers(0, 2**32 - 1))
@example(text="a👩🏽\u200d💻 e\u0301t אב", seed=0)
@example(text="😀😀 the cat", seed=0)
@example(text="ﬁ ① ﷺ", seed=0)
def test_offsets_count_code_points_and_cut_the_entity_out_of_any_text(
    kind: str, aggregation: Aggregation, text: str, seed: int
) -> None:
    entities, _ = ours(kind, "BIO", text, seed, aggregation)
    ends = [0]
    for entity in entities:
        assert 0 <= entity.start <= entity.end <= len(text)
        assert entity.text == text[entity.start : entity.end]
        token = encoder(kind).token(entity.token_id)
        assert is_written_at(kind, token, text, entity.start, entity.end), (token, entity)
        assert entity.end >= ends[-1]
        ends.append(entity.end)


def test_decomposed_accents_do_not_break_words_as_they_do_in_the_pipeline() -> None:
    assert words("wordpiece", "cat e\u0301a") == ["cat", "e\u0301a"]


def test_an_entity_of_several_tokens_has_the_mean_of_their_scores_for_every_label() -> None:
    text, labels = "the cat", ["O", "PER"]
    encoding = encoder("wordpiece").encode([text], WITH_SPANS)[0]
    scores = np.array([[1, 0], [0.25, 0.75], [0.375, 0.625], [1, 0]], np.float32)
    (entity,) = entities_of(text, encoding, scores, labels, "simple")
    assert (entity.text, entity.label, entity.score) == ("the cat", "PER", 0.6875)
    assert entity.token_id == encoding.input_ids[1]
    assert entity.scores.dtype == np.float32
    assert entity.scores.tolist() == [0.3125, 0.6875]


def test_without_aggregation_every_token_of_the_text_is_there_with_its_scores() -> None:
    text = "the cats"
    encoding = encoder("wordpiece").encode([text], WITH_SPANS)[0]
    scores = np.random.default_rng(0).random((encoding.num_tokens, 2)).astype(np.float32)
    tokens = entities_of(text, encoding, scores, ["O", "PER"], "none")
    assert [token.text for token in tokens] == ["the", "cat", "s"]
    assert [token.token_id for token in tokens] == encoding.input_ids[1:-1].tolist()
    np.testing.assert_array_equal([token.scores for token in tokens], scores[1:-1])
