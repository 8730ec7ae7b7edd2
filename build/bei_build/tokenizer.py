"""From a checkpoint's tokenizer files to the ``tokenizer.json`` of an artifact.

``tokenizer.json`` is taken as it is: going through transformers would rebuild pipelines that some checkpoints change
on purpose. Truncation and padding are switched off; the runtime does both itself.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import AddedToken, Tokenizer
from tokenizers.normalizers import Lowercase, Normalizer
from tokenizers.normalizers import Sequence as NormalizerSequence
from tokenizers.processors import PostProcessor, TemplateProcessing
from tokenizers.processors import Sequence as ProcessorSequence

from bei.errors import TokenizerError
from bei.files import MOST_TOKENIZER_BYTES, UnfitError, check_regular, read_bounded
from bei.tokenizer_file import read_tokenizer
from bei_build.settings import read_object, texts

# transformers writes int(1e30) for "no limit".
_NO_LIMIT = 1 << 24
# What BERT's and RoBERTa's classes of transformers call them where the files do not.
_MASKS = ("[MASK]", "<mask>")
_PADDINGS = ("[PAD]", "<pad>")
# Classes that stand for any tokenizer: whether they give token types differs between versions of transformers.
_GENERIC_CLASSES = ("PreTrainedTokenizer", "PreTrainedTokenizerFast", "TokenizersBackend")


# Files that transformers makes a tokenizer of.
_VOCABULARIES = ("vocab.txt", "vocab.json", "merges.txt", "added_tokens.json", "*.model", "*.tiktoken")


class _Truncation(msgspec.Struct):
    max_length: int


class _Stored(msgspec.Struct):
    """Of a tokenizer.json what is read without the vocabulary."""

    truncation: _Truncation | None = None


def tokenizer_from_checkpoint(
    folder: Path,
    do_lower_case: bool,
    markers: Sequence[str] = (),
    *,
    special_tokens: bool = True,
    ends_in_eos: bool = False,
    stored: Tokenizer | None = None,
) -> Tokenizer:
    """The tokenizer of ``folder``. Raises TokenizerError.

    ``do_lower_case`` (sentence_bert_config.json) puts a Lowercase normalizer in front, as sentence-transformers does.
    ``markers`` are beginnings of texts that are one token each, if the vocabulary has them. Without ``special_tokens``
    nothing is added to a text; with ``ends_in_eos`` EOS is, whatever the files say. ``stored`` is what
    ``stored_tokenizer`` gave, if it was asked before; it is changed.
    """
    found = stored or stored_tokenizer(folder)
    if found is not None:
        tokenizer = found
        _add_asked_tokens(tokenizer, folder)
    else:
        tokenizer = _converted(folder)
    if do_lower_case:
        before = [Lowercase()] + ([tokenizer.normalizer] if tokenizer.normalizer else [])
        normalizers: list[Normalizer] = before
        tokenizer.normalizer = NormalizerSequence(normalizers)
    _keep_whole(tokenizer, markers)
    if ends_in_eos:
        _end_in_eos(tokenizer, folder)
    if not special_tokens:
        tokenizer.post_processor = ProcessorSequence(_without_templates(tokenizer.post_processor))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def stored_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer.json of ``folder`` as it is, None where there is none. Raises TokenizerError."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        return read_tokenizer(path)
    except (UnfitError, OSError) as error:
        raise TokenizerError(f"{path} is not a readable tokenizer ({error}). Download the checkpoint again.") from error


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Refuse a tokenizer that can produce ids behind the embedding table. Raises TokenizerError."""
    highest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if highest >= vocab_size:
        raise TokenizerError(
            f"The tokenizer's ids go up to {highest}, but the embedding table has {vocab_size} rows: "
            "this tokenizer belongs to another checkpoint. Download both again from one source."
        )


def unknown_id(tokenizer: Tokenizer) -> int | None:
    """The token of what is in no vocabulary, None where everything is. A Unigram model says its id, others its text."""
    model = json.loads(tokenizer.to_str())["model"]
    token, index = model.get("unk_token"), model.get("unk_id")
    return tokenizer.token_to_id(token) if token is not None else index


