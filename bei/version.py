"""The version of bei, which the wheel, the artifacts and ``bei --version`` have."""

__version__ = "0.1.0"
