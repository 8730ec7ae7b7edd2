"""The artifact's tokenizer against transformers' for the same folder, text by text and pair by pair.

One difference is intended: a folder whose tokenizer_config.json asks for tokens that its tokenizer.json does not add.
transformers up to 4 added them, 5 only does if it is told to.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer

from bei.errors import TokenizerError
from bei_build.checkpoint.locate import locate
from bei_build.checkpoint.read import read_checkpoint
from tests.support.checkpoints import (
    add_modules,
    bpe_tokenizer,
    save_checkpoint,
    unigram_tokenizer,
    wordpiece_tokenizer,
    write_json,
)
from tests.support.tokenizing import tokenizer_of

HELD_OUT = Path(__file__).parents[3] / "build" / "bei_build" / "data" / "held_out.txt"
TEXTS = [
    *(line for line in HELD_OUT.read_text(encoding="utf-8").splitlines() if line),
    "",
    "   ",
    "  two spaces  inside  and outside  ",
    "tabs\tand\nlines\r\n",
    "ÀÉÎ e\u0301 ﬁ ½ Ⅷ",
    "世界 مرحبا שלום 🙂👩‍👩‍👧",
    "[CLS] [SEP] <s> </s> <|endoftext|> <pad>",
    "x" * 300,
]
PAIRS = [(TEXTS[index], TEXTS[-index - 2]) for index in range(1, 30) if TEXTS[-index - 2]]

LLAMA = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
FAST = {"tokenizer_class": "PreTrainedTokenizerFast"}


def llama_tokenizer() -> Tokenizer:
    """Like Llama's and Mistral's: BPE on pieces with byte fallback, ``<s>`` in front."""
    special = ["<unk>", "<s>", "</s>"]
    bytes_ = [f"<0x{value:02X}>" for value in range(256)]
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("i", "n"), ("▁", "a")]
    letters = [chr(code) for code in range(33, 127)] + ["▁"]
    vocabulary = {piece: index for index, piece in enumerate([*special, *bytes_, *letters, *map("".join, merges)])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def qwen_tokenizer(*, appends: bool = True) -> Tokenizer:
    """Like Qwen3-Embedding's: byte-level BPE on NFC, ``<|endoftext|>`` at the end; ``appends`` False: like Qwen's
    own."""
    tokenizer = bpe_tokenizer()
    vocabulary = json.loads(tokenizer.to_str())["model"]
    words = {word: index for index, word in enumerate(w for w in vocabulary["vocab"] if not w.startswith("<"))}
    tokenizer = Tokenizer(models.BPE(words, [tuple(merge) for merge in vocabulary["merges"]]))
    tokenizer.add_special_tokens([AddedToken("<|endoftext|>", special=True, normalized=False)])
    tokenizer.normalizer = normalizers.NFC()
    split = Regex(r"\p{N}| ?[^\s\p{L}\p{N}]+|[^\r\n\p{L}\p{N}]?\p{L}+|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(split, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    offsets = processors.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    end = ("<|endoftext|>", tokenizer.token_to_id("<|endoftext|>"))
    template = processors.TemplateProcessing(
        single="$A <|endoftext|>", pair="$A <|endoftext|> $B <|endoftext|>", special_tokens=[end]
    )
    tokenizer.post_processor = processors.Sequence([offsets, template]) if appends else offsets
    return tokenizer


def folder_of(folder: Path, tokenizer: Tokenizer, config: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", config)
    return folder


def assert_equal(folder: Path, **how: Any) -> None:
    """Ours and transformers' give the same ids and types; ``how``: arguments for transformers."""
    ours = tokenizer_of(folder)
    theirs = AutoTokenizer.from_pretrained(folder, **how)
    plain = {"truncation": False, "padding": False, "return_token_type_ids": True}
    for text in TEXTS:
        assert ours.encode(text).ids == theirs(text, **plain)["input_ids"], text
    for pair in PAIRS:
        encoding, expected = ours.encode(*pair), theirs(*pair, **plain)
        assert (encoding.ids, encoding.type_ids) == (expected["input_ids"], expected["token_type_ids"]), pair


