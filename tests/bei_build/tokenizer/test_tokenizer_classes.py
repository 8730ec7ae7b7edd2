"""Classes of transformers x settings of their files x texts: a server gives the ids, types and cuts of the class.

The vocabularies are small and made here; the classes are transformers' own, and so are the files they save.
"""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

from bei.errors import InvalidRequestError
from bei.tokenizer.encoder import EncodingOptions, Input, TextEncoder
from bei_build.tokenizer.artifact_tokenizer import artifact_tokenizer
from bei_build.tokenizer.library_tokenizer import TokenizerSettings, open_tokenizer
from bei_build.tokenizer.token_comparison import PROBES
from tests.support.checkpoints import write_json

WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "lazy",
    "dog",
    "a",
    "cat",
    "sat",
    "mat",
    "hello",
    "world",
    "in",
    "on",
    "it",
    "is",
    "text",
    "Ünï",
    "café",
]
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,:;!?-_'\"()éüïß世界東"
TEXTS = [
    *PROBES,
    "Hello WORLD, the Cat sat.",
    "[MARK] the <DOC> cat<DOC>[MARK]",
    "</s> the [SEP]cat <pad> [PAD] <mask>it",
    "the quick brown fox jumps over the lazy dog " * 3,
]
LIMIT = 14
LONGEST = 300


def wordpieces(special: Sequence[str]) -> dict[str, Any]:
    pieces = [*special, *LETTERS, *(f"##{letter}" for letter in LETTERS), *WORDS, "##ing", "hello", "déjà", "deja"]
    return {"vocab": {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}}


def byte_pairs(special: Sequence[str]) -> dict[str, Any]:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("Ġ", "c"), ("a", "t"), ("Ġc", "at"), ("c", "at"), ("i", "n")]
    pieces = [*special, *letters, *map("".join, merges)]
    return {"vocab": {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}, "merges": merges}


