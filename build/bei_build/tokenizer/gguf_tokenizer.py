"""The tokenizer of a GGUF file's metadata, as a tokenizer.json and its settings.

A file has the vocabulary, and names the rest by a word that llama.cpp's code knows. Four such kinds are read, those
whose rules are the same in all models; others are refused by name.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Mapping
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from bei.errors import TokenizerError
from bei_build.weights.gguf_file import GgufHeader

_KEY = "tokenizer.ggml."
# The format's numbers of token types.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5
_SPACE = "▁"

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
# tokenizer.ggml.pre of byte-level vocabularies -> the expression that splits a text; None: GPT-2's, which RoBERTa has.
_SPLITS: Mapping[str, str | None] = {
    "qwen2": _WORDS.format(digits=r"\p{N}") + _SPACES,
    "llama-bpe": _WORDS.format(digits=r"\p{N}{1,3}") + _SPACES,
    "roberta-bpe": None,
    "gpt-2": None,
}


def tokenizer_of(header: GgufHeader) -> tuple[str, dict[str, Any]]:
    """The contents of tokenizer.json and of tokenizer_config.json. Raises TokenizerError."""
    vocabulary = _Vocabulary(header)
    whole = header.metadata.get("tokenizer.huggingface.json")
    if isinstance(whole, str):
        return whole, vocabulary.settings()
    kind = header.metadata.get(f"{_KEY}model")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise _refused(f"has tokenizer.ggml.model = {kind!r:.40}, of which it does not say all rules")
    try:
        tokenizer = _KINDS[kind](vocabulary)
        tokenizer.add_tokens([token for _, token in vocabulary.added()])
        text = tokenizer.to_str()
    except TokenizerError:
        raise
    except Exception as error:  # the tokenizers library raises bare Exception
        raise TokenizerError(f"The GGUF file's vocabulary is damaged ({error}). Download it again.") from error
    if any(tokenizer.token_to_id(token.content) != at for at, token in vocabulary.added()):
        raise TokenizerError("The GGUF file's vocabulary has a special token twice. Download it again.")
    return text, vocabulary.settings()


class _Vocabulary:
    """Tokens of a file, their types, and the ids of special ones."""

    def __init__(self, header: GgufHeader) -> None:
        self._metadata = header.metadata
        self._context = header.metadata.get(f"{header.architecture}.context_length")
        self.tokens = self._list("tokens", str)
        self.types = self._list("token_type", int) or [_NORMAL] * len(self.tokens)
        self.scores = self._list("scores", float)
        self.merges = self._list("merges", str)
        if not self.tokens or len(self.types) != len(self.tokens):
            raise TokenizerError(
                f"The GGUF file has {len(self.tokens)} tokens and types of {len(self.types)}. Download it again."
            )

    def flag(self, name: str) -> bool | None:
        """tokenizer.ggml.``name``; None where the file does not have it."""
        value = self._metadata.get(_KEY + name)
        if value is not None and type(value) is not bool:
            raise _refused(f"has tokenizer.ggml.{name} = {value!r:.40}")
        return value

    def pre(self) -> str:
        """tokenizer.ggml.pre."""
        return str(self._metadata.get(f"{_KEY}pre", "default"))

    def charsmap(self) -> bytes:
        """tokenizer.ggml.precompiled_charsmap, empty where the file does not have it."""
        return bytes(value & 0xFF for value in self._list("precompiled_charsmap", int))

    def special(self, *names: str) -> tuple[str, int] | None:
        """The first of the tokens ``names`` ("bos", "seperator", ...) that the file has: its text and its id."""
        for name in names:
            at = self._metadata.get(f"{_KEY}{name}_token_id")
            if at is None:
                continue
            if type(at) is not int or not 0 <= at < len(self.tokens):
                raise TokenizerError(f"The GGUF file has {name}_token_id {at!r:.40} of {len(self.tokens)} tokens.")
            return self.tokens[at], at
        return None

    def needed(self, *names: str) -> tuple[str, int]:
        """``special``. Raises TokenizerError where there is none."""
        if (found := self.special(*names)) is None:
            raise _refused(f"has no tokenizer.ggml.{names[0]}_token_id")
        return found

    def added(self) -> list[tuple[int, AddedToken]]:
        """Tokens that are found in a text before it is split, with their ids."""
        kinds = {_CONTROL: True, _USER_DEFINED: False}
        # XLM-RoBERTa's and RoBERTa's mask takes the space before it with it.
        masks = {"<mask>"}
        return [
            (at, AddedToken(token, special=kinds[kind], normalized=False, lstrip=token in masks))
            for at, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if kind in kinds
        ]

    def settings(self) -> dict[str, Any]:
        """tokenizer_config.json, by which transformers takes tokenizer.json as it stands."""
        kinds = {
            "bos_token": ("bos",),
            "eos_token": ("eos",),
            "unk_token": ("unknown",),
            "pad_token": ("padding",),
            "cls_token": ("cls",),
            "sep_token": ("seperator",),
            "mask_token": ("mask",),
        }
        named = {key: found[0] for key, names in kinds.items() if (found := self.special(*names))}
        limit = {"model_max_length": self._context} if type(self._context) is int else {}
        names = ["input_ids", "token_type_ids", "attention_mask"]
        return {"tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": names, **limit, **named}

    def _list(self, name: str, kind: type) -> list[Any]:
        values = self._metadata.get(_KEY + name, [])
        if not isinstance(values, list) or not all(type(value) is kind for value in values):
            raise TokenizerError(
                f"The GGUF file's tokenizer.ggml.{name} is no list of {kind.__name__}. Download it again."
            )
        return values


def _refused(what: str) -> TokenizerError:
    return TokenizerError(f"The GGUF file {what}. Put the model's own tokenizer.json beside the file.")


def _word_pieces(vocabulary: _Vocabulary) -> Tokenizer:
    """BERT's. llama.cpp stores "##s" as "s" and "cat" as "▁cat"; whether case and accents are kept, it does not say."""
    words = [_word_piece(token, kind) for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)]
    plain = [word for word, kind in zip(words, vocabulary.types, strict=True) if kind == _NORMAL and word[0] != "["]
    keeps_case = any(letter.isupper() for word in plain for letter in word)
    if not keeps_case and any(_is_accented(letter) for word in plain for letter in word):
        raise _refused("has a vocabulary of lower-case words with accents, and does not say whether accents are kept")
    ids = {word: at for at, word in enumerate(words)}
    if len(ids) != len(words):
        raise _refused("has two tokens that were one word each before they were converted")
    (first, first_id), (last, last_id) = vocabulary.needed("cls", "bos"), vocabulary.needed("seperator", "eos")
    unknown, _ = vocabulary.special("unknown") or ("[UNK]", 0)
    tokenizer = Tokenizer(models.WordPiece(ids, unk_token=unknown, max_input_chars_per_word=100))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=not keeps_case)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{first}:0 $A:0 {last}:0",
        pair=f"{first}:0 $A:0 {last}:0 $B:1 {last}:1",
        special_tokens=[(first, first_id), (last, last_id)],
    )
    return tokenizer


