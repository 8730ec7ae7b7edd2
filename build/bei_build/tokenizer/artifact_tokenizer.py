"""The tokenizer of an artifact: the one that the model's own library runs, with the changes that the model's code
makes.

Truncation and padding are switched off; the runtime does both itself.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import AddedToken, Tokenizer
from tokenizers.normalizers import Lowercase, Normalizer
from tokenizers.normalizers import Sequence as NormalizerSequence
from tokenizers.processors import PostProcessor, TemplateProcessing
from tokenizers.processors import Sequence as ProcessorSequence

from bei.errors import TokenizerError
from bei.utils.untrusted_files import MOST_TOKENIZER_BYTES, read_bounded
from bei_build.files.json_settings import read_object
from bei_build.tokenizer.library_tokenizer import LibraryTokenizer, TokenizerSettings, stored_tokenizer, token_of

# transformers writes int(1e30) for "no limit".
_NO_LIMIT = 1 << 24
# Defaults of transformers' BERT and RoBERTa classes.
_MASKS = ("[MASK]", "<mask>")
_PADDINGS = ("[PAD]", "<pad>")


class _Truncation(msgspec.Struct):
    max_length: int


class _Stored(msgspec.Struct):
    """The parts of a tokenizer.json that are read without the vocabulary."""

    truncation: _Truncation | None = None


_stored_decoder = msgspec.json.Decoder(_Stored)


def artifact_tokenizer(library: LibraryTokenizer, settings: TokenizerSettings, folder: Path) -> Tokenizer:
    """The tokenizer of ``folder`` as the runtime uses it; changes ``library``'s own in place. Raises TokenizerError.

    If the library's class is written in Python, it is the unchanged tokenizer.json, whose ids are compared later.
    """
    tokenizer = library.backend or stored_tokenizer(folder)
    assert tokenizer is not None, "open_tokenizer refuses what has neither"
    tokenizer.no_truncation()  # before the tokens around a text are read
    tokenizer.no_padding()
    if library.surrounded_by:
        _surround(tokenizer, library.surrounded_by)
    adapt(tokenizer, settings)
    if settings.ends_in_eos:
        _end_in_eos(tokenizer, folder)
    if settings.around:
        before, behind = around_ids(tokenizer, settings.around)
        _put_around(tokenizer, before, behind)
    if settings.is_static:
        tokenizer.post_processor = ProcessorSequence(_without_templates(tokenizer.post_processor))
    return tokenizer


def around_ids(tokenizer: Tokenizer, around: tuple[str, str]) -> tuple[list[int], list[int]]:
    """The token ids of what a processor writes before and behind a text."""
    before, behind = (tokenizer.encode(part, add_special_tokens=False).ids for part in around)
    return before, behind


def adapt(tokenizer: Tokenizer, settings: TokenizerSettings) -> None:
    """Apply the changes that sentence-transformers and PyLate make to a loaded tokenizer."""
    if settings.lowercase and not _lowers(tokenizer.normalizer):
        before: list[Normalizer] = [Lowercase()]
        tokenizer.normalizer = NormalizerSequence(before + ([tokenizer.normalizer] if tokenizer.normalizer else []))
    _keep_whole(tokenizer, settings.markers)


def without_rowless_tokens(
    tokenizer: Tokenizer, stored: Tokenizer | None, vocab_size: int
) -> tuple[Tokenizer, tuple[str, ...]]:
    """``tokenizer`` without the added tokens that only the class defines, not tokenizer.json (``stored``), and for
    which the embedding table has no row; and the list of these. transformers fails on a text that contains one: here it
    is ordinary text.

    Raises TokenizerError where other ids are beyond the table.
    """
    own = stored.get_vocab(with_added_tokens=True) if stored else {}
    added = {token.content: index for index, token in tokenizer.get_added_tokens_decoder().items()}
    left_out = tuple(token for token, index in added.items() if index >= vocab_size and token not in own)
    if left_out:
        parts = json.loads(tokenizer.to_str())
        parts["added_tokens"] = [token for token in parts["added_tokens"] if token["content"] not in left_out]
        splits, tokenizer = tokenizer.encode_special_tokens, Tokenizer.from_str(json.dumps(parts))
        tokenizer.encode_special_tokens = splits
    check_vocabulary(tokenizer, vocab_size)
    if max([*tokenizer.encode("").ids, *tokenizer.encode("", "").ids], default=-1) >= vocab_size:
        raise TokenizerError(
            f"A token around every text has no row in the embedding table, which has {vocab_size}: this tokenizer "
            "belongs to another checkpoint. Download both again from one source."
        )
    return tokenizer, left_out


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Refuse a tokenizer that can produce ids beyond the embedding table. Raises TokenizerError."""
    token, highest = max(tokenizer.get_vocab(with_added_tokens=True).items(), key=lambda one: one[1], default=("", -1))
    if highest >= vocab_size:
        raise TokenizerError(
            f"The tokenizer's ids go up to {highest} ({token!r}), but the embedding table has {vocab_size} rows: "
            "this tokenizer belongs to another checkpoint. Download both again from one source."
        )


