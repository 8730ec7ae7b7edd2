"""Compilers, one module or package per target, selected by ``choose.compiler_for``."""
