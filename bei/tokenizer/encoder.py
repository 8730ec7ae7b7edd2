"""Encodes texts, pairs and framed texts: tokenization, truncation to the model's limit, and token offsets."""

from __future__ import annotations

import copy
import functools
import json
import sys
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, TypeAlias, TypeGuard

import numpy as np
import tokenizers

from bei.artifact.held_files import shown_path
from bei.core import Encoding, Expansion, Float32Array, TokenSpans, expanded
from bei.errors import ArtifactManifestError, InputTooLongError, InvalidRequestError
from bei.tokenizer.common_text import CommonText, Tokenize, TokenizedText
from bei.tokenizer.file import read_tokenizer
from bei.tokenizer.label_prompt import LabelPrompt, encode_words
from bei.tokenizer.long_text import (
    PIECE_CHARS,
    AddedTokens,
    PartialTokens,
    Tokens,
    UncuttableTextError,
    common_start,
    tokens_in_pieces,
)
from bei.tokenizer.option_prompt import OptionPrompt, around_text
from bei.tokenizer.special_tokens import Layout, TextFrame, check_without, framed_layout, kept_lengths, layout_of
from bei.tokenizer.templates import AroundTemplate, PairTemplate, TextTemplate
from bei.tokenizer.word_cache import WordCache, treats_words_alone
from bei.utils.untrusted_files import UnfitError

# Characters read first of a long text, for each token that the model takes, so that a book costs no more than its first
# page; more is read if they do not fill the model. Tokens of prose have 2 to 5 characters.
_CHARS_PER_TOKEN = 8

# Limit for a text that cannot be cut into pieces, for which the library takes 100 MB. A longer one is refused, unless
# its beginning fills the model.
_MOST_CHARS_AT_ONCE = 250_000

# Growth of the parts of two texts that are read to find the longer one.
_FURTHER = 4

_ID_BYTES = np.dtype(np.int32).itemsize
_NO_FRAME = TextFrame()

# The side of a too long text that is cut off.
CutSide: TypeAlias = Literal["left", "right"]
# A text, or a pair of texts that the model reads together.
Input: TypeAlias = "str | tuple[str, str]"

# Called between the pieces of a long text; it raises to end the work.
Check: TypeAlias = Callable[[], None]


@dataclass(frozen=True)
class EncodingOptions:
    """Encoding options of one request.

    ``truncate``: None: the server's setting. ``max_tokens`` lowers the model's limit, special tokens included.
    ``direction``: the side that is cut off; None: the model's own. ``framed``: inputs stand between the tokens of the
    model's frame, and only they are cut. ``template``: inputs are read as this template's text. ``with_spans``:
    encodings hold the offsets of their tokens. ``whole``: tokens beyond the model's limit are kept, for counting, not
    for an engine. ``expansion``: short inputs are filled up with this token. ``unpooled_prompt``: the prompt of every
    text, left out of the mean pooling. ``kept``: prefix and suffix of every text, which truncation preserves.
    ``labels``: inputs are texts whose words are read behind labels; words that do not fit are left out. ``question``:
    inputs are texts, read behind a question and its options. ``continues``: of pairs, the second text continues the
    first, and its tokens alone are scored (``Encoding.num_unpooled``). ``whole_second``: it is not cut if it fits.
    """

    truncate: bool | None = None
    direction: CutSide | None = None
    max_tokens: int | None = None
    add_special_tokens: bool = True
    framed: bool = False
    template: PairTemplate | TextTemplate | AroundTemplate | None = None
    with_spans: bool = False
    whole: bool = False
    expansion: Expansion | None = None
    unpooled_prompt: str = ""
    kept: tuple[str, str] = ("", "")
    labels: LabelPrompt | None = None
    question: OptionPrompt | None = None
    continues: bool = False
    whole_second: bool = False

    @functools.cached_property
    def num_around(self) -> int:
        """Characters that are read with each input: its template's, the labels' or the question's."""
        if prompt := self.labels or self.question:
            return prompt.num_chars
        return 0 if self.template is None else self.template.num_chars

    @functools.cached_property
    def is_plain(self) -> bool:
        """True if only limits and expansion differ from the defaults."""
        return (
            self.direction != "left"
            and self.add_special_tokens
            and not (self.framed or self.with_spans or self.whole or any(self.kept) or self.labels)
        )


AS_CONFIGURED = EncodingOptions()


def _no_check() -> None:
    """A check that never ends the work."""


