"""The libraries as classes: what ``trt`` is in a function that takes the module as an argument."""

from __future__ import annotations

import ast
from collections.abc import Mapping

CLASSES = {"tensorrt": "TensorRTModule", "tensorrt_rtx": "TensorRTRTXModule"}


def stub_of_module_classes(stubs: Mapping[str, str], *, generic: str) -> str:
    """``TensorRTModule`` with the names of the library ``generic``, ``TensorRTRTXModule`` with those of TensorRT-RTX.

    ``stubs``: texts of the libraries' stubs. The two have no relation to mypy, as the libraries' own classes have none.
    """
    own_names = {"tensorrt": generic, "tensorrt_rtx": "tensorrt_rtx"}
    lines = ["import builtins", "import collections.abc", "import typing", "import typing_extensions", ""]
    lines += [f"import {library}" for library in stubs]
    for library, name in CLASSES.items():
        source = own_names[library]
        lines += ["", f"class {name}:", *(f"    {line}" for line in _members(source, stubs[source]))]
    return "\n".join(lines) + "\n"


def _members(library: str, stub: str) -> list[str]:
    body = ast.parse(stub).body
    names = {node.name for node in body if isinstance(node, ast.ClassDef)}
    lines: list[str] = []
    for node in body:
        if isinstance(node, ast.ClassDef):
            lines.append(f"{node.name}: typing.TypeAlias = {library}.{node.name}")
        elif isinstance(node, (ast.AnnAssign, ast.FunctionDef)):
            if isinstance(node, ast.FunctionDef):
                lines.append("@staticmethod")
            lines += ast.unparse(_Qualified(library, names).visit(node)).splitlines()
    return lines


class _Qualified(ast.NodeTransformer):
    """Classes of the library by their full names."""

    def __init__(self, library: str, names: set[str]) -> None:
        self._library, self._names = library, names

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Name(f"{self._library}.{node.id}") if node.id in self._names else node
