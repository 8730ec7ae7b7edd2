"""Targets ``cuda`` and ``cuda-twin``: a package of AOTInductor, run by PyTorch."""

from bei.engine.cuda.engine import CudaEngine, CudaOptions

__all__ = ["CudaEngine", "CudaOptions"]