def _word_piece(token: str, kind: int) -> str:
    if kind != _NORMAL:
        return token
    return token.removeprefix(_SPACE) if token.startswith(_SPACE) else f"##{token}"


def _is_accented(letter: str) -> bool:
    """True for a Latin letter that has no accent after BERT has stripped accents."""
    return "\u00c0" <= letter <= "\u024f" and len(unicodedata.normalize("NFD", letter)) > 1


def _byte_pairs(vocabulary: _Vocabulary) -> Tokenizer:
    """Byte-level BPE, as of Qwen, Llama 3 and RoBERTa."""
    pre = vocabulary.pre()
    if pre not in _SPLITS:
        raise _refused(f"splits texts by tokenizer.ggml.pre = {pre!r:.40}, and bei knows {', '.join(_SPLITS)}")
    kept = zip(vocabulary.tokens, vocabulary.types, strict=True)
    ids = {token: at for at, (token, kind) in enumerate(kept) if kind != _UNUSED}  # fillers of rows without a token
    merges = [tuple(merge.split(" ")) for merge in vocabulary.merges]
    if not merges or any(len(merge) != 2 for merge in merges):
        raise _refused("has no list of merges, each of two tokens")
    split = _SPLITS[pre]
    tokenizer = Tokenizer(models.BPE(ids, merges, ignore_merges=pre == "llama-bpe"))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    if split is None:
        tokenizer.pre_tokenizer = byte_level
    else:
        tokenizer.normalizer = normalizers.NFC() if pre == "qwen2" else None
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(split), "isolated"), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = _around(vocabulary, roberta=pre == "roberta-bpe", starts=pre == "llama-bpe")
    return tokenizer


def _around(vocabulary: _Vocabulary, *, roberta: bool, starts: bool) -> processors.PostProcessor:
    """Special tokens around a text. ``starts``: a text begins with BOS where the file does not say otherwise."""
    if roberta:
        return processors.RobertaProcessing(
            vocabulary.needed("seperator", "eos"), vocabulary.needed("cls", "bos"), add_prefix_space=False
        )
    first = vocabulary.flag("add_bos_token")
    before = [vocabulary.needed("bos")] if (starts if first is None else first) else []
    after = [vocabulary.needed("eos")] if vocabulary.flag("add_eos_token") else []
    if not before and not after:
        return processors.ByteLevel(trim_offsets=False)
    start, end = ([token for token, _ in tokens] for tokens in (before, after))
    single, other = ([*start, f"${side}", *end] for side in "AB")
    return processors.TemplateProcessing(single=single, pair=[*single, *other], special_tokens=[*before, *after])


def _unigrams(vocabulary: _Vocabulary) -> Tokenizer:
    """SentencePiece's unigrams, as of XLM-RoBERTa."""
    if vocabulary.flag("add_space_prefix") is False or vocabulary.flag("remove_extra_whitespaces") is False:
        raise _refused("keeps spaces of texts as they are")
    if len(vocabulary.scores) != len(vocabulary.tokens) or _UNKNOWN not in vocabulary.types:
        raise _refused("has a vocabulary without scores, or without an unknown token")
    lowest = min(
        (score for score, kind in zip(vocabulary.scores, vocabulary.types, strict=True) if kind != _UNUSED), default=0.0
    )
    # Fillers of rows without a token get a text that no normalized one contains. Their own score, far below all others,
    # would become the unknown token's.
    pieces = [
        (f"\0{at}", lowest) if kind == _UNUSED else (token, score)
        for at, (token, score, kind) in enumerate(
            zip(vocabulary.tokens, vocabulary.scores, vocabulary.types, strict=True)
        )
    ]
    (first, first_id), (last, last_id) = vocabulary.needed("cls", "bos"), vocabulary.needed("eos", "seperator")
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=vocabulary.types.index(_UNKNOWN)))
    if charsmap := vocabulary.charsmap():
        tokenizer.normalizer = normalizers.Precompiled(charsmap)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme="always")]
    )
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{first} $A {last}",
        pair=f"{first} $A {last} {last} $B {last}",
        special_tokens=[(first, first_id), (last, last_id)],
    )
    return tokenizer


_KINDS: Mapping[str, Callable[[_Vocabulary], Tokenizer]] = {
    "bert": _word_pieces,
    "gpt2": _byte_pairs,
    "t5": _unigrams,
}