STYLES: list[tuple[Callable[[], Tokenizer], dict[str, Any]]] = [
    (wordpiece_tokenizer, {**FAST, "model_max_length": 512}),
    (wordpiece_tokenizer, {"tokenizer_class": "BertTokenizer", "do_lower_case": True}),
    (bpe_tokenizer, FAST),
    (unigram_tokenizer, {**FAST, "model_max_length": 512}),
    (llama_tokenizer, FAST),
    (llama_tokenizer, LLAMA),
    (llama_tokenizer, {**LLAMA, "add_bos_token": True, "add_eos_token": False}),
    (qwen_tokenizer, FAST),
    (qwen_tokenizer, {**FAST, "eos_token": "<|endoftext|>", "add_bos_token": False}),
]


@pytest.mark.parametrize("baked", [False, True], ids=["plain", "padding and truncation on"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    ("make", "config"),
    STYLES,
    ids=[f"{make.__name__}-{len(config)}-{config['tokenizer_class']}" for make, config in STYLES],
)
def test_ids_and_types_are_those_of_transformers(
    make: Callable[[], Tokenizer], config: dict[str, Any], side: str, baked: bool, tmp_path: Path
) -> None:
    tokenizer = make()
    if baked:
        tokenizer.enable_padding(direction=side, length=96)
        tokenizer.enable_truncation(32, direction=side)
    folder_of(tmp_path, tokenizer, {**config, "padding_side": side})
    assert_equal(tmp_path)
    if baked:
        saved = json.loads(tokenizer_of(tmp_path).to_str())
        assert (saved["padding"], saved["truncation"]) == (None, None)


@pytest.mark.parametrize("make", [wordpiece_tokenizer, bpe_tokenizer, unigram_tokenizer])
def test_pairs_are_joined_as_the_family_joins_them(make: Callable[[], Tokenizer], tmp_path: Path) -> None:
    folder_of(tmp_path, make(), FAST)
    pair = tokenizer_of(tmp_path).encode("the cat", "the")
    special = [token for token in pair.tokens if token in ("[CLS]", "[SEP]", "<s>", "</s>")]
    if make is wordpiece_tokenizer:
        assert special == ["[CLS]", "[SEP]", "[SEP]"]
        assert pair.type_ids == [0, 0, 0, 0, 1, 1]
    else:
        assert special == ["<s>", "</s>", "</s>", "</s>"]
        assert set(pair.type_ids) == {0}


# Tokens that only tokenizer_config.json asks for.


@pytest.mark.parametrize(
    ("config", "single"),
    [
        ({**LLAMA, "add_eos_token": True}, ["<s>", "▁the", "</s>"]),  # as e5-mistral: nothing is said of BOS
        ({**LLAMA, "add_bos_token": True, "add_eos_token": True}, ["<s>", "▁the", "</s>"]),
        ({**LLAMA, "add_bos_token": True, "add_eos_token": False}, ["<s>", "▁the"]),
        ({**LLAMA, "add_bos_token": False, "add_eos_token": True}, ["<s>", "▁the", "</s>"]),
        (
            {**LLAMA, "eos_token": {"__type": "AddedToken", "content": "</s>"}, "add_eos_token": True},
            ["<s>", "▁the", "</s>"],
        ),
        ({**LLAMA, "eos_token": "<new>", "add_eos_token": True}, ["<s>", "▁the", "<new>"]),
        ({**LLAMA, "eos_token": None, "add_eos_token": True}, ["<s>", "▁the"]),
    ],
)
def test_an_eos_that_is_asked_for_is_added_and_nothing_is_taken_away(
    config: dict[str, Any], single: list[str], tmp_path: Path
) -> None:
    folder_of(tmp_path, llama_tokenizer(), config)
    tokenizer = tokenizer_of(tmp_path)
    assert tokenizer.encode("the").tokens == single
    if "</s>" in single:
        assert_equal(tmp_path, add_bos_token=True, add_eos_token=True)


def test_bos_and_eos_are_added_around_a_tokenizer_that_adds_nothing(tmp_path: Path) -> None:
    tokenizer = llama_tokenizer()
    tokenizer.post_processor = None
    folder_of(tmp_path, tokenizer, {**LLAMA, "add_bos_token": True, "add_eos_token": True})
    assert_equal(tmp_path, add_bos_token=True, add_eos_token=True)


def test_offsets_stay_as_a_byte_level_processor_sets_them(tmp_path: Path) -> None:
    """The layout of gte-Qwen2: the EOS is added by its own code, and asked for in tokenizer_config.json."""
    config = {**FAST, "eos_token": "<|endoftext|>", "add_eos_token": True}
    folder_of(tmp_path / "asked", qwen_tokenizer(appends=False), config)
    folder_of(tmp_path / "own", qwen_tokenizer(), FAST)
    asked, own = (tokenizer_of(tmp_path / name) for name in ("asked", "own"))
    for text in TEXTS:
        assert (asked.encode(text).ids, asked.encode(text).offsets) == (own.encode(text).ids, own.encode(text).offsets)
    assert_equal(tmp_path / "asked", add_bos_token=False, add_eos_token=True)


def test_the_token_is_found_in_special_tokens_map_too(tmp_path: Path) -> None:
    folder_of(tmp_path, llama_tokenizer(), {"tokenizer_class": "LlamaTokenizer", "add_eos_token": True})
    write_json(tmp_path / "special_tokens_map.json", {"bos_token": "<s>", "eos_token": {"content": "</s>"}})
    assert tokenizer_of(tmp_path).encode("the").tokens == ["<s>", "▁the", "</s>"]


def test_a_template_with_other_tokens_is_left_as_it_is(tmp_path: Path) -> None:
    config = {**FAST, "bos_token": "[PAD]", "eos_token": "[MASK]", "add_bos_token": True, "add_eos_token": True}
    folder_of(tmp_path, wordpiece_tokenizer(), config)
    assert tokenizer_of(tmp_path).encode("the").tokens == ["[CLS]", "the", "[SEP]"]


# transformers' pipeline counts where it rebuilds one.


def test_the_pipeline_is_the_classs_and_that_of_the_file_can_be_asked_for(tmp_path: Path) -> None:
    """The file drops spaces, like Prompt Guard's: transformers selects the class by name and rebuilds its own
    pipeline."""
    tokenizer = wordpiece_tokenizer()
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Replace(" ", ""), normalizers.BertNormalizer(lowercase=True)]
    )
    folder_of(tmp_path, tokenizer, {"tokenizer_class": "BertTokenizer"})
    assert tokenizer_of(tmp_path).encode("t h e").tokens == ["[CLS]", "t", "h", "e", "[SEP]"]
    assert_equal(tmp_path)
    assert tokenizer_of(tmp_path, choice="file").encode("t h e").tokens == ["[CLS]", "the", "[SEP]"]


