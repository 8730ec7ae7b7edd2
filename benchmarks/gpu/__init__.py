"""The benchmark of an NVIDIA GPU, which needs PyTorch and NumPy and little else of bei's dependencies."""
