"""All entries of the list, by chapter: read from ``repositories/*.yaml``, a repository each.

The keys of a repository are the fields of ``Entry``. In ``structure``, ``kind`` is one of ``kinds.KINDS``, without it
``Structure`` itself, and all other keys are its arguments:

* ``settings``: a name of ``shapes``, or a mapping with at most one of ``like`` (such a name), ``decoder`` and ``gte``
  (arguments of the functions there); ``without`` drops keys, ``rope`` has the arguments of ``shapes.rope``.
* ``tokenizer``: a function of ``tokenizers``; ``stored``: a dtype of torch; ``behind``: a function of ``stored``.
* ``prepare``: functions of ``stored`` or ``stored_modules``, each alone or with its arguments behind the folder.
* ``tail``: modules behind the pooling, each alone or with its arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml

from tests.hub_matrix import shapes, stored, stored_modules, tokenizers
from tests.hub_matrix.kinds import KINDS
from tests.hub_matrix.structures import Entry, LayerNorm, Settings, Structure, Template
from tests.support.checkpoints import Dense, Normalize

_FOLDER = Path(__file__).parent / "repositories"
_FILES = {
    "Encoders that embed": "embedders",
    "Language models that embed": "embedding_language_models",
    "Rerankers": "rerankers",
    "Sparse vectors and late interaction": "sparse_and_late",
    "Static embeddings": "static",
    "Sentiment and topics": "sentiment",
    "Entailment and zero-shot": "entailment",
    "Safety": "safety",
    "Named entities": "named_entities",
    "Reward models": "rewards",
    "Code of the repository's own": "remote_code",
    "Language models read as embedders": "language_models",
    "Encoders of other kinds": "other_encoders",
    "Other forms of weights, other kinds of models": "other_forms",
}
_TAIL: Mapping[str, Callable[..., Dense | LayerNorm | Normalize]] = {
    "Dense": Dense,
    "LayerNorm": LayerNorm,
    "Normalize": Normalize,
}


def _entry(repository: str, fields: dict[str, Any]) -> Entry:
    return Entry(repository, _structure(**fields.pop("structure")), same_as=tuple(fields.pop("same_as", ())), **fields)


def _structure(kind: str = "", **values: Any) -> Structure:
    make: Callable[..., Structure] = KINDS[kind] if kind else Structure
    return make(**{name: _READERS[name](value) if name in _READERS else value for name, value in values.items()})


def _settings(value: str | Settings) -> Settings:
    if isinstance(value, str):
        found: Settings = getattr(shapes, value)
        return found
    rest = dict(value)
    base = _settings(rest.pop("like", {})) if "like" in rest else {}
    without, rope = rest.pop("without", ()), rest.pop("rope", None)
    if rope is not None:
        rest |= shapes.rope(**rope)
    if "gte" in rest:
        base = shapes.gte(*rest.pop("gte"))
    if "decoder" in rest:
        heads, kv_heads = rest.pop("decoder")
        return shapes.decoder(heads, kv_heads, **rest)
    return {**{name: setting for name, setting in base.items() if name not in without}, **rest}


def _prepare(steps: list[str | dict[str, Any]]) -> tuple[Callable[[Path], object], ...]:
    return tuple(map(_step, steps))


def _step(step: str | dict[str, Any]) -> Callable[[Path], object]:
    if isinstance(step, str):
        return _preparer(step)
    ((name, arguments),) = step.items()
    function = _preparer(name)
    if isinstance(arguments, dict):
        return lambda folder: function(folder, **arguments)
    return lambda folder: function(folder, *arguments)


def _preparer(name: str) -> Callable[..., object]:
    found: Callable[..., object] = getattr(stored_modules if hasattr(stored_modules, name) else stored, name)
    return found


def _tail(modules: list[str | dict[str, list[Any]]]) -> tuple[Dense | LayerNorm | Normalize, ...]:
    named = [{module: []} if isinstance(module, str) else module for module in modules]
    return tuple(_TAIL[name](*arguments) for module in named for name, arguments in module.items())


def _options(options: Settings) -> Settings:
    """Lists become tuples, as the builder's configuration has them."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}


_READERS: Mapping[str, Callable[[Any], object]] = {
    "settings": _settings,
    "tokenizer": lambda name: getattr(tokenizers, name),
    "stored": lambda name: getattr(torch, name),
    "behind": lambda name: getattr(stored, name),
    "prepare": _prepare,
    "tail": _tail,
    "options": _options,
    "template": lambda fields: Template(**_options(fields)),
}

CHAPTERS: dict[str, tuple[Entry, ...]] = {
    chapter: tuple(
        _entry(*item) for item in yaml.safe_load((_FOLDER / f"{name}.yaml").read_text(encoding="utf-8")).items()
    )
    for chapter, name in _FILES.items()
}
ENTRIES: tuple[Entry, ...] = tuple(entry for entries in CHAPTERS.values() for entry in entries)