def end_of_word_pairs(special: Sequence[str]) -> dict[str, Any]:
    """Merges of CLIP: letters at the end of a word differ."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e</w>"), ("c", "a"), ("ca", "t</w>")]
    pieces = [*letters, *(f"{letter}</w>" for letter in letters), *map("".join, merges), *special]
    return {"vocab": {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}, "merges": merges}


def metaspace_pairs(special: Sequence[str]) -> dict[str, Any]:
    """Merges of Llama and Gemma: BPE on pieces with byte fallback."""
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("▁", "c"), ("a", "t"), ("▁c", "at"), ("i", "n"), ("▁", "▁")]
    pieces = [*special, *(f"<0x{value:02X}>" for value in range(256)), "▁", *LETTERS, *map("".join, merges)]
    return {"vocab": {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}, "merges": merges}


def unigrams(special: Sequence[str]) -> dict[str, Any]:
    pieces = dict.fromkeys(["▁", *LETTERS, *(f"▁{word}" for word in WORDS), "ing", "th"])
    scored = [(piece, 0.0) for piece in special] + [(piece, -2.0 - rank / 64) for rank, piece in enumerate(pieces)]
    return {"vocab": scored}


BERT = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
ROBERTA = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
ALBERT = ("<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]")
XLNET = ("<unk>", "<s>", "</s>", "<cls>", "<sep>", "<pad>", "<mask>", "<eod>", "<eop>")


@dataclass(frozen=True)
class Kind:
    """A class of transformers by name, the start of its models' vocabularies, and the config's model_type."""

    name: str
    vocabulary: Callable[[Sequence[str]], dict[str, Any]]
    special: tuple[str, ...]
    model_type: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    saved_as: str = ""

    @property
    def label(self) -> str:
        return f"{self.saved_as or self.name}-{self.model_type}"


KINDS = [
    Kind("BertTokenizer", wordpieces, BERT, "bert"),
    Kind("BertTokenizer", wordpieces, BERT, "bert", saved_as="BertTokenizerFast"),
    Kind("BertTokenizer", wordpieces, BERT, "distilbert", saved_as="DistilBertTokenizer"),
    Kind("BertTokenizer", wordpieces, BERT, "electra", saved_as="ElectraTokenizerFast"),
    Kind("BertTokenizer", wordpieces, BERT, "nomic_bert"),
    Kind("BertTokenizer", wordpieces, BERT, "layoutlm", saved_as="LayoutLMTokenizer"),
    Kind("MobileBertTokenizer", wordpieces, BERT, "mobilebert"),
    Kind("FunnelTokenizer", wordpieces, ("<pad>", "<unk>", "<cls>", "<sep>", "<mask>", "<s>", "</s>"), "funnel"),
    Kind("MPNetTokenizer", wordpieces, ("<s>", "<pad>", "</s>", "[UNK]", "<mask>"), "mpnet"),
    Kind("DPRQuestionEncoderTokenizer", wordpieces, BERT, "dpr"),
    Kind("RobertaTokenizer", byte_pairs, ROBERTA, "roberta"),
    Kind("BartTokenizer", byte_pairs, ROBERTA, "bart"),
    Kind("RobertaTokenizer", byte_pairs, ROBERTA, "longformer", saved_as="LongformerTokenizerFast"),
    Kind("DebertaTokenizer", byte_pairs, ("[CLS]", "[PAD]", "[SEP]", "[UNK]", "[MASK]"), "deberta"),
    Kind("GPT2Tokenizer", byte_pairs, ("<|endoftext|>",), "gpt2"),
    Kind("GPTNeoXTokenizer", byte_pairs, ("<|endoftext|>", "<|padding|>"), "gpt_neox"),
    Kind("Qwen2Tokenizer", byte_pairs, ("<|endoftext|>", "<|im_start|>", "<|im_end|>"), "qwen3"),
    Kind("CohereTokenizer", byte_pairs, ("<PAD>", "<UNK>", "<CLS>", "<SEP>", "<MASK_TOKEN>", "<BOS_TOKEN>"), "cohere"),
    Kind("GPT2Tokenizer", byte_pairs, ("<|endoftext|>", *BERT), "modernbert", saved_as="PreTrainedTokenizerFast"),
    Kind("CLIPTokenizer", end_of_word_pairs, ("<|startoftext|>", "<|endoftext|>"), "clip"),
    Kind("LlamaTokenizer", metaspace_pairs, ("<unk>", "<s>", "</s>"), "llama"),
    Kind("LlamaTokenizer", metaspace_pairs, ("<unk>", "<s>", "</s>"), "mistral"),
    Kind("GemmaTokenizer", metaspace_pairs, ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>"), "gemma3_text"),
    Kind("NllbTokenizer", metaspace_pairs, ROBERTA, "m2m_100"),
    Kind("XLMRobertaTokenizer", unigrams, ROBERTA, "xlm-roberta"),
    Kind("XLMRobertaTokenizer", unigrams, ROBERTA, "xlm-roberta", saved_as="PreTrainedTokenizerFast"),
    Kind("XLMRobertaTokenizer", unigrams, ROBERTA, "xlm-roberta", saved_as="TokenizersBackend"),
    Kind("CamembertTokenizer", unigrams, ("<s>NOTUSED", "<pad>", "</s>NOTUSED", "<unk>", "<mask>"), "camembert"),
    Kind("AlbertTokenizer", unigrams, ALBERT, "albert"),
    Kind("T5Tokenizer", unigrams, ("<pad>", "</s>", "<unk>"), "t5", {"extra_ids": 3}),
    Kind("DebertaV2Tokenizer", unigrams, ("[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]"), "deberta-v2"),
    Kind("BigBirdTokenizer", unigrams, ("<unk>", "<s>", "</s>", "<pad>", "[SEP]", "[MASK]", "[CLS]"), "big_bird"),
    Kind("MBartTokenizer", unigrams, ROBERTA, "mbart"),
    Kind("XLNetTokenizer", unigrams, XLNET, "xlnet"),
    Kind("RemBertTokenizer", unigrams, ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"), "rembert"),
    Kind("BarthezTokenizer", unigrams, ROBERTA, "mbart"),
    Kind("PegasusTokenizer", unigrams, ("<pad>", "</s>", "<mask_1>", "<mask_2>", "<unk>"), "pegasus"),
]

FLAGS = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}


def config_with(folder: Path, **values: Any) -> None:
    path = folder / "tokenizer_config.json"
    write_json(path, {**json.loads(path.read_text()), **values})


def tokenizer_with(folder: Path, **values: Any) -> None:
    path = folder / "tokenizer.json"
    write_json(path, {**json.loads(path.read_text()), **values})


def _decoder(folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    known = json.loads(path.read_text()).get("added_tokens_decoder", {})
    size = 1 + max(AutoTokenizer.from_pretrained(folder).get_vocab().values())
    new = {"[MARK]": {"special": True}, "<DOC>": {"special": False}}
    added = {str(size + place): {"content": name, **kind, **FLAGS} for place, (name, kind) in enumerate(new.items())}
    config_with(folder, added_tokens_decoder={**known, **added})


def _added_tokens(folder: Path) -> None:
    size = 1 + max(AutoTokenizer.from_pretrained(folder).get_vocab().values())
    write_json(folder / "added_tokens.json", {"[MARK]": size, "<DOC>": size + 1})


TRUNCATION = {"direction": "Left", "max_length": 9, "strategy": "LongestFirst", "stride": 0}
PADDING = {
    "strategy": {"Fixed": 20},
    "direction": "Left",
    "pad_to_multiple_of": None,
    "pad_id": 0,
    "pad_type_id": 0,
    "pad_token": "[PAD]",
}
SETTINGS: dict[str, Callable[[Path], None]] = {
    "as saved": lambda folder: None,
    "lower case": lambda folder: config_with(folder, do_lower_case=True),
    "case kept": lambda folder: config_with(folder, do_lower_case=False),
    "accents kept": lambda folder: config_with(folder, strip_accents=False, keep_accents=True),
    "accents stripped": lambda folder: config_with(folder, strip_accents=True),
    "chinese as one word": lambda folder: config_with(folder, tokenize_chinese_chars=False),
    "a space in front": lambda folder: config_with(folder, add_prefix_space=True),
    "no space in front": lambda folder: config_with(folder, add_prefix_space=False),
    "added_tokens_decoder": _decoder,
    "added_tokens.json": _added_tokens,
    "extra special tokens": lambda folder: config_with(folder, extra_special_tokens=["[MARK]", "<DOC>"]),
    "additional special tokens": lambda folder: config_with(folder, additional_special_tokens=["[MARK]"]),
    "cut on the left": lambda folder: config_with(folder, truncation_side="left"),
    "special tokens split": lambda folder: config_with(folder, split_special_tokens=True),
    "truncation in the file": lambda folder: tokenizer_with(folder, truncation=TRUNCATION),
    "padding in the file": lambda folder: tokenizer_with(folder, padding=PADDING),
    "cleaned up": lambda folder: config_with(folder, clean_up_tokenization_spaces=True),
    "legacy": lambda folder: config_with(folder, legacy=True),
    "not legacy": lambda folder: config_with(folder, legacy=False),
    "its own length": lambda folder: config_with(folder, model_max_length=LIMIT),
    "no token types": lambda folder: config_with(folder, model_input_names=["input_ids", "attention_mask"]),
}


def save(kind: Kind, folder: Path) -> Path:
    tokenizer = getattr(transformers, kind.name)(**kind.vocabulary(kind.special), **kind.settings)
    tokenizer.save_pretrained(folder)
    write_json(folder / "config.json", {"model_type": kind.model_type})
    if kind.saved_as:
        config_with(folder, tokenizer_class=kind.saved_as)
    return folder


class Both:
    """The library's tokenizer of a folder, called as users call it, and the server's encoder of the artifact's."""

    def __init__(self, folder: Path, **reading: Any) -> None:
        self.library = AutoTokenizer.from_pretrained(folder)
        asked = TokenizerSettings(**reading)
        opened = open_tokenizer(folder, asked)
        artifact_tokenizer(opened, asked, folder).save(str(folder / "artifact.json"))
        self.encoder = TextEncoder(
            folder / "artifact.json",
            LONGEST,
            truncation_side=opened.truncation_side,
            split_special_tokens=opened.splits_special_tokens,
        )
        self.has_types = opened.gives_token_types

    def differences(self, inputs: Sequence[tuple[str, ...]], limit: int) -> list[tuple[str, ...]]:
        """The ``inputs``, all texts or all pairs, whose ids or types differ."""
        # In a batch: alone, a pair whose second text is empty would be one text.
        sides = (list(side) for side in zip(*inputs, strict=True))
        expected = self.library(*sides, truncation=True, max_length=limit, return_token_type_ids=True)
        rows = zip(inputs, expected["input_ids"], expected["token_type_ids"], strict=True)
        return [texts for texts, ids, types in rows if self._actual(texts, limit) != (ids, self._types(types))]

    def _actual(self, texts: tuple[str, ...], limit: int) -> tuple[list[int], list[int]]:
        asked: Input = texts[0] if len(texts) == 1 else (texts[0], texts[1])
        try:
            (encoding,) = self.encoder.encode([asked], EncodingOptions(truncate=True, max_tokens=limit))
        except InvalidRequestError:  # no tokens
            return [], []
        types = np.zeros(encoding.num_tokens, int) if encoding.token_type_ids is None else encoding.token_type_ids
        return encoding.input_ids.tolist(), self._types(types.tolist())

    def _types(self, types: list[int]) -> list[int]:
        return types if self.has_types else []


