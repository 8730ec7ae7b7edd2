"""Kernels of bei's target ``cpu``, as an extension of OpenVINO. bei uses them where this package is installed."""

from __future__ import annotations

from pathlib import Path

from bei_kernels_cpu._build import OPENVINO

__version__ = "0.6.2"
__all__ = ["LIBRARY", "OPENVINO", "OPERATIONS"]

# The extension, for ``Core.add_extension``; ``OPENVINO`` is the version that it was compiled for, and runs with alone.
LIBRARY = Path(__file__).parent / "libbei_kernels.so"

OPERATIONS = ("NormalizedSum", "PackedAttention", "RoundedRows")
