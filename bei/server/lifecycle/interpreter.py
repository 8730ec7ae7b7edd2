"""How Python shares a serving process between threads, and when it looks for garbage."""

from __future__ import annotations

import gc
import sys

# An engine thread that comes back from a batch must not wait Python's usual 5 ms for the event loop to let go of the
# interpreter: the device would be idle (docs/decisions.md: +5 % single texts, +2 % bulk).
_SWITCH_INTERVAL_S = 1e-4

# Python's garbage collector stops every thread for 1 us an object it looks at. A collection of everything took 60 to
# 100 ms, most of it for what was imported at start (docs/decisions.md, "Large answers"): that is left out for good, and
# the rest, a large request's inputs say, is looked at as a whole a thousandth as often. Reference counts free nearly
# everything here; the collector is for the cycles of exceptions, which are young.
_GC_THRESHOLDS = (5_000, 20, 100)


def switch_quickly() -> None:
    """Let threads hand the interpreter over soon. Before anything else of a server."""
    sys.setswitchinterval(_SWITCH_INTERVAL_S)


def collect_rarely() -> None:
    """Leave what there is to itself. When everything is loaded."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)
