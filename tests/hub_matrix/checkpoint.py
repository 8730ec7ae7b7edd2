"""Writes a structure as the folder that the repository has, with random weights."""

from __future__ import annotations

import copy
import json
import re
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer

from tests.hub_matrix.stored import tokenizer_class, write_keys_of_transformers_4
from tests.hub_matrix.structures import LayerNorm, Structure
from tests.support.checkpoints import (
    Normalize,
    add_modules,
    change_config,
    save_dense,
    write_json,
    write_tensors,
)

_NORM = re.compile(r"norm|(^|\.)ln_|\.ln\.", re.IGNORECASE)


def save(structure: Structure, folder: Path) -> Any:
    """Write the checkpoint of ``structure`` into ``folder``; returns the model that has its weights, None without."""
    folder.mkdir(parents=True)
    model = None
    if structure.hf_class:
        tokenizer = _tokenizer(structure)
        model = _random_model(structure, max(tokenizer.get_vocab().values()) + 1)
        copy.deepcopy(model).to(structure.stored).save_pretrained(folder)
        # Most repositories were saved before transformers 5.
        write_keys_of_transformers_4(folder, layer_types="layer_types" in structure.settings)
        tokenizer.save(str(folder / "tokenizer.json"))
        if name := structure.named_tokenizer_class:
            tokenizer_class(folder, name)
    if structure.modules:
        _add_modules(structure, folder)
    if structure.linear_files:
        _add_linear_files(structure, folder)
    for name, content in structure.files.items():
        write_json(folder / name, content)
    if structure.changes:
        change_config(folder, **structure.changes)
    for step in structure.prepare:
        step(folder)
    return model


def _tokenizer(structure: Structure) -> Tokenizer:
    """The tokenizer, saved by its class if one is named: the class may add special tokens and a normalizer."""
    tokenizer = structure.tokenizer()
    if not structure.named_tokenizer_class:
        return tokenizer
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer.save(f"{scratch}/tokenizer.json")
        tokenizer_class(Path(scratch), structure.named_tokenizer_class)
        library = transformers.AutoTokenizer.from_pretrained(scratch)
    made: Tokenizer = Tokenizer.from_str(library.backend_tokenizer.to_str())
    return made


def _random_model(structure: Structure, vocab_size: int) -> Any:
    """Every parameter is random, norms are near one; wide matrices have smaller weights."""
    model_class = getattr(transformers, str(structure.hf_class))
    labels = {"num_labels": structure.labels} if structure.labels else {}
    config = model_class.config_class(**{"vocab_size": vocab_size, **labels, **structure.settings})
    # A query's mask tokens may have no key in their window: torch's attention gives zeros, the eager one a mean.
    config._attn_implementation = "sdpa" if structure.late else "eager"
    with torch.random.fork_rng():
        torch.manual_seed(20)
        model = model_class(config)
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:  # a table of sines
                continue
            spread = 0.2 if parameter.ndim < 2 else min(0.2, parameter.shape[-1] ** -0.5)
            is_factor = parameter.ndim == 1 and name.endswith("weight") and _NORM.search(name)
            mean = 1.0 if is_factor and not str(structure.hf_class).startswith("Gemma") else 0.0
            torch.nn.init.normal_(parameter, mean=mean, std=spread)
            parameter.data = parameter.data.to(structure.stored).float()
    return model.eval()


def width_of(structure: Structure) -> int:
    """The width of the states."""
    settings = structure.settings
    return int(next(settings[key] for key in ("hidden_size", "dim", "d_model", "n_embd") if key in settings))


def _add_modules(structure: Structure, folder: Path) -> None:
    """modules.json with its modules' folders, and config_sentence_transformers.json."""
    hidden = width_of(structure)
    dense_or_unit = tuple(layer for layer in structure.tail if not isinstance(layer, LayerNorm))
    if dense_or_unit == structure.tail:
        add_modules(folder, (structure.pooling,), dense_or_unit, hidden=hidden)
    else:
        _add_mixed_modules(structure, folder, hidden)
    if structure.prompts:  # sentence-transformers from 2.4 on says that the pooling counts them
        path = folder / "1_Pooling" / "config.json"
        write_json(path, {**json.loads(path.read_text()), "include_prompt": True})
        write_json(folder / "config_sentence_transformers.json", {"prompts": structure.prompts})


def _add_mixed_modules(structure: Structure, folder: Path, width: int) -> None:
    """``add_modules`` that knows LayerNorm modules too."""
    add_modules(folder, (structure.pooling,), (), hidden=width)
    modules = json.loads((folder / "modules.json").read_text())
    for index, layer in enumerate(structure.tail, start=2):
        kind = type(layer).__name__
        path = folder / f"{index}_{kind}"
        kind = f"sentence_transformers.models.{kind}"
        modules.append({"idx": index, "name": str(index), "path": path.name, "type": kind})
        if isinstance(layer, LayerNorm):
            write_json(path / "config.json", {"dimension": layer.dimension})
            rows = torch.linspace(0.5, 1.5, layer.dimension)
            write_tensors(path, {"norm.weight": rows, "norm.bias": rows - 1.0})
        elif not isinstance(layer, Normalize):
            save_dense(path, width, layer)
            width = layer.out_features
    write_json(folder / "modules.json", modules)


def _add_linear_files(structure: Structure, folder: Path) -> None:
    """BGE-M3's layers for words and for tokens."""
    hidden, generator = width_of(structure), torch.Generator().manual_seed(1)
    for name, width in (("sparse_linear", 1), ("colbert_linear", hidden)):
        weight = torch.randn(width, hidden, generator=generator) / hidden**0.5
        torch.save({"weight": weight, "bias": torch.randn(width, generator=generator) / 6}, folder / f"{name}.pt")