def unknown_id(tokenizer: Tokenizer) -> int | None:
    """The id of the unknown token, None where every text can be encoded. A Unigram model stores the id, others the
    token."""
    model = json.loads(tokenizer.to_str())["model"]
    token, index = model.get("unk_token"), model.get("unk_id")
    return tokenizer.token_to_id(token) if token is not None else index


def model_max_length(folder: Path, arguments: Mapping[str, Any] | None = None) -> int | None:
    """``model_max_length`` of ``arguments``, else of tokenizer_config.json, None if absent or infinite."""
    path, key = folder / "tokenizer_config.json", "model_max_length"
    said = read_object(path) if path.is_file() else {}
    value = {**said, **(arguments or {})}.get(key)
    return int(value) if isinstance(value, (int, float)) and 0 < value < _NO_LIMIT else None


def stored_truncation(folder: Path) -> int | None:
    """The truncation length in tokenizer.json, None for no limit: sentence-transformers keeps it for static embeddings,
    and nowhere else. Raises TokenizerError."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        stored = _stored_decoder.decode(read_bounded(path, MOST_TOKENIZER_BYTES))
    except (msgspec.DecodeError, ValueError, OSError, RecursionError) as error:
        raise TokenizerError(f"{path} is not a readable tokenizer ({error}). Download the checkpoint again.") from error
    return stored.truncation.max_length if stored.truncation else None


def expansion_id(tokenizer: Tokenizer, folder: Path, token: str | None) -> int:
    """The id of ``token``; None is the mask token or, in a vocabulary without one, the end of a text, as in PyLate.

    Raises TokenizerError.
    """
    usual = [token_of(folder, "mask"), *_MASKS, token_of(folder, "eos")]
    for candidate in [token] if token is not None else usual:
        if candidate is not None and (index := tokenizer.token_to_id(candidate)) is not None:
            return int(index)
    raise TokenizerError(
        f"Queries are to be filled up with {token or 'a mask token'}, which the vocabulary does not have: download the "
        "tokenizer's files too."
    )


def padding_id(tokenizer: Tokenizer, folder: Path) -> int | None:
    """The id of the padding token, None in a vocabulary without one."""
    named = special_tokens(folder).get("pad_token")
    ids = [tokenizer.token_to_id(token) for token in ([named] if named else _PADDINGS)]
    return next((index for index in ids if index is not None), None)


def special_tokens(folder: Path) -> dict[str, str]:
    """The special tokens that the files in ``folder`` name, by kind ("bos_token" and others); chat templates use
    them."""
    kinds = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
    named = {f"{kind}_token": token_of(folder, kind) for kind in kinds}
    return {name: token for name, token in named.items() if token is not None}


def _end_in_eos(tokenizer: Tokenizer, folder: Path) -> None:
    """Append EOS to texts unless the tokenizer does. Raises TokenizerError."""
    named = special_tokens(folder)
    bos, eos = named.get("bos_token"), named.get("eos_token")
    added = tokenizer.encode("").tokens
    if eos is None or not set(added) <= {bos, eos}:
        raise TokenizerError(
            f"Texts of this model end in EOS; the tokenizer in {folder} puts {added} around them, and its EOS is "
            f"{eos!r}: name eos_token in tokenizer_config.json, or choose another checkpoint."
        )
    if eos not in added:
        _surround(tokenizer, {"bos": bos if bos in added else None, "eos": eos})


def drop_token_types(tokenizer: Tokenizer) -> None:
    """Set the type of all tokens to 0, including a pair's second text."""
    if not any(tokenizer.encode("a", "b").type_ids):
        return
    single, pair = (_template_around(tokenizer, num_texts) for num_texts in (1, 2))
    specials = [(token, tokenizer.token_to_id(token)) for token in {*single, *pair} if not token.startswith("$")]
    zeros = [[f"{part}:0" for part in template] for template in (single, pair)]
    template = TemplateProcessing(single=zeros[0], pair=zeros[1], special_tokens=sorted(specials))
    kept = _without_templates(tokenizer.post_processor)
    tokenizer.post_processor = ProcessorSequence([*kept, template]) if kept else template


