"""Targets ``tensorrt`` and ``tensorrt-rtx``: plans on NVIDIA GPUs. Has not met a GPU yet (docs/decisions.md)."""

from bei.engine.tensorrt.engine import TensorRTEngine, TensorRTOptions

__all__ = ["TensorRTEngine", "TensorRTOptions"]
