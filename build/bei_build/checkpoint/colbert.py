"""Settings of late interaction for queries and documents (ColBERT, arXiv:2004.12832), from three kinds of files.

PyLate's keys of ``config_sentence_transformers.json``, the original ColBERT's ``artifact.metadata``, and the module
settings of sentence-transformers 6. docs/decisions.md describes what their own code does.
"""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tokenizers import Tokenizer

from bei.artifact.sides import SIDES, Role
from bei.core import Expansion
from bei.errors import CheckpointError
from bei_build.files.json_settings import read_object, setting, string_list
from bei_build.tokenizer.artifact_tokenizer import expansion_id, padding_id

Side = Literal["query", "document"]

# Defaults of PyLate and of the original code for missing keys.
_PYLATE_LENGTHS: dict[Side, int] = {"query": 32, "document": 180}
_ORIGINAL_LENGTHS: dict[Side, int] = {"query": 32, "document": 220}
# Any of these keys identifies PyLate's files.
_PYLATE_KEYS = {f"{side}_{end}" for side in _PYLATE_LENGTHS for end in ("prefix", "length")}
_PYLATE_KEYS |= {"do_query_expansion", "attend_to_expansion_tokens", "skiplist_words", "query_expansion"}
# Keys of sentence-transformers 6 in the Transformer's settings.
_MODULE_KEYS = ("query_length", "document_length", "query_expansion")
_PUNCTUATION = tuple(string.punctuation)


@dataclass(frozen=True)
class ExpansionSettings:
    """Query expansion: tokens ``token`` (None: the mask token, else the end of a text) after a query, up to
    ``length``."""

    length: int
    attended: bool = False
    token: str | None = None


@dataclass(frozen=True)
class SideSettings:
    """Settings for queries or for documents. ``length``: the most tokens (None: the model's limit). ``skipped``: words
    whose vectors are left out.

    ``finds_padding``: the original code recognizes padding by its id, so a text that contains the padding token has
    padding too. With expansion such tokens are treated like expansion tokens; otherwise their vectors are left out.
    """

    length: int | None = None
    expansion: ExpansionSettings | None = None
    skipped: tuple[str, ...] = ()
    finds_padding: bool = False


Sides = Mapping[Side, SideSettings]


def pylate_sides(path: Path, config: dict[str, Any]) -> Sides:
    """PyLate's settings in ``config``; empty where none of its keys is present. Raises CheckpointError."""
    if config.get("model_type") != "ColBERT" and _PYLATE_KEYS.isdisjoint(config):
        return {}
    lengths = {side: _length(path, config, f"{side}_length") or usual for side, usual in _PYLATE_LENGTHS.items()}
    skipped = string_list(path, config, "skiplist_words")
    expands = setting(path, config, "do_query_expansion", bool)
    attended = bool(setting(path, config, "attend_to_expansion_tokens", bool))
    expansion = None if expands is False else ExpansionSettings(lengths["query"], attended)
    query = SideSettings(lengths["query"], expansion)
    if "query_expansion" in config:  # sentence-transformers 6 reads it in place of PyLate's flags; null: none
        length, asked = _length(path, config, "query_length"), setting(path, config, "query_expansion", dict)
        expansion, length = _expansion(path, asked, length) if asked else (None, length)
        query = SideSettings(length, expansion)
    return {
        "query": query,
        "document": SideSettings(lengths["document"], None, _PUNCTUATION if skipped is None else skipped),
    }


def original_sides(path: Path, config: dict[str, Any]) -> Sides:
    """Settings of the original code's ``artifact.metadata``. Raises CheckpointError."""
    named: dict[Side, str] = {"query": "query_maxlen", "document": "doc_maxlen"}
    lengths = {side: _length(path, config, key) or _ORIGINAL_LENGTHS[side] for side, key in named.items()}
    attended = bool(setting(path, config, "attend_to_mask_tokens", bool))
    skips = setting(path, config, "mask_punctuation", bool) is not False
    return {
        "query": SideSettings(lengths["query"], ExpansionSettings(lengths["query"], attended), finds_padding=True),
        "document": SideSettings(lengths["document"], None, _PUNCTUATION if skips else (), finds_padding=True),
    }


def module_sides(transformer: Path | None, mask: Path | None) -> Sides:
    """Settings of sentence-transformers 6: lengths and expansion from the ``transformer``'s settings, the skipped words
    from the MultiVectorMask in the folder ``mask``; empty where there is neither. Raises CheckpointError."""
    settings = read_object(transformer) if transformer else {}
    if mask is None and all(settings.get(key) is None for key in _MODULE_KEYS):
        return {}
    skipped, of_sides = _skipped(mask) if mask else ((), ())
    sides: dict[Side, SideSettings] = {}
    for side in _PYLATE_LENGTHS:
        length = _length(transformer, settings, f"{side}_length") if transformer else None
        expansion = None
        if transformer and side == "query" and (asked := setting(transformer, settings, "query_expansion", dict)):
            expansion, length = _expansion(transformer, asked, length)
        sides[side] = SideSettings(length, expansion, skipped if side in of_sides else ())
    return sides


