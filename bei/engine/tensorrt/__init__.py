"""Targets ``tensorrt`` and ``tensorrt-rtx``: plans on NVIDIA GPUs. Not yet run on a GPU (docs/decisions.md)."""
