"""Type stubs of TensorRT 11 and TensorRT-RTX, generated from their bindings; never committed, they are NVIDIA's.

``python -m tests.tensorrt_stubs OUT`` writes ``OUT/tensorrt/__init__.pyi``, ``OUT/tensorrt_rtx/__init__.pyi`` and
``OUT/tensorrt_module.pyi``; ``python -m tests.tensorrt_stubs --mypy`` checks with them what uses them. Tests ask
``stub_of``, which generates once.

Our functions take the library as an argument, so its type is that of a module: ``TensorRTModule`` has every name of the
library, and is the place of its classes' names too. Where the stubs are not, mypy takes it as Any (pyproject.toml)::

    from typing import TYPE_CHECKING, Any, cast

    if TYPE_CHECKING:
        from tensorrt_module import TensorRTModule, TensorRTRTXModule

    def add_profile(trt: TensorRTModule, builder: TensorRTModule.Builder) -> TensorRTModule.IOptimizationProfile:
        config = builder.create_builder_config()
        config.clear_flag(trt.BuilderFlag.TF32)  # FP16 in its place is an error: TensorRT 11 has no such flag
        return builder.create_optimization_profile()

    def limit(trt: TensorRTModule, config: TensorRTModule.IBuilderConfig) -> None:  # what only TensorRT-RTX has
        cast("TensorRTRTXModule.IBuilderConfig", config).num_compute_capabilities = 1

    def logger(trt: TensorRTModule) -> TensorRTModule.ILogger:
        base: Any = trt.ILogger  # a variable cannot be a base class to mypy

        class Recorder(base):  # type: ignore[misc]
            ...

    add_profile(cast("TensorRTModule", load_library("tensorrt", "Building")), builder)

The check runs twice, with ``TensorRTModule`` as TensorRT and as TensorRT-RTX, because the same code is for both.
"""

from tests.tensorrt_stubs.generation import StubError, generate, stub_of

__all__ = ["StubError", "generate", "stub_of"]
