"""What a folder holds that is no checkpoint of transformers': each kind by its name, and what to build instead."""

from __future__ import annotations

from pathlib import Path

_FROM_THE_ORIGINAL = "Build from the original checkpoint, the one with config.json and safetensors."

# Files that say what a folder is, most telling first.
_KINDS = (
    ("gliner_config.json", "a GLiNER model, which finds spans for labels given with a request: bei has no such task"),
    ("*.gguf", f"a GGUF file, the form of llama.cpp. {_FROM_THE_ORIGINAL}"),
    ("*.onnx", f"an ONNX export. {_FROM_THE_ORIGINAL}"),
    ("onnx/*.onnx", f"an ONNX export. {_FROM_THE_ORIGINAL}"),
    ("openvino_model.xml", f"an OpenVINO export. {_FROM_THE_ORIGINAL}"),
    ("tf_model.h5", "weights of TensorFlow. Save them with transformers' from_pretrained(..., from_tf=True) first"),
    ("flax_model.msgpack", "weights of Flax. Save them with transformers' from_pretrained(..., from_flax=True) first"),
)


def foreign_kind(folder: Path) -> str | None:
    """What ``folder`` holds instead of a checkpoint, with what to do; None where nothing is known of it."""
    return next((kind.rstrip(".") for pattern, kind in _KINDS if any(folder.glob(pattern))), None)
