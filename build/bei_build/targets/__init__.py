"""Compilers, one module or package a target, chosen by ``choose.compiler_for``."""
