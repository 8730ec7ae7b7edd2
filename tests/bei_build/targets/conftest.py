"""TensorRT-RTX for the tests of this folder."""

from __future__ import annotations

from types import ModuleType

import pytest

from tests.bei_build.targets.rtx import VERSION, AheadOfTimeBuilder, module_like


@pytest.fixture(scope="session")
def trt() -> ModuleType:
    """TensorRT-RTX as the module ``tensorrt``."""
    import tensorrt_rtx_bindings as rtx

    return module_like(rtx, Builder=lambda logger: AheadOfTimeBuilder(rtx, logger), __version__=VERSION)
