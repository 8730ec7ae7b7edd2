"""What holds for all tests."""

from __future__ import annotations

import gc
import os
import sys

from hypothesis import HealthCheck, settings

# Read when the libraries are imported. As bei's commands set them: threads that wait for each other spin.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# PyTorch's threads would meet at each of a tiny model's products, and cores are busy with other processes of the tests:
# parity took 1.3 times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# No example has a time limit, nor has drawing one: a machine that others use stands still now and then. What is drawn
# is the same in every run, so that a failure is the change's; ``--hypothesis-profile=random`` draws anew.
settings.register_profile("repeated", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("random", settings.get_profile("repeated"), derandomize=False)
settings.load_profile("repeated")

# Collecting makes a million objects that stay: looking for garbage among them would take a third of its time.
gc.disable()


def pytest_collection_finish() -> None:
    _freeze()
    gc.enable()


def pytest_runtest_setup() -> None:
    """Looking for garbage in what torch and transformers have imported meanwhile takes a quarter of a second, and
    engines look for it whenever they are closed."""
    if len(sys.modules) > _Frozen.num_modules + 200:
        gc.collect()
        _freeze()


class _Frozen:
    num_modules = 0


def _freeze() -> None:
    gc.freeze()
    _Frozen.num_modules = len(sys.modules)
