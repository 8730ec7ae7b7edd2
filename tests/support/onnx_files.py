"""Folders whose only weights are an ONNX export, made by torch's own exporters."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import onnx
import torch
import transformers

from bei_build.files.json_settings import read_object
from tests.support.checkpoints import WEIGHTS

_OPSET = 17


def save_onnx(
    source: Path,
    folder: Path,
    name: str = "onnx/model.onnx",
    *,
    dynamo: bool = False,
    half: bool = False,
    external: bool = False,
    folded: bool = True,
) -> Path:
    """Write the checkpoint in ``source`` to ``folder`` with an export in place of its weights, and return the export's
    path. ``dynamo``: torch's newer exporter, which needs onnxscript. ``half``: weights in FP16. ``external``: tensors
    in a file beside. ``folded``: matrices are transposed in the file, as by default."""
    file = folder / name
    file.parent.mkdir(parents=True)
    for path in source.iterdir():
        if path.name != WEIGHTS:
            (shutil.copytree if path.is_dir() else shutil.copy)(path, folder / path.name)
    architecture = read_object(source / "config.json")["architectures"][0]
    model = getattr(transformers, architecture).from_pretrained(source, attn_implementation="eager").eval()
    model.config.return_dict, model.config.use_cache = True, False
    if getattr(model.config, "use_bidirectional_attention", False):
        model.config.use_bidirectional_attention = False  # the older exporter cannot trace that mask; no weight has it
    model = model.half() if half else model
    ids = torch.randint(5, model.config.vocab_size, (2, 7), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    axes = {one: {0: "batch", 1: "tokens"} for one in inputs}
    settings: dict[str, Any] = {"dynamic_axes": axes, "do_constant_folding": folded}
    if dynamo:
        settings = {"dynamic_shapes": axes, "external_data": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own
        torch.onnx.export(
            _FirstOutput(model),
            (ids, torch.ones_like(ids)),
            str(file),
            dynamo=dynamo,
            input_names=list(inputs),
            output_names=["first"],
            opset_version=18 if dynamo else _OPSET,
            **settings,
        )
    if external:
        place_outside(file)
    return file


class _FirstOutput(torch.nn.Module):
    """``model`` with its first output alone, and nothing of itself in its names."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        first: torch.Tensor = self.model(input_ids=input_ids, attention_mask=attention_mask)[0]
        return first


def place_outside(file: Path) -> Path:
    """Move the tensors of ``file`` into one beside it, and return that one's path."""
    model = onnx.load(file)
    beside = f"{file.name}_data"
    onnx.save_model(model, file, save_as_external_data=True, location=beside, size_threshold=0)
    return file.parent / beside
