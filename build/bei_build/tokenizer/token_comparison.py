"""Comparison of token ids: the artifact's tokenizer, as the server encodes texts, against the model's own library.

The library's tokenizer is loaded again from the checkpoint, to find a file that changed since the build began, or that
bei reads differently. Any difference fails the build: verifying an engine with other ids than users send would prove
nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from bei.artifact.certificate.record import TokenAgreement
from bei.artifact.manifest import Tokenization
from bei.core import Encoding
from bei.errors import InvalidRequestError, TokenizerError
from bei.tokenizer.encoder import EncodingOptions, TextEncoder
from bei.tokenizer.label_prompt import LabelPrompt, encode_words
from bei.tokenizer.special_tokens import layout_of
from bei_build.tokenizer.artifact_tokenizer import adapt, around_ids
from bei_build.tokenizer.library_tokenizer import (
    STORED,
    LibraryTokenizer,
    Texts,
    TokenIds,
    TokenizerSettings,
    open_tokenizer,
    token_of,
)

# Texts that tokenizers may treat specially. Combining marks and joiners are written as escapes, because editors change
# them.
PROBES = (
    "",
    " ",
    "a",
    "The quick brown fox jumps over the lazy dog.",
    "THE QUICK Brown fOX, McDonald's iPhone",
    "Ünïcödé café déjà vu, Ångström, naïve, ß ẞ, İstanbul, ΟΔΥΣΣΕΥΣ",
    "e\u0301 a\u030a n\u0303 o\u0308 \u1e9b\u0323 \u212b \ufb01 \u2460 \u00bd \u2167 \uff21\uff22\uff43",
    "世界 你好、世界。中文English混排 東京タワー カタカナ ｶﾀｶﾅ ひらがな 대한민국",
    "ภาษาไทยไม่มีช่องว่าง",
    "اللغة العربية مَرْحَبًا \u0640 שָׁלוֹם हिन्दी தமிழ்",
    "\U0001f642 \U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea \u2764\ufe0f \U0001f44d\U0001f3fd",
    "nul\x00bell\x07escape\x1bdelete\x7fnext\x85line",
    "zero\u200bwidth\u200cnon\u200djoiner\ufeffmark\u00adsoft\u2060word",
    "no\u00a0break\u3000ideographic\u2003em\u2028line\u2029paragraph",
    "  leading and trailing  ",
    "many     spaces\t\ttabs",
    "lines\nof\r\ntext\n\n\nand more\n",
    "numbers 1 12 123 1234 12345 3.14 1,000,000 0x1F 1e-5 ²³",
    "snake_case camelCase kebab-case a.b.c don't we'll (paren) [x] {y} <z> \\ / | ~ ` ^ @#$%&*+=",
    "https://example.com/path?q=1&r=%20#top user@example.org",
    "x" * 120,
    "\u2581 \u0120 ## <unk> [UNK] <mask> [MASK] <s> </s> [CLS] [SEP] <pad> [PAD] <|endoftext|>",
    "\U00010348\U0001d518\ue000\uffff",
)

# Tokens of a text besides the special ones, for requests that ask for a short one.
_ROOM = 3
_SHOWN_IDS = 24
# Longest texts compared, for models that take longer ones; pairs of such texts are not compared: the library's cut of a
# pair takes time and memory by the product of the numbers of removed pieces.
_LONGEST = 8192
_LEAST_OF_PAIRS = 8
_MOST_PAIR_CHARS = 600
# A vocabulary with more added tokens has a reserve of unused ones, which do not stand side by side.
_MOST_JOINED = 100
_IN_A_TEXT = 8


@dataclass(frozen=True)
class Difference:
    """A text or pair, ``texts``, with the ids and types of ``library`` and ``artifact``; None where it has no
    tokens."""

    texts: Texts
    max_length: int | None
    library: TokenIds | None
    artifact: TokenIds | None


class TokenSources:
    """Both ways from a text to ids: the model's library, and the artifact's tokenizer in the runtime's encoder.

    ``num_rows``: rows of the model's embedding table, which bound the ids; ``types_matter``: the model has a table of
    token types.
    """

    def __init__(
        self,
        library: LibraryTokenizer,
        encoder: TextEncoder,
        eos: int | None,
        num_rows: int,
        *,
        types_matter: bool,
        around: tuple[list[int], list[int]] | None = None,
    ) -> None:
        """``around``: ids that the model's processor puts around texts, in the place of the library's."""
        self.library = library
        self.encoder = encoder
        self.num_special = len(library.encode([("",)], None)[0].ids) + (eos is not None)
        if around is not None:
            self.num_special = sum(map(len, around))
        # The model's code appends EOS to single texts only, and processors read no pairs.
        self.reads_pairs = eos is None and around is None
        self._eos = eos
        self._around = around
        self._num_rows = num_rows
        self._types_matter = types_matter
        self._known: dict[tuple[tuple[Texts, ...], int], list[TokenIds]] = {}

    @classmethod
    def open(
        cls,
        folder: Path,
        settings: TokenizerSettings,
        artifact: Path,
        tokenization: Tokenization,
        max_seq_len: int,
        num_rows: int,
        *,
        types_matter: bool,
    ) -> TokenSources:
        """Open the library's tokenizer of the checkpoint in ``folder``, and the tokenizer.json ``artifact`` as a server
        reads it with ``tokenization``. Raises TokenizerError."""
        library = open_tokenizer(folder, settings)
        eos = token_of(folder, "eos") if settings.ends_in_eos else None
        if library.runs is not None:
            adapt(library.runs, settings)
        encoder = TextEncoder(
            artifact,
            max_seq_len,
            truncation_side=tokenization.truncation_side,
            split_special_tokens=tokenization.splits_special_tokens,
        )
        eos_id = library.runs.token_to_id(eos) if eos is not None and library.runs is not None else None
        if eos_id in library.encode([("",)], None)[0].ids:  # its template adds it already
            eos_id = None
        around = None
        if settings.around is not None and library.runs is not None:
            around = around_ids(library.runs, settings.around)
        return cls(library, encoder, eos_id, num_rows, types_matter=types_matter, around=around)

    def with_library(self, library: LibraryTokenizer) -> TokenSources:
        """A copy with another library's tokenizer."""
        settings: dict[str, Any] = {"types_matter": self._types_matter, "around": self._around}
        return TokenSources(library, self.encoder, self._eos, self._num_rows, **settings)

    def by_library(self, texts: Sequence[Texts], max_length: int) -> list[TokenIds]:
        """The library's ids, with the EOS that the model's own code appends. Cached."""
        asked, eos = (tuple(texts), max_length), self._eos
        if asked not in self._known:
            room = max_length - (eos is not None if self._around is None else self.num_special)
            rows = self.library.encode(texts, room, special_tokens=self._around is None)
            if self._around is not None:
                before, behind = self._around
                rows = [TokenIds([*before, *ids, *behind], [0] * (len(ids) + self.num_special)) for ids, _ in rows]
            if eos is not None:
                rows = [TokenIds([*row.ids, eos], [*row.types, 0]) for row in rows]
            self._known[asked] = rows
        return self._known[asked]

    def by_artifact(self, texts: Sequence[Texts], max_tokens: int | None = None) -> list[TokenIds | None]:
        """The server's ids; None for a text without tokens, which it refuses."""
        options = EncodingOptions(truncate=True, max_tokens=max_tokens)
        found: list[TokenIds | None] = []
        for text in texts:
            try:
                (encoding,) = self.encoder.encode([text[0] if len(text) == 1 else (text[0], text[1])], options)
            except InvalidRequestError:
                found.append(None)
            else:
                types = encoding.token_type_ids
                kinds = [0] * encoding.num_tokens if types is None else types.tolist()
                found.append(TokenIds(encoding.input_ids.tolist(), kinds))
        return found

    def differences(
        self, texts: Sequence[Texts], max_length: int, max_tokens: int | None = None
    ) -> Iterator[Difference]:
        """Differences in ``texts``, all of one kind, cut to ``max_length``; ``max_tokens``: a request's limit, if it
        has one."""
        limit = max_length if max_tokens is None else max_tokens
        expected = self.by_library(texts, limit)
        for text, library, artifact in zip(texts, expected, self.by_artifact(texts, max_tokens), strict=True):
            if not self.is_same(library, artifact) and max(library.ids, default=-1) < self._num_rows:
                yield Difference(text, limit, library, artifact)

    def encodings(self, texts: Sequence[Texts], max_length: int, *, of_library: bool) -> list[Encoding | None]:
        """``texts``, all of one kind, as a model's inputs; None for one without tokens."""
        rows = self.by_library(texts, max_length) if of_library else self.by_artifact(texts)
        return [
            Encoding(np.array(row.ids, np.int32), np.array(row.types, np.int32) if self._types_matter else None)
            if row is not None and row.ids
            else None
            for row in rows
        ]

    def with_labels(
        self, texts: Sequence[str], prompt: LabelPrompt, max_length: int, *, of_library: bool
    ) -> list[Encoding]:
        """``texts`` behind a request's labels. Raises InvalidRequestError where no room is left for texts."""
        runs = self.library.runs
        if not of_library or runs is None:
            return self.encoder.encode(texts, EncodingOptions(labels=prompt))
        around = layout_of(runs, 1, with_special=not prompt.layout.schema)
        return encode_words(runs, texts, prompt, around, max_length, lambda: None)

    def is_same(self, library: TokenIds, artifact: TokenIds | None) -> bool:
        """True if a model gets equal inputs; None means that there are no tokens."""
        if artifact is None:
            return not library.ids
        return library.ids == artifact.ids and (not self._types_matter or library.types == artifact.types)


