"""How many cores this process may use."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """Cores of this process's affinity mask (containers and taskset narrow it)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
