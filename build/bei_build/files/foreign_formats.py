"""Model formats other than transformers' checkpoints: each kind by its name, and what to build instead."""

from __future__ import annotations

from pathlib import Path

_FROM_THE_ORIGINAL = "Build from the original checkpoint, the one with config.json and safetensors."
_SETTINGS = "Put the model's config.json and tokenizer beside it."

# Files that identify a folder's format, most telling first.
_KINDS = (
    ("*.onnx", f"an ONNX export. {_SETTINGS}"),
    ("onnx/*.onnx", f"an ONNX export. {_SETTINGS}"),
    ("openvino_model.xml", f"an OpenVINO export. {_FROM_THE_ORIGINAL}"),
    ("tf_model.h5", "weights of TensorFlow. Save them with transformers' from_pretrained(..., from_tf=True) first"),
    ("flax_model.msgpack", "weights of Flax. Save them with transformers' from_pretrained(..., from_flax=True) first"),
)


def foreign_kind(folder: Path) -> str | None:
    """The format that ``folder`` holds instead of a checkpoint, with a remedy; None if no known one."""
    return next((kind.rstrip(".") for pattern, kind in _KINDS if any(folder.glob(pattern))), None)