SINGLES = [(text,) for text in TEXTS]
PAIRS = list(zip(TEXTS, [*TEXTS[1:], TEXTS[0]], strict=True))


def in_tiers() -> list[Any]:
    """Parameters: the first tier takes every second kind."""
    return [
        pytest.param(kind, id=kind.label, marks=pytest.mark.slow if place % 2 else ())
        for place, kind in enumerate(KINDS)
    ]


@pytest.mark.parametrize("kind", in_tiers())
def test_ids_types_and_cuts_are_those_of_the_class(kind: Kind, tmp_path: Path) -> None:
    saved = save(kind, tmp_path / "saved")
    for name, change in SETTINGS.items():
        folder = Path(shutil.copytree(saved, tmp_path / name))
        change(folder)
        both = Both(folder)
        for limit in (LONGEST, LIMIT, 5):
            assert not both.differences(SINGLES, limit), (name, limit)
        for limit in (LONGEST, LIMIT):
            assert not both.differences(PAIRS, limit), (name, limit)


@pytest.mark.parametrize(
    ("label", "setting"),
    [
        ("BertTokenizer-bert", "case kept"),
        ("BertTokenizer-bert", "accents kept"),
        ("BertTokenizer-bert", "chinese as one word"),
        ("DistilBertTokenizer-distilbert", "case kept"),
        ("RobertaTokenizer-roberta", "a space in front"),
        ("GPT2Tokenizer-gpt2", "a space in front"),
        ("LlamaTokenizer-llama", "added_tokens_decoder"),
        ("XLMRobertaTokenizer-xlm-roberta", "added_tokens.json"),
        ("AlbertTokenizer-albert", "case kept"),
        ("RobertaTokenizer-roberta", "special tokens split"),
        ("BertTokenizer-bert", "cut on the left"),
    ],
)
def test_tokenizer_json_alone_would_be_wrong(label: str, setting: str, tmp_path: Path) -> None:
    """The control: settings change ids, and the file does not have them."""
    folder = save(next(kind for kind in KINDS if kind.label == label), tmp_path)
    SETTINGS[setting](folder)
    assert Both(folder, choice="file").differences(SINGLES, LIMIT)


@functools.cache
def opened(place: int, setting: str) -> Both:
    with tempfile.TemporaryDirectory() as folder:
        saved = save(KINDS[place], Path(folder))
        SETTINGS[setting](saved)
        return Both(saved)


SPECIAL = sorted({token for kind in KINDS for token in kind.special} | {"[MARK]", "<DOC>"})
ANY_TEXT = st.lists(
    st.one_of(st.text(st.characters(exclude_categories=["Cs"]), max_size=12), st.sampled_from([*WORDS, *SPECIAL, " "])),
    max_size=8,
).map("".join)


@given(
    st.integers(0, len(KINDS) - 1),
    st.sampled_from(["as saved", "added_tokens_decoder", "cut on the left", "special tokens split", "case kept"]),
    st.one_of(ANY_TEXT.map(lambda text: (text,)), st.tuples(ANY_TEXT, ANY_TEXT)),
)
@settings(deadline=None, max_examples=300)
def test_any_text_has_the_tokens_that_the_class_gives(place: int, setting: str, texts: tuple[str, ...]) -> None:
    assert not opened(place, setting).differences([texts], LIMIT)
