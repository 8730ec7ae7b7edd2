"""What holds for all tests."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# No example has a time limit, nor has drawing one: a machine that others use stands still now and then. What is drawn
# is the same in every run, so that a failure is the change's; ``--hypothesis-profile=random`` draws anew.
settings.register_profile("repeated", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("random", settings.get_profile("repeated"), derandomize=False)
settings.load_profile("repeated")
