"""Tensor files, and tensors under the names of a spec."""
