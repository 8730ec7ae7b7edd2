"""What a stub declares, read from its text: classes, members of enums, functions with their overloads, attributes."""

from __future__ import annotations

import ast
import inspect
from dataclasses import dataclass, field
from functools import cache
from typing import Any

_EMPTY = inspect.Parameter.empty


@dataclass
class FunctionDeclaration:
    """``signatures``: the overloads, without self. Their annotations and defaults are expressions, as in the stub."""

    path: str
    signatures: list[inspect.Signature] = field(default_factory=list)
    is_static: bool = False


@dataclass
class AttributeDeclaration:
    """``set_as``: the annotation of what may be assigned; None where nothing may. ``value``: the literal of
    ``Annotated[TYPE, value]``, which constants and members have."""

    path: str
    read_as: ast.expr
    set_as: ast.expr | None
    of_class: bool
    value: Any = None


@dataclass
class ClassDeclaration:
    """A class, or the module itself (path ``""``). ``aliases``: second names of others. ``members``: of an enum."""

    path: str
    bases: list[str] = field(default_factory=list)
    functions: dict[str, FunctionDeclaration] = field(default_factory=dict)
    attributes: dict[str, AttributeDeclaration] = field(default_factory=dict)
    classes: dict[str, ClassDeclaration] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    members: dict[str, int] | None = None

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]


@cache
def read_stub(text: str) -> ClassDeclaration:
    """The declarations of the stub ``text``; nobody changes them. Raises ValueError that names what it cannot read."""
    return _class("", [], ast.parse(text).body)


def _class(path: str, bases: list[str], body: list[ast.stmt]) -> ClassDeclaration:
    declared = ClassDeclaration(path, bases)
    for node in body:
        if isinstance(node, ast.ClassDef):
            inner = _class(_joined(path, node.name), [ast.unparse(base) for base in node.bases], node.body)
            declared.classes[node.name] = inner
        elif isinstance(node, ast.FunctionDef):
            _add_function(declared, node)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            _add_attribute(declared, node.target.id, node.annotation)
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            _add_assigned(declared, node.targets[0].id, node.value)
        elif not isinstance(node, (ast.Import, ast.ImportFrom, ast.Pass)) and not _is_literal(node):
            raise ValueError(f"A stand-in cannot be made of {ast.unparse(node)!r} (line {node.lineno}).")
    _take_members(declared)
    return declared


def _add_function(declared: ClassDeclaration, node: ast.FunctionDef) -> None:
    marks = [ast.unparse(mark) for mark in node.decorator_list]
    path = _joined(declared.path, node.name)
    if "property" in marks:
        annotation = node.returns or ast.Constant(...)
        declared.attributes[node.name] = AttributeDeclaration(path, annotation, None, of_class=False)
    elif f"{node.name}.setter" in marks:
        value = node.args.args[-1].annotation or ast.Constant(...)
        declared.attributes[node.name].set_as = value
    else:
        is_static = "staticmethod" in marks
        function = declared.functions.setdefault(node.name, FunctionDeclaration(path, is_static=is_static))
        function.signatures.append(_signature(node, drop_self=bool(declared.path) and not is_static))


def _add_attribute(declared: ClassDeclaration, name: str, annotation: ast.expr) -> None:
    of_class = False
    value = None
    while isinstance(annotation, ast.Subscript):
        kind = ast.unparse(annotation.value).rpartition(".")[2]
        if kind == "ClassVar":
            of_class, annotation = True, annotation.slice
        elif kind == "Annotated" and isinstance(annotation.slice, ast.Tuple):
            value = ast.literal_eval(annotation.slice.elts[1])
            annotation = annotation.slice.elts[0]
        else:
            break
    set_as = None if of_class or not declared.path else annotation
    declared.attributes[name] = AttributeDeclaration(
        _joined(declared.path, name), annotation, set_as, of_class or not declared.path, value
    )


def _add_assigned(declared: ClassDeclaration, name: str, value: ast.expr) -> None:
    if isinstance(value, ast.Constant):  # RED = 1, of an enum.Enum
        read_as = _parsed(declared.path) if declared.path else ast.Constant(...)
        attribute = AttributeDeclaration(_joined(declared.path, name), read_as, None, True, value.value)
        declared.attributes[name] = attribute
    else:
        declared.aliases[name] = ast.unparse(value)


def _take_members(declared: ClassDeclaration) -> None:
    """An enum is a class with ``__members__``, as pybind11 writes it, or one of ``enum.Enum``."""
    if "__members__" not in declared.attributes and not any(base.endswith("Enum") for base in declared.bases):
        return
    members = {
        name: attribute
        for name, attribute in declared.attributes.items()
        if attribute.of_class and ast.unparse(attribute.read_as) == declared.path
    }
    if missing := [name for name, attribute in members.items() if attribute.value is None]:
        raise ValueError(f"The stub has no value of {declared.path}.{missing[0]}: Annotated[{declared.path}, VALUE].")
    declared.members = {name: attribute.value for name, attribute in members.items()}


def _signature(node: ast.FunctionDef, *, drop_self: bool) -> inspect.Signature:
    given = node.args
    kinds: list[tuple[ast.arg, Any]] = [(argument, inspect.Parameter.POSITIONAL_ONLY) for argument in given.posonlyargs]
    kinds += [(argument, inspect.Parameter.POSITIONAL_OR_KEYWORD) for argument in given.args]
    defaults: list[Any] = [_EMPTY] * (len(kinds) - len(given.defaults)) + list(given.defaults)
    parameters = [
        _parameter(argument, kind, default) for (argument, kind), default in zip(kinds, defaults, strict=True)
    ]
    parameters = parameters[1:] if drop_self else parameters
    if given.vararg:
        parameters.append(_parameter(given.vararg, inspect.Parameter.VAR_POSITIONAL, None))
    for argument, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        parameters.append(_parameter(argument, inspect.Parameter.KEYWORD_ONLY, default))
    if given.kwarg:
        parameters.append(_parameter(given.kwarg, inspect.Parameter.VAR_KEYWORD, None))
    return inspect.Signature(parameters, return_annotation=node.returns or ast.Constant(...))


def _parameter(argument: ast.arg, kind: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(
        argument.arg,
        kind,
        default=_EMPTY if default is None else default,
        annotation=argument.annotation or ast.Constant(...),
    )


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _is_literal(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)  # a docstring, or ...


def _parsed(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body
