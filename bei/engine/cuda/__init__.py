"""Targets ``cuda`` and ``cuda-twin``: a package of AOTInductor, run by PyTorch."""
