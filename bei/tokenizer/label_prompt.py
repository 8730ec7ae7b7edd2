"""Labels of a request in front of a text's words, or as vectors beside them, as models read them that find spans for
any labels (GLiNER).

A text is split as GLiNER's WhitespaceTokenSplitter does, or as GLiNER2's, and each word is tokenized by itself. Token
types say what stands where (``bei.engine.words``); the model's own have none.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Callable
from collections.abc import Sequence as Seq
from itertools import takewhile
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from bei.artifact.label_layouts import Extraction
from bei.core import Encoding, Int32Array, LabelVectors
from bei.engine.words import LABEL, OTHER, WORD, with_absent
from bei.errors import InvalidRequestError
from bei.tokenizer.alike import check_told_apart
from bei.tokenizer.entity_text import EntityText, entity_words
from bei.tokenizer.paired_text import PairedText
from bei.tokenizer.schema_prompt import SchemaPart, check_part, check_words, schema_ids
from bei.tokenizer.special_tokens import Layout

# Words, with hyphens and underscores inside, and all other characters but blanks, each by itself.
_WORD = re.compile(r"\w+(?:[-_]\w+)*|\S")

# Words of GLiNER2 are also addresses and names of accounts, and may have combining marks and joiners. Marks lie in the
# first two planes of Unicode, and in the one of variation selectors.
_MARKED_PLANES = (range(0x20000), range(0xE0000, 0xE0200))
_ENDS = (".", "!", "?")  # of a text, in GLiNER2
# Characters of an address before its @ and behind it (RFC 5321, section 4.5.3.1); the first are looked at from each.
LOOKED_AHEAD, _MOST_OF_HOST = 64, 255

# Of a longer word no more is tokenized: its first tokens alone fill the model.
_MOST_CHARS_PER_TOKEN = 64


class LabelPrompt(NamedTuple):
    """``labels`` of a request, and how the model reads them; ``vectors`` of them where it reads these. ``may_be_cut``:
    words that do not fit are left out whatever the request and the server say of truncation. Of a model that reads a
    schema: its ``parts``, and ``words`` in front of the text's."""

    labels: tuple[str, ...]
    layout: Extraction
    vectors: LabelVectors | None = None
    may_be_cut: bool = True
    parts: tuple[SchemaPart, ...] = ()
    words: tuple[str, ...] = ()

    @property
    def num_chars(self) -> int:
        """Characters that are read with each text."""
        if self.vectors is not None:
            return 0
        of_labels = sum([part.num_chars for part in self.parts]) if self.parts else sum(map(len, self.labels))
        return of_labels + sum(map(len, self.words))


def word_spans(text: str, layout: Extraction) -> Int32Array:
    """First and one past the last character of each word of ``text``, [words, 2]."""
    pattern = _schema_words() if layout.schema else _WORD
    places = (place for found in pattern.finditer(text) for place in found.span())
    return np.fromiter(places, np.int32).reshape(-1, 2)  # pairs of Python's take 15 times as much


@functools.cache
def _schema_words() -> re.Pattern[str]:
    """Words of GLiNER2 (its processing.word_splitter)."""
    codes = (code for plane in _MARKED_PLANES for code in plane)
    marks = "".join(chr(code) for code in codes if unicodedata.category(chr(code)).startswith("M"))
    part = rf"[\w{marks}\u200c\u200d]+"
    # Bounded, where the library's are not: it looks from each character of a run of dots or letters to the run's end.
    mail = rf"[a-z0-9._%+-]{{1,{LOOKED_AHEAD}}}@[a-z0-9.-]{{1,{_MOST_OF_HOST}}}\.[a-z]{{2,}}"
    address = rf"https?://[^\s]+|www\.[^\s]+|{mail}|@[a-z0-9_]+"
    return re.compile(rf"{address}|{part}(?:[-_]{part})*|\S", re.IGNORECASE)


def prompt_ids(tokenizer: Tokenizer, prompt: LabelPrompt, most: int) -> tuple[list[int], list[int]]:
    """The ids of labels and separator, and what they are; none where labels are vectors. ``most``: tokens that the
    model reads. Raises InvalidRequestError for labels that are too long, that cannot be told apart from the prompt's
    own tokens, or that have none."""
    if prompt.vectors is not None:
        return [], []
    layout, schema, most_chars = prompt.layout, prompt.layout.schema, most * _MOST_CHARS_PER_TOKEN
    parts = prompt.parts or (SchemaPart("labels", schema.task if schema else "", prompt.labels),)
    for part in parts:
        for place, label in enumerate(part.labels):
            if len(label) > most_chars:
                raise InvalidRequestError(f"{part.field} {place} has {len(label)} characters: shorten it.", part.param)
    if (num_chars := prompt.num_chars) > most_chars:
        raise InvalidRequestError(
            f"What is read in front of a text has {num_chars} characters, more than the model reads: shorten labels "
            "and descriptions.",
            parts[0].param,
        )
    spelled = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    for part in parts:
        check_part(part, spelled)
    if schema:
        check_words(tokenizer, prompt.words, spelled)
        return schema_ids(tokenizer, schema, parts, layout.label_id)
    ids, kinds = [], []
    of_labels = [
        tokenizer.encode([label], is_pretokenized=True, add_special_tokens=False).ids for label in prompt.labels
    ]
    what = parts[0].field
    for place, found in enumerate(of_labels):
        if not found:
            raise InvalidRequestError(f"{what} {place} has no tokens: write it in letters.", what)
        ids += [layout.label_id, *found]
        kinds += [LABEL, OTHER] if layout.reads_marker else [OTHER, LABEL]
        kinds += [OTHER] * (len(found) - 1)
    check_told_apart(what, prompt.labels, map(tuple, of_labels), what)
    return [*ids, layout.separator_id], [*kinds, OTHER]