@dataclass(frozen=True)
class Probes:
    """The inputs of the comparison: ``texts`` and ``pairs``."""

    texts: list[Texts]
    pairs: list[Texts]


def make_probes(sources: TokenSources, texts: Iterable[str], prompts: Iterable[str], max_seq_len: int) -> Probes:
    """``texts``, every added token in several places, ``prompts`` before a text, a text that is too long, and each with
    the next one as a pair."""
    known = sources.library.runs
    added = sorted(token.content for token in known.get_added_tokens_decoder().values()) if known else []
    around = [f"{token} in{token}side and {token}" for token in added]
    if 0 < len(added) <= _MOST_JOINED:
        around.append("".join(added))
    elif added:  # several in one text: the comparison's time grows with the number of texts
        around = [" ".join(around[place : place + _IN_A_TEXT]) for place in range(0, len(around), _IN_A_TEXT)]
    singles = [*PROBES, *texts, *around]
    singles += [prompt + text for prompt in prompts for text in ("", "The text.")]
    if max_seq_len <= _LONGEST:
        singles.append(" ".join(map(str, range(max_seq_len + 1))))
    singles = list(dict.fromkeys(singles))
    pairs = zip(singles, [*singles[1:], singles[0]], strict=True)
    if max_seq_len <= _LEAST_OF_PAIRS or not sources.reads_pairs:
        pairs = zip((), (), strict=True)
    return Probes([(text,) for text in singles], [pair for pair in pairs if sum(map(len, pair)) < _MOST_PAIR_CHARS])


