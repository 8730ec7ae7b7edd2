"""bei on Ray: ``Embedder`` for Ray Data, ``deployment`` for Ray Serve. ``bei embed --ray`` places a job's shards."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bei.ray.embedder import Embedder as Embedder
    from bei.ray.serve import deployment as deployment
else:
    _MODULES = {"Embedder": "bei.ray.embedder", "deployment": "bei.ray.serve"}

    def __getattr__(name: str) -> object:
        """Imported on first use: workers need one of them."""
        if name not in _MODULES:
            raise AttributeError(f"module 'bei.ray' has no attribute {name!r}")
        return getattr(importlib.import_module(_MODULES[name]), name)
