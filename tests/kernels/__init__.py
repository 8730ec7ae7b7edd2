"""Tests of kernels/: the package is compiled, and not a part of the wheel."""
