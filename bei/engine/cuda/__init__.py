"""Targets ``cuda`` and ``cuda-twin``: an AOTInductor package, run by PyTorch."""
