"""Compilers, one module or package a target, chosen by ``compiler.compiler_for``."""
