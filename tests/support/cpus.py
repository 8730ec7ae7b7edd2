"""What CPUs differ in: tests that need more than every one has are skipped."""

from __future__ import annotations

import pytest

from bei_build.targets.openvino import cpu_capabilities

needs_bf16 = pytest.mark.skipif("BF16" not in cpu_capabilities(), reason="this CPU does not compute in bf16")

# For ``parametrize``.
BF16 = pytest.param("bf16", marks=needs_bf16)