def compare_tokens(sources: TokenSources, probes: Probes, max_seq_len: int, sha256: str) -> TokenAgreement:
    """Compare both ways on ``probes``; ``sha256`` is that of the artifact's file.

    Raises TokenizerError naming the first text that differs, with both lists.
    """
    room = sources.num_special + _ROOM  # as a request may limit it
    cuts = [text for text in probes.texts if len(text[0]) < _MOST_PAIR_CHARS] if room < max_seq_len else []
    found = chain(
        sources.differences(probes.texts, max_seq_len),
        sources.differences(probes.pairs, max_seq_len),
        sources.differences(cuts, max_seq_len, room),
    )
    if (one := next(found, None)) is not None:
        raise TokenizerError(_message(one, sources.library))
    return TokenAgreement(
        library=sources.library.library,
        tokenizer_class=sources.library.tokenizer_class,
        num_texts=len(probes.texts),
        num_pairs=len(probes.pairs),
        sha256=sha256,
    )


def reading_difference(
    folder: Path, settings: TokenizerSettings, sources: TokenSources, probes: Probes, max_seq_len: int
) -> str | None:
    """A sentence on how the library's ids, or token types that matter, differ from those of the unchanged
    tokenizer.json; None where they are equal, or where the user chose that file."""
    library = sources.library
    if library.backend is None or library.tokenizer_class == STORED or not (folder / "tokenizer.json").is_file():
        return None
    stored = open_tokenizer(folder, replace(settings, choice="file"))
    assert stored.runs is not None
    adapt(stored.runs, settings)
    as_stored = sources.with_library(stored)
    others: list[Texts] = []
    for texts in (probes.texts, probes.pairs):
        both = (one.by_library(texts, max_seq_len) for one in (sources, as_stored))
        others += [text for text, own, other in zip(texts, *both, strict=True) if not sources.is_same(own, other)]
    if not others:
        return None
    name, count = f"{library.library} ({library.tokenizer_class})", len(probes.texts) + len(probes.pairs)
    sentence = (
        f"{name} reads {len(others)} of {count} texts and pairs otherwise than tokenizer.json as it stands, such as "
        f"{_shown(others[0])}; the artifact reads them as that class does (--tokenizer file: as it stands, as "
        "transformers 4 read most files)"
    )
    added = [token for token in library.surrounded_by.values() if token is not None]
    if not added:
        return sentence
    return (
        f"{sentence}. {' and '.join(added)} are added as tokenizer_config.json asks (--tokenizer transformers: not so)"
    )


def _message(found: Difference, library: LibraryTokenizer) -> str:
    ids = [_ids_of(side) for side in (found.library, found.artifact)]
    message = (
        f"{library.library} ({library.tokenizer_class}) and the artifact's tokenizer give {_shown(found.texts)} other "
        f"tokens, cut to {found.max_length}: {ids[0]} and {ids[1]}. "
    )
    if ids[0] == ids[1]:
        types = [side.types[:_SHOWN_IDS] if side else None for side in (found.library, found.artifact)]
        message = message.removesuffix(" ") + f" Their types are {types[0]} and {types[1]}. "
    if library.backend is None:
        return message + (
            "That class is written in Python, and tokenizer.json is not the same: write one that gives the same ids, "
            "or take it as it stands with --tokenizer file."
        )
    return message + "Were the checkpoint's files changed during the build? Build again; if it stays, report a bug."


def _ids_of(side: TokenIds | None) -> str:
    if side is None:
        return "none"
    left_out = len(side.ids) - _SHOWN_IDS
    return f"{side.ids[:_SHOWN_IDS]}" + (f" and {left_out} more" if left_out > 0 else "")


def _shown(texts: Texts) -> str:
    return " with ".join(repr(text if len(text) <= 60 else text[:60] + "...") for text in texts)
