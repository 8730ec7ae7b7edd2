"""Targets ``tensorrt`` and ``tensorrt-rtx``: plans on NVIDIA GPUs. Has not met a GPU yet (docs/decisions.md)."""