def test_a_class_that_takes_the_vocabulary_for_another_models_is_refused(tmp_path: Path) -> None:
    """Like an old revision of paraphrase-multilingual-MiniLM-L12-v2: a BERT with XLM-RoBERTa's tokenizer, and no class
    named. transformers 5 reads its pieces as BERT's and finds hardly one."""
    save_checkpoint(tmp_path, vocab_size=200)
    folder_of(tmp_path, unigram_tokenizer(), {"do_lower_case": True, "unk_token": "<unk>", "cls_token": "<s>"})
    location = locate(str(tmp_path))
    with pytest.raises(TokenizerError, match=r"of Unigram, and transformers .* one of WordPiece, with BertTokenizer"):
        read_checkpoint(location)
    as_stored = read_checkpoint(location, tokenizer_choice="file").tokenizer
    assert as_stored.encode("the cat").ids == unigram_tokenizer().encode("the cat").ids
    assert read_checkpoint(location, tokenizer_choice="transformers").tokenization.tokenizer_class == "BertTokenizer"


def test_code_of_its_own_is_not_run(tmp_path: Path) -> None:
    folder_of(
        tmp_path, bpe_tokenizer(), {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    )
    write_json(tmp_path / "config.json", {"model_type": "own"})
    with pytest.raises(TokenizerError, match=r"code of its own \(auto_map .* --tokenizer file"):
        tokenizer_of(tmp_path)
    assert tokenizer_of(tmp_path, choice="file").encode("the").ids == bpe_tokenizer().encode("the").ids


# Markers that were one token in training.


@pytest.mark.parametrize("marker", ["[Q] ", "[Q]"])
def test_a_marker_of_the_vocabulary_is_one_token_however_it_is_stored(marker: str, tmp_path: Path) -> None:
    tokenizer = wordpiece_tokenizer()
    tokenizer.add_tokens([AddedToken(marker, normalized=True)])  # lower-casing hides it from its own text
    folder_of(tmp_path, tokenizer, FAST)
    assert marker not in tokenizer.encode("[Q] the").tokens
    ours = tokenizer_of(tmp_path, markers=(*["[Q] "],))
    assert ours.encode("[Q] the").tokens == ["[CLS]", marker, "the", "[SEP]"]


def test_a_marker_outside_the_vocabulary_stays_a_text(tmp_path: Path) -> None:
    folder_of(tmp_path, wordpiece_tokenizer(), FAST)
    ours = tokenizer_of(tmp_path, markers=(*["query: ", "", "the "],))
    assert ours.get_vocab_size() == wordpiece_tokenizer().get_vocab_size()
    for text in TEXTS:
        assert ours.encode(text).ids == wordpiece_tokenizer().encode(text).ids


def test_a_model_of_a_class_of_its_own_has_its_tokenizer_read(tmp_path: Path) -> None:
    """Like llama-nemotron-embed: transformers, which does not know the model, fails at its rotation."""
    folder_of(tmp_path, bpe_tokenizer(), FAST)
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope = {**scaling, "original_max_position_embeddings": 8192}
    write_json(tmp_path / "config.json", {"model_type": "llama_bidirec", "rope_scaling": rope})
    assert tokenizer_of(tmp_path).encode("the cat").ids == bpe_tokenizer().encode("the cat").ids


def test_an_eos_that_is_asked_for_is_added_where_the_file_pads(tmp_path: Path) -> None:
    """Like a tokenizer that is saved after padding to a length: the padding is not one of the tokens around a text."""
    tokenizer = llama_tokenizer()
    tokenizer.add_special_tokens(["<pad>"])
    tokenizer.enable_padding(length=16, pad_token="<pad>", pad_id=tokenizer.token_to_id("<pad>"))
    folder_of(tmp_path, tokenizer, {**LLAMA, "add_eos_token": True})
    assert tokenizer_of(tmp_path).encode("the").tokens == ["<s>", "▁the", "</s>"]
    assert tokenizer_of(tmp_path, ends_in_eos=True).encode("the").tokens == ["<s>", "▁the", "</s>"]


def test_a_length_among_the_arguments_of_the_class_counts(tmp_path: Path) -> None:
    save_checkpoint(tmp_path)
    add_modules(tmp_path, ("mean",))
    write_json(tmp_path / "sentence_bert_config.json", {"tokenizer_args": {"model_max_length": 16, "revision": "main"}})
    checkpoint = read_checkpoint(locate(str(tmp_path)))
    assert checkpoint.max_seq_len == 16
    assert checkpoint.tokenizer_settings.arguments == {"model_max_length": 16}