def model_max_length(folder: Path) -> int | None:
    """``model_max_length`` of tokenizer_config.json, None if absent or infinite."""
    path = folder / "tokenizer_config.json"
    value = read_object(path).get("model_max_length") if path.is_file() else None
    return int(value) if isinstance(value, (int, float)) and 0 < value < _NO_LIMIT else None


def stored_truncation(folder: Path) -> int | None:
    """How many tokens of a text tokenizer.json itself keeps, None for all: sentence-transformers leaves it at that for
    static embeddings, and nowhere else. Raises TokenizerError.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        stored = msgspec.json.decode(read_bounded(path, MOST_TOKENIZER_BYTES), type=_Stored)
    except (msgspec.DecodeError, ValueError, OSError, RecursionError) as error:
        raise TokenizerError(f"{path} is not a readable tokenizer ({error}). Download the checkpoint again.") from error
    return stored.truncation.max_length if stored.truncation else None


def expansion_id(tokenizer: Tokenizer, folder: Path, token: str | None) -> int:
    """The id of ``token``; None is the mask token or, in a vocabulary without one, the end of a text, as in PyLate.

    Raises TokenizerError.
    """
    path = folder / "tokenizer_config.json"
    config = read_object(path) if path.is_file() else {}
    usual = [_token_of(folder, config, "mask"), *_MASKS, _token_of(folder, config, "eos")]
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
    """The special tokens that the files in ``folder`` name, as "bos_token" and the like: chat templates use them."""
    path = folder / "tokenizer_config.json"
    config = read_object(path) if path.is_file() else {}
    kinds = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
    named = {f"{kind}_token": _token_of(folder, config, kind) for kind in kinds}
    return {name: token for name, token in named.items() if token is not None}


def _add_asked_tokens(tokenizer: Tokenizer, folder: Path) -> None:
    """Put BOS and EOS around texts where tokenizer_config.json asks for one and tokenizer.json does not add it.

    transformers up to 4 follows tokenizer_config.json, 5 follows tokenizer.json: e5-mistral, whose embedding is the
    state of an EOS that only tokenizer_config.json asks for, lost it (https://github.com/embeddings-benchmark/mteb/pull/5237).
    """
    path = folder / "tokenizer_config.json"
    config = read_object(path) if path.is_file() else {}
    named = {kind: _token_of(folder, config, kind) for kind in ("bos", "eos")}
    ids = {kind: tokenizer.token_to_id(token) for kind, token in named.items() if token is not None}
    added = tokenizer.encode("").ids
    asked = {kind for kind, index in ids.items() if index is not None and config.get(f"add_{kind}_token") is True}
    if all(ids[kind] in added for kind in asked) or not set(added) <= set(ids.values()):  # or more than those two
        return
    _surround(tokenizer, {kind: named[kind] for kind in ids if kind in asked or ids[kind] in added})


def _end_in_eos(tokenizer: Tokenizer, folder: Path) -> None:
    """Put EOS behind texts unless it is there. Raises TokenizerError."""
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


def gives_token_types(folder: Path) -> bool:
    """Whether transformers gives the model token types: ``model_input_names`` of tokenizer_config.json, else those of
    the class that it names. Without any, all tokens are of type 0.
    """
    path = folder / "tokenizer_config.json"
    config = read_object(path) if path.is_file() else {}
    names = texts(path, config, "model_input_names")
    if names is None and (name := config.get("tokenizer_class")) not in (None, *_GENERIC_CLASSES):
        import transformers

        names = getattr(getattr(transformers, str(name), None), "model_input_names", None)
    return names is None or "token_type_ids" in names


def drop_token_types(tokenizer: Tokenizer) -> None:
    """Let all tokens be of type 0, those of a pair's second text too."""
    if not any(tokenizer.encode("a", "b").type_ids):
        return
    single, pair = (_template_around(tokenizer, num_texts) for num_texts in (1, 2))
    specials = [(token, tokenizer.token_to_id(token)) for token in {*single, *pair} if not token.startswith("$")]
    zeros = [[f"{part}:0" for part in template] for template in (single, pair)]
    template = TemplateProcessing(single=zeros[0], pair=zeros[1], special_tokens=sorted(specials))
    kept = _without_templates(tokenizer.post_processor)
    tokenizer.post_processor = ProcessorSequence([*kept, template]) if kept else template


def _template_around(tokenizer: Tokenizer, num_texts: int) -> list[str]:
    """Special tokens around one or two texts, $A and $B, read off an example."""
    encoded = tokenizer.encode("a", "b" if num_texts == 2 else None)
    parts: list[str] = []
    for token, text in zip(encoded.tokens, encoded.sequence_ids, strict=True):
        part = token if text is None else f"${'AB'[text]}"
        if text is None or part not in parts:
            parts.append(part)
    return parts


def _surround(tokenizer: Tokenizer, tokens: dict[str, str | None]) -> None:
    """Let every text be BOS, text, EOS of ``tokens``; a pair is two such, as in transformers' update_post_processor."""
    bos, eos = tokens.get("bos"), tokens.get("eos")
    first = [*([bos] if bos else []), "$A", *([eos] if eos else [])]
    second = [f"{part}:1" for part in (*first[: first.index("$A")], "$B", *first[first.index("$A") + 1 :])]
    specials = [(token, tokenizer.token_to_id(token)) for token in dict.fromkeys((bos, eos)) if token]
    template = TemplateProcessing(single=first, pair=[*first, *second], special_tokens=specials)
    kept = _without_templates(tokenizer.post_processor)
    tokenizer.post_processor = ProcessorSequence([*kept, template]) if kept else template


def _without_templates(processor: PostProcessor | None) -> list[PostProcessor]:
    """The parts of ``processor`` that add no tokens (ByteLevel, which sets offsets)."""
    if processor is None:
        return []
    parts = [processor]
    if isinstance(processor, ProcessorSequence):
        parts = []
        with contextlib.suppress(IndexError):  # it has no length
            while True:
                parts.append(processor[len(parts)])
    return [part for part in parts if part.num_special_tokens_to_add(False) == 0]


def _token_of(folder: Path, config: dict[str, Any], kind: str) -> str | None:
    """The ``kind`` token as tokenizer_config.json spells it, else special_tokens_map.json."""
    path = folder / "special_tokens_map.json"
    for source in (config, read_object(path) if path.is_file() else {}):
        token = source.get(f"{kind}_token")
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            return token
    return None


def _keep_whole(tokenizer: Tokenizer, markers: Sequence[str]) -> None:
    """Let ``markers`` that are in the vocabulary stay one token each, as they were in training.

    A marker may be stored with its space ("[Q] "), or be an unused token that the tokenizer would take apart.
    """
    for marker in markers:
        for spelling in (marker, *marker.split()[:1]):
            if tokenizer.token_to_id(spelling) is not None:
                if tokenizer.encode(spelling, add_special_tokens=False).tokens != [spelling]:
                    tokenizer.add_special_tokens([AddedToken(spelling, normalized=False, special=True)])
                break


def _converted(folder: Path) -> Tokenizer:
    """Build from vocab.txt, sentencepiece and the like: transformers knows how."""
    from transformers import AutoTokenizer

    for path in (path for pattern in _VOCABULARIES for path in folder.glob(pattern)):
        try:
            check_regular(path, MOST_TOKENIZER_BYTES)
        except UnfitError as error:
            raise TokenizerError(f"{path} is not a readable vocabulary: {error}. Download it again.") from error
    try:
        slow_or_fast = AutoTokenizer.from_pretrained(folder, use_fast=True, trust_remote_code=False)
        if not hasattr(slow_or_fast, "backend_tokenizer"):
            raise TokenizerError(
                f"The checkpoint's tokenizer ({type(slow_or_fast).__name__}) exists in Python alone, and bei runs "
                "those of a tokenizer.json: write one that gives the same ids, or choose another checkpoint."
            )
        tokenizer = Tokenizer.from_str(slow_or_fast.backend_tokenizer.to_str())
        special_tokens = set(slow_or_fast.all_special_tokens)
    except TokenizerError:
        raise
    except Exception as error:  # transformers raises OSError, ValueError, KeyError, AttributeError, ... here
        raise TokenizerError(
            f"{folder} has no tokenizer.json, and transformers could not make one from its other files ({error}). "
            "Download the tokenizer's files too."
        ) from error
    if set(tokenizer.get_vocab()) <= special_tokens:  # what transformers 5 makes of a folder without any such file
        raise TokenizerError(
            f"{folder} has no tokenizer.json and no other file with a vocabulary. Download the tokenizer's files too."
        )
    return tokenizer