def check_no_mask(mask: Path) -> None:
    """Raise CheckpointError where the MultiVectorMask in the folder ``mask`` hides tokens from a pooling."""
    path = mask / "config.json"
    settings = read_object(path) if path.is_file() else {}
    if found := [key for key in ("skiplist_words", "keep_only_token_ids") if settings.get(key)]:
        raise CheckpointError(
            f"{path} has {found[0]}: the tokens that it hides would be left out of the pooling behind it. bei leaves "
            "tokens out of late interaction alone."
        )


def check_no_sides(transformer: Path) -> None:
    """Raise CheckpointError where ``transformer``'s settings read queries or documents of a model with one vector a
    text otherwise than other texts, as sentence-transformers 6 does."""
    settings = read_object(transformer)
    if found := [key for key in _MODULE_KEYS if settings.get(key) is not None]:
        raise CheckpointError(
            f"{transformer} has {', '.join(found)}, by which sentence-transformers cuts or fills queries or documents "
            "alone; bei does that for late interaction. Take it out, and set max_seq_length if all texts may be cut."
        )


def check_token_pooling(folder: Path) -> None:
    """Raise CheckpointError where a HierarchicalTokenPooling would reduce a text's vectors. PyLate's files have no such
    setting: there it is an argument of a call."""
    path = folder / "config.json"
    config = read_object(path) if path.is_file() else {}
    factor = config.get("pool_factor")
    factor = factor if type(factor) is float else setting(path, config, "pool_factor", int) or 1
    if not factor <= 1 and string_list(path, config, "tasks") != ():
        raise CheckpointError(
            f"{folder.name} (HierarchicalTokenPooling) makes clusters of a text's vectors, one for every {factor}, "
            "which bei does not do: take the module out of modules.json, and pool the vectors where they are stored."
        )


def _skipped(mask: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The words that a MultiVectorMask skips, and the sides on which it skips them."""
    path = mask / "config.json"
    config = read_object(path) if path.is_file() else {}
    if config.get("keep_only_token_ids"):
        raise CheckpointError(f"{path} has keep_only_token_ids, which is about images: bei reads texts only.")
    of_sides = string_list(path, config, "skiplist_tasks")
    return string_list(path, config, "skiplist_words") or (), ("document",) if of_sides is None else of_sides


def _expansion(path: Path, config: dict[str, Any], length: int | None) -> tuple[ExpansionSettings, int | None]:
    """The query's expansion, and its most tokens: strategy "fixed" cuts queries at the expansion length, "min" does
    not."""
    filled, strategy = _length(path, config, "length"), config.get("strategy")
    if filled is None or strategy not in ("fixed", "min"):
        raise CheckpointError(f"{path} has query_expansion {config}: it needs a length and the strategy fixed or min.")
    expansion = ExpansionSettings(
        filled, bool(setting(path, config, "attend", bool)), setting(path, config, "token", str)
    )
    return expansion, filled if strategy == "fixed" else length and max(length, filled)


def prompt_of(prompts: Mapping[str, str], side: Side) -> str | None:
    """The prompt of ``side``, under whichever of its names it has in ``prompts``."""
    return next((prompts[name] for name in SIDES[side] if name in prompts), None)


def roles_of(
    sides: Sides, prompts: Mapping[str, str], tokenizer: Tokenizer, folder: Path, max_seq_len: int
) -> dict[Side, Role]:
    """``sides`` with token ids of ``tokenizer``, whose files are in ``folder``. Raises CheckpointError,
    TokenizerError."""
    roles: dict[Side, Role] = {}
    for side, settings in sides.items():
        around = len(tokenizer.encode(prompt_of(prompts, side) or "").ids)
        if settings.length is not None and settings.length <= around:
            raise CheckpointError(
                f"The {side} length {settings.length} of the checkpoint's files leaves no room beside the {around} "
                "tokens that stand around every text."
            )
        expansion = None
        padding = padding_id(tokenizer, folder) if settings.finds_padding else None
        if settings.expansion is not None:
            if settings.expansion.length > max_seq_len:
                raise CheckpointError(
                    f"max_seq_len {max_seq_len} is less than the {settings.expansion.length} tokens that queries are "
                    "filled up to: choose at least that."
                )
            token_id = expansion_id(tokenizer, folder, settings.expansion.token)
            expansion = Expansion(token_id, settings.expansion.length, settings.expansion.attended, padding)
        # A word that is not a token would map to the unknown token, which stands for other words too.
        skipped = [tokenizer.token_to_id(word) for word in settings.skipped]
        if expansion is None:
            skipped.append(padding)
        roles[side] = Role(
            max_tokens=settings.length,
            expansion=expansion,
            skip_ids=sorted({index for index in skipped if index is not None}),
        )
    return roles


def _length(path: Path, config: dict[str, Any], key: str) -> int | None:
    length = setting(path, config, key, int)
    if length is not None and length < 1:
        raise CheckpointError(f"{path} has {key} = {length}: it must be at least 1.")
    return length