class TextEncoder:
    """Tokenizes as the checkpoint does, truncated to ``max_seq_len`` with special tokens kept. Thread-safe.

    ``frame``: texts before and after ``framed`` inputs. ``truncation_side``: the default of ``direction``.
    ``split_special_tokens``: special tokens inside a text are split like other text. ``token_weights``: float32
    [vocabulary], the table for sparse vectors that are looked up. ``refused_texts``: an input that has one is an error.
    ``filling_id``: every text is filled up to ``max_seq_len`` with this token; None: none is. ``vocab_size``: of the
    model; a tokenizer with ids beyond it is refused (ArtifactManifestError). ``chars_per_token``: a text is cut to so
    many characters for each token that it may have, before it is tokenized; None: texts are not.
    """

    token_weights: Float32Array | None = None
    refused_texts: tuple[str, ...] = ()
    chars_per_token: int | None = None

    def __init__(
        self,
        path: Path,
        max_seq_len: int,
        *,
        auto_truncate: bool = True,
        frame: TextFrame = _NO_FRAME,
        truncation_side: CutSide = "right",
        split_special_tokens: bool = False,
        vocab_size: int | None = None,
        filling_id: int | None = None,
    ) -> None:
        try:
            self._tokenizer = read_tokenizer(path, vocab_size)
            self._tokenizer.encode_special_tokens = split_special_tokens
            self._layouts = {
                (num_texts, with_special): layout_of(self._tokenizer, num_texts, with_special=with_special)
                for num_texts in (1, 2)
                for with_special in (True, False)
            }
        except (UnfitError, OSError) as error:
            raise ArtifactManifestError(
                f"{shown_path(path)} is not a readable tokenizer ({error}). Build it again."
            ) from error
        self._max_seq_len = max_seq_len
        self._filling_id = filling_id
        self._auto_truncate = auto_truncate
        self._cuts_left = truncation_side == "left"
        self._framed = framed_layout(self._tokenizer, frame)
        self._words: WordCache | None = None
        single = self._layouts[1, True]
        if treats_words_alone(self._tokenizer) and not single.has_types:
            self._words = WordCache(self._tokenizer)
            place = [piece.text for piece in single.pieces].index(0)
            self._before, self._behind = (
                b"".join(piece.ids.tobytes() for piece in side)
                for side in (single.pieces[:place], single.pieces[place:])
            )
            self._num_special = single.num_special
        self._marks_continuations = bool(getattr(self._tokenizer.model, "continuing_subword_prefix", None))

    def fitted(self, max_seq_len: int, frame: TextFrame) -> TextEncoder:
        """The same tokenizer, sharing its cache of words, for a model that reads up to ``max_seq_len`` tokens."""
        found = copy.copy(self)
        found._max_seq_len = max_seq_len
        found._framed = framed_layout(self._tokenizer, frame)
        return found

    def with_weights(self, token_weights: Float32Array | None) -> TextEncoder:
        """The same tokenizer, sharing its cache of words, with a table of token weights."""
        found = copy.copy(self)
        found.token_weights = token_weights
        return found

    def encode(
        self,
        inputs: Seq[Input],
        options: EncodingOptions = AS_CONFIGURED,
        common: CommonText | None = None,
        check: Check = _no_check,
    ) -> list[Encoding]:
        """One encoding for each input. ``common``: shared by the chunks of one request.

        Raises InvalidRequestError if an input is too long and must not be cut, and the errors of ``check``.
        """
        if self.refused_texts and not options.whole:
            instruction = (options.template.instruction,) if isinstance(options.template, PairTemplate) else ()
            check_without(self.refused_texts, [*instruction, *inputs])
        truncate = self._auto_truncate if options.truncate is None else options.truncate
        if self._cuts_left and options.direction is None:
            options = replace(options, direction="left")
        if options.labels is not None:
            texts = _first_texts(inputs)
            layout, limit = self._layouts[1, not options.labels.layout.schema], self._limit(options)
            encodings = encode_words(self._tokenizer, texts, options.labels, layout, limit, check)
            for encoding in () if options.labels.may_be_cut else encodings:
                self._check(encoding, truncate, options)
            return encodings
        if options.question is not None:
            encodings = self._behind_question(_first_texts(inputs), options.question, options, check)
            for encoding in encodings:
                self._check(encoding, truncate, options)
            return encodings
        if options.template is not None:
            inputs = [options.template.filled(pair) for pair in inputs]
        given, inputs = inputs, self._first_chars(inputs, options)
        words = self._words if options.is_plain else None
        if words is None or not _are_texts(inputs):
            encodings = self._encode_by_library(inputs, options, common, check)
        else:
            encodings = [
                self._encode_by_word(text, words, options) or self._encode_by_library([text], options, None, check)[0]
                for text in inputs
            ]
        if options.expansion is not None:
            encodings = [expanded(encoding, options.expansion) for encoding in encodings]
        if self._filling_id is not None and not options.whole:
            filling = Expansion(self._filling_id, self._max_seq_len, attended=True)
            encodings = [expanded(encoding, filling) for encoding in encodings]
        if inputs is not given:
            whole = [len(text) == len(cut) for text, cut in zip(given, inputs, strict=True)]
            encodings = [
                one if is_whole else one._replace(truncated=True)
                for one, is_whole in zip(encodings, whole, strict=True)
            ]
        for encoding in encodings:
            self._check(encoding, truncate, options)
        if options.unpooled_prompt:
            encodings = self._without_prompt(encodings, options)
        return encodings

    def _first_chars(self, inputs: Seq[Input], options: EncodingOptions) -> Seq[Input]:
        """``inputs`` cut to ``chars_per_token``, or ``inputs`` itself."""
        if self.chars_per_token is None or options.whole or options.direction == "left":
            return inputs
        most = self._limit(options) * self.chars_per_token
        return [text[:most] if isinstance(text, str) else text for text in inputs]

    def decode(self, ids: Seq[int], *, skip_special_tokens: bool = True) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    @functools.cached_property
    def known_ids(self) -> frozenset[int]:
        return frozenset(self._tokenizer.get_vocab(with_added_tokens=True).values())

    def token(self, token_id: int) -> str:
        return self._tokenizer.id_to_token(token_id) or ""

    def _without_prompt(self, encodings: list[Encoding], options: EncodingOptions) -> list[Encoding]:
        """Exclude the prompt's tokens from mean pooling. Their number is that of the prompt encoded alone, as
        sentence-transformers counts."""
        prompt = self._tokenizer.encode(options.unpooled_prompt, add_special_tokens=options.add_special_tokens)
        count = len(prompt.ids) - (prompt.ids[-1:] != [] and prompt.ids[-1] in self.special_ids)
        return [one._replace(num_unpooled=min(count, one.num_tokens - 1)) for one in encodings]

    @functools.cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of the special tokens: those marked as special, and those around every text."""
        added = self._tokenizer.get_added_tokens_decoder()
        around = (piece.ids.tolist() for layout in self._layouts.values() for piece in layout.pieces)
        return frozenset(token_id for token_id, token in added.items() if token.special).union(*around)

    @functools.cached_property
    def _unknown_id(self) -> int:
        """The id of the unknown token; -1 if the tokenizer has none."""
        model = json.loads(self._tokenizer.to_str())["model"]
        found = model.get("unk_id")
        if found is None and model.get("unk_token") is not None:
            found = self._tokenizer.token_to_id(model["unk_token"])
        return -1 if found is None else int(found)

    def _behind_question(
        self, texts: Seq[str], prompt: OptionPrompt, options: EncodingOptions, check: Check
    ) -> list[Encoding]:
        """The question and its options, and behind them each text."""
        before, behind = around_text(self._tokenizer, prompt, self._limit(options))
        room = self._limit(options) - len(before) - len(behind)
        found = self._tokenize_texts(
            [prompt.layout.before_text + prompt.layout.without_marker(text) for text in texts],
            options,
            check,
            enough=room,
        )
        parts = [np.concatenate([before, text.ids[:room], behind]) for text in found]
        return [
            Encoding(ids, np.full(len(ids), prompt.kind, np.int32), not text.is_whole or len(text.ids) > room)
            for ids, text in zip(parts, found, strict=True)
        ]

    def _encode_by_word(self, text: str, words: WordCache, options: EncodingOptions) -> Encoding | None:
        """The encoding from cached words, equal to the library's; None if the beginning of a long text does not fill
        the model, or if no room is left."""
        limit = self._limit(options)
        if limit <= self._num_special:
            return None
        first = limit * _CHARS_PER_TOKEN
        shown = text if len(text) <= first else text[: text.rfind(" ", 0, first) + 1]
        ids = words.ids(shown)
        room = (limit - self._num_special) * _ID_BYTES
        if len(shown) < len(text) and len(ids) <= room:
            return None
        kept = self._before + ids[:room] + self._behind
        return Encoding(np.frombuffer(kept, np.int32), None, truncated=len(ids) > room)

    def _encode_by_library(
        self, inputs: Seq[Input], options: EncodingOptions, common: CommonText | None, check: Check
    ) -> list[Encoding]:
        """The encodings for any options. The library tokenizes texts one by one; truncation and special tokens are
        added here, because the library's truncation is state of the tokenizer, and quadratic for pairs."""
        groups = [(text,) if isinstance(text, str) else text for text in inputs]
        tokenize = partial(self._tokenize_texts, options=options, check=check)
        if common is not None and common.matches(groups):
            tokenize = partial(common.tokenize, tokenize)
        texts = list(dict.fromkeys(text for group in groups for text in group))  # many pairs share a query
        shown = dict(zip(texts, tokenize(texts), strict=True))
        return [self._joined([shown[text] for text in group], options, tokenize) for group in groups]

    def _tokenize_texts(
        self, texts: Seq[str], options: EncodingOptions, check: Check, *, enough: int | None = None
    ) -> list[TokenizedText]:
        """Tokenize each text until it has more than ``enough`` tokens; None: more than the model takes."""
        enough = self._limit(options) if enough is None else enough
        return [
            TokenizedText(text, *found)
            for text, found in zip(texts, self._tokens(texts, options, check, enough), strict=True)
        ]

    def _tokens(self, texts: Seq[str], options: EncodingOptions, check: Check, enough: int) -> list[PartialTokens]:
        """The tokens of each text: all, or more than ``enough``."""
        with_spans = options.with_spans
        few = min(PIECE_CHARS, enough * _CHARS_PER_TOKEN)
        batch = self._tokenizer.encode_batch if with_spans else self._tokenizer.encode_batch_fast
        at_once = iter(batch([text for text in texts if len(text) <= few], add_special_tokens=False))
        return [
            PartialTokens(Tokens.of(next(at_once), with_spans=with_spans), is_whole=True)
            if len(text) <= few
            else self._tokens_of_long(text, options, check, enough)
            for text in texts
        ]

    def _tokens_of_long(self, text: str, options: EncodingOptions, check: Check, enough: int) -> PartialTokens:
        """``_tokens`` for one text: piece by piece if it can be cut."""
        try:
            return tokens_in_pieces(
                text,
                self._encoded,
                with_spans=options.with_spans,
                most_chars=_MOST_CHARS_AT_ONCE,
                check=check,
                enough=enough,
                from_end=options.direction == "left",
                first_chars=enough * _CHARS_PER_TOKEN,
                added=self._added,
            )
        except UncuttableTextError:
            raise InvalidRequestError(
                f"A text has {len(text)} characters, and this model's tokenizer cannot read it in pieces; at once it "
                f"takes up to {_MOST_CHARS_AT_ONCE}: split it.",
                "inputs" if options.whole else "input",
            ) from None

    @functools.cached_property
    def _added(self) -> AddedTokens:
        added = self._tokenizer.get_added_tokens_decoder().values()
        return AddedTokens(
            max((len(token.content) for token in added), default=0),
            any(token.lstrip for token in added),
            any(token.rstrip for token in added),
        )

    def _encoded(self, text: str) -> tokenizers.Encoding:
        # ``encode`` holds the interpreter's lock; the fast form gives no offsets, by which cuts are judged.
        encoded: tokenizers.Encoding
        (encoded,) = self._tokenizer.encode_batch([text], add_special_tokens=False)
        return encoded

    def _joined(self, parts: Seq[TokenizedText], options: EncodingOptions, tokenize: Tokenize) -> Encoding:
        """The encoding of one or two texts, truncated to the model's limit."""
        assert len(parts) == 1 or not options.framed  # a frame holds one text
        layout = self._framed if options.framed else self._layouts[len(parts), options.add_special_tokens]
        room = self._limit(options) - layout.num_special
        if room < 1:
            raise InvalidRequestError(
                f"{self._limit(options)} tokens leave no room beside the {layout.num_special} that stand around every "
                "input: allow more.",
                param="input",
            )
        if any(options.kept) and sum(len(part.ids) for part in parts) > room:
            return self._between(parts[0], room, layout, options, tokenize)
        cut = partial(kept_lengths, room=room, whole_second=options.whole_second)
        kept = cut([len(part.ids) for part in parts])
        if len(set(kept)) == 2 and min(kept) == room // 2:  # of two long texts, the longer one keeps one more
            kept = cut(self._compared(parts, self._limit(options), tokenize))
        cuts = [
            slice(0, num_kept) if options.direction != "left" else slice(len(part.ids) - num_kept, None)
            for part, num_kept in zip(parts, kept, strict=True)
        ]
        ids, types = layout.around([part.ids[cut] for part, cut in zip(parts, cuts, strict=True)])
        truncated = any(
            num_kept < len(part.ids) or not part.is_whole for part, num_kept in zip(parts, kept, strict=True)
        )
        spans = None
        if options.with_spans:
            texts = [self._spans(part, cut, options) for part, cut in zip(parts, cuts, strict=True)]
            spans = layout.spans_around(texts)
        if options.continues:
            return Encoding(ids, None, truncated, spans, num_unpooled=kept[0])
        return Encoding(ids, types, truncated, spans)

    def _compared(self, parts: Seq[TokenizedText], enough: int, tokenize: Tokenize) -> list[int]:
        """Lengths of two texts, of which more than ``enough`` tokens were read, or enough to decide which is longer."""
        (first, second), common = (part.text for part in parts), 0
        while first != second and not (
            all(part.is_whole for part in parts) or any(part.is_whole and len(part.ids) <= enough for part in parts)
        ):
            if not common:  # the common beginning has equally many tokens in both
                start = common_start(first, second, self._encoded)
                first, second, common = first[start:], second[start:], enough
            enough *= _FURTHER
            parts = tokenize([first, second], enough=enough)
        return [common + len(part.ids) for part in parts]

    def _between(
        self, part: TokenizedText, room: int, layout: Layout, options: EncodingOptions, tokenize: Tokenize
    ) -> Encoding:
        """The encoding of a text that is truncated between its ``kept`` prefix and suffix."""
        before, behind = (around.ids for around in tokenize([*options.kept], enough=room))
        count = room - len(before) - len(behind)
        if count < 1:
            most = self._limit(options)
            if isinstance(options.template, AroundTemplate):
                raise InvalidRequestError(
                    f"{most} tokens leave no room for a text beside the labels: send fewer or shorter ones.", "labels"
                )
            raise InvalidRequestError(
                f"{most} tokens leave no room for a text beside its prompt: allow more.", param="input"
            )
        (text,) = tokenize([part.text[len(options.kept[0]) : len(part.text) - len(options.kept[1])]])
        cut = slice(0, count) if options.direction != "left" else slice(max(0, len(text.ids) - count), None)
        ids = np.concatenate([before, text.ids[cut], behind])
        return Encoding(*layout.around([ids]), truncated=True)

    def _spans(self, part: TokenizedText, cut: slice, options: EncodingOptions) -> TokenSpans:
        """Offsets of the tokens of ``part`` that are kept.

        If the tokenizer does not mark continuations of words, words are separated by blanks, and an unknown token
        begins a word, as in transformers' token classification pipeline (but for blanks other than spaces too).
        """
        assert part.tokens.offsets is not None  # requested by the options
        assert part.tokens.words is not None
        offsets = part.tokens.offsets[cut]
        ids = part.ids[cut]
        if self._marks_continuations:
            words = part.tokens.words[cut]
        else:
            begins = np.fromiter((_at_blank(part.text, int(first)) for first in offsets[:, 0]), np.bool_, len(offsets))
            words = np.cumsum(begins | (ids == self._unknown_id), dtype=np.int32)
        return TokenSpans(offsets, words, np.zeros(len(ids), np.bool_))

    def _limit(self, options: EncodingOptions) -> int:
        if options.whole:
            return sys.maxsize
        return min(self._max_seq_len, options.max_tokens or self._max_seq_len)

    def _check(self, encoding: Encoding, truncate: bool, options: EncodingOptions) -> None:
        if encoding.truncated and not truncate:
            remedy = "allow truncation" if options.truncate is False else "start the server with --auto-truncate"
            limit = self._limit(options)
            most = f"the model's {limit} tokens" if limit == self._max_seq_len else f"the {limit} tokens it may have"
            if self.chars_per_token is not None and encoding.num_tokens < limit:
                most = f"the {limit * self.chars_per_token} characters that the model reads"
            raise InputTooLongError(f"An input has more than {most}: shorten it, or {remedy}.", param="input")
        if not encoding.num_tokens:
            raise InvalidRequestError("An input has no tokens: leave it out.", param="input")


def _first_texts(inputs: Seq[Input]) -> list[str]:
    return [text if isinstance(text, str) else text[0] for text in inputs]


def _are_texts(inputs: Seq[Input]) -> TypeGuard[Seq[str]]:
    return set(map(type, inputs)) == {str}


def _at_blank(text: str, index: int) -> bool:
    """True if a word begins there: after a blank, or with the blank that belongs to its first token."""
    return index == 0 or text[index - 1].isspace() or text[index : index + 1].isspace()