def _template_around(tokenizer: Tokenizer, num_texts: int) -> list[str]:
    """Special tokens around one or two texts, $A and $B, taken from an example."""
    encoded = tokenizer.encode("a", "b" if num_texts == 2 else None)
    parts: list[str] = []
    for token, text in zip(encoded.tokens, encoded.sequence_ids, strict=True):
        part = token if text is None else f"${'AB'[text]}"
        if text is None or part not in parts:
            parts.append(part)
    return parts


def _surround(tokenizer: Tokenizer, tokens: Mapping[str, str | None]) -> None:
    """Make every text BOS, text, EOS from ``tokens``; a pair is two such texts, as in transformers'
    update_post_processor."""
    bos, eos = tokens.get("bos"), tokens.get("eos")
    first = [*([bos] if bos else []), "$A", *([eos] if eos else [])]
    second = [f"{part}:1" for part in (*first[: first.index("$A")], "$B", *first[first.index("$A") + 1 :])]
    specials = [(token, tokenizer.token_to_id(token)) for token in dict.fromkeys((bos, eos)) if token]
    template = TemplateProcessing(single=first, pair=[*first, *second], special_tokens=specials)
    kept = _without_templates(tokenizer.post_processor)
    tokenizer.post_processor = ProcessorSequence([*kept, template]) if kept else template


def _put_around(tokenizer: Tokenizer, before: Sequence[int], behind: Sequence[int]) -> None:
    """Make every text the tokens ``before``, text, the tokens ``behind``, and nothing else."""
    names = {index: str(tokenizer.id_to_token(index)) for index in (*before, *behind)}
    single = [*(f"{names[index]}:0" for index in before), "$A:0", *(f"{names[index]}:0" for index in behind)]
    pair = [*single[: len(before) + 1], "$B:0", *single[len(before) + 1 :]]
    template = TemplateProcessing(single=single, pair=pair, special_tokens=[(n, i) for i, n in names.items()])
    kept = _without_templates(tokenizer.post_processor)
    tokenizer.post_processor = ProcessorSequence([*kept, template]) if kept else template


def _lowers(normalizer: Normalizer | None) -> bool:
    """True if the normalizer lower-cases already, by sentence-transformers' test."""
    parts = _parts(normalizer) if isinstance(normalizer, NormalizerSequence) else [normalizer]
    return any(isinstance(part, Lowercase) for part in parts)


def _without_templates(processor: PostProcessor | None) -> list[PostProcessor]:
    """The parts of ``processor`` that add no tokens (ByteLevel, which sets offsets)."""
    if processor is None:
        return []
    parts = _parts(processor) if isinstance(processor, ProcessorSequence) else [processor]
    return [part for part in parts if part.num_special_tokens_to_add(False) == 0]


def _parts(sequence: Any) -> list[Any]:
    """The parts of a sequence of normalizers or processors, which has no length."""
    parts: list[Any] = []
    with contextlib.suppress(IndexError):
        while True:
            parts.append(sequence[len(parts)])
    return parts


def _keep_whole(tokenizer: Tokenizer, markers: Sequence[str]) -> None:
    """Keep ``markers`` that are in the vocabulary as one token each, as they were in training.

    A marker may be stored with its space ("[Q] "), or be an unused token that the tokenizer would split.
    """
    for marker in markers:
        for spelling in (marker, *marker.split()[:1]):
            if tokenizer.token_to_id(spelling) is not None:
                if tokenizer.encode(spelling, add_special_tokens=False).tokens != [spelling]:
                    tokenizer.add_special_tokens([AddedToken(spelling, normalized=False, special=True)])
                break