def encode_words(
    tokenizer: Tokenizer, texts: Seq[str], prompt: LabelPrompt, around: Layout, most: int, check: Callable[[], None]
) -> list[Encoding]:
    """One encoding of each text behind the labels, with as many whole words as ``most`` tokens hold, but of one word at
    least the beginning; ``truncated`` where words are left out. Raises InvalidRequestError, and the errors of
    ``check``."""
    prompt_tokens, prompt_kinds = prompt_ids(tokenizer, prompt, most)
    room = most - around.num_special - len(prompt_tokens)
    if room < 1:
        raise InvalidRequestError(
            f"The labels take {len(prompt_tokens)} tokens, and with the text the model reads {most}: send fewer or "
            "shorter labels.",
            prompt.parts[0].param if prompt.parts else "labels",
        )
    in_front = sum(len(piece.ids) for piece in takewhile(lambda piece: piece.text is None, around.pieces))
    encodings = []
    for text in texts:
        check()
        spans, words = _words_of(text, prompt, room * _MOST_CHARS_PER_TOKEN)
        tokens, word_ids = _first_tokens(tokenizer, words, room, check)
        numbers = np.array(word_ids, np.int64)
        kept, kinds, is_whole = _whole_words(numbers, len(words), room, len(prompt.words))
        if prompt.words and numbers[kept - 1] < len(prompt.words) and not is_whole:
            raise InvalidRequestError(
                f"The choices leave no room for a text, of which the model reads {most} tokens with the labels: send "
                "fewer.",
                "structures",
            )
        ids, _ = around.around([np.array([*prompt_tokens, *tokens[:kept]], np.int32)])
        types = np.zeros(len(ids), np.int32)
        start = in_front + len(prompt_tokens)
        types[in_front:start] = prompt_kinds
        types[start - 1 : start + kept] = kinds  # with the token in front, which words without tokens may follow
        beside = prompt.vectors
        if isinstance(text, EntityText):
            beside = entity_words(text, spans, kinds, prompt.layout.max_words, is_whole=is_whole)
        elif isinstance(text, PairedText):
            beside = text.pairs
        encodings.append(Encoding(ids, types, truncated=not is_whole, label_vectors=beside))
    return encodings


def _words_of(text: str, prompt: LabelPrompt, longest: int) -> tuple[list[list[int]], list[str]]:
    """The places of ``text``'s words, and the words that the model reads: of each at most ``longest`` characters,
    behind those of the prompt."""
    schema = prompt.layout.schema
    if schema and not text.endswith(_ENDS):
        text += "."
    spans: list[list[int]] = word_spans(text, prompt.layout).tolist()
    if schema:
        spans = spans[: prompt.layout.max_words]  # a full window has no room for the full stop, in gliner2 too
    words = [text[start : min(stop, start + longest)] for start, stop in spans]
    return spans, [*prompt.words, *(word.lower() for word in words)] if schema else words


def _first_tokens(
    tokenizer: Tokenizer, words: Seq[str], room: int, check: Callable[[], None]
) -> tuple[list[int], list[int | None]]:
    """The tokens of ``words``, and the numbers of their words. Where they are more than ``room``, of two words at
    least, those behind may be missing: a book takes seconds, in which the tokenizer holds the interpreter's lock."""
    count = room + 1
    while True:
        check()
        found = tokenizer.encode(words[:count], is_pretokenized=True, add_special_tokens=False)
        numbers = found.word_ids
        if count >= len(words) or (len(numbers) > room and numbers[-1] != numbers[0]):
            return found.ids, numbers
        count *= 4


def _whole_words(words: npt.NDArray[np.int64], count: int, room: int, first: int = 0) -> tuple[int, Int32Array, bool]:
    """Of tokens with the numbers of their ``words``, of which there are ``count``: how many are kept; what the token
    in front and they are; whether these are all. ``first``: the number of the text's first word, of which at least the
    beginning is kept."""
    kept, is_whole = len(words), True
    if kept > room:
        is_whole = False
        kept = int(np.searchsorted(words, words[room]))  # the first token of the word that does not fit
        if not kept or words[kept - 1] < first:
            kept, is_whole = room, count == first + 1 or words[-1] == words[0]
    numbers = np.concatenate([[-1], words[:kept]])
    following = np.append(numbers[1:], count if is_whole else (words[kept] if kept < len(words) else count))
    starts = np.diff(numbers, prepend=-1) > 0
    absent = np.maximum(following - numbers - 1, 0)  # words without tokens, behind each token's word
    if not is_whole and kept == room and (numbers[1:] <= first).all():
        absent[-1] = 0
    kinds = np.where(starts, WORD, OTHER)
    return kept, with_absent(kinds, absent).astype(np.int32), is_whole
