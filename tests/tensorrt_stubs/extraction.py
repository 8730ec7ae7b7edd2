"""A binding module's signatures as the text of a stub: ``python extraction.py MODULE``, in a process of its own.

pybind11-stubgen reads the signatures out of the docstrings; what it leaves is made into what mypy accepts:

* C++ names (``nvinfer1::v_1_0::ILoop``, of classes that were registered after the function) become the classes' own.
* A parameter called ``in`` gets an underscore; a parameter without a default after one with a default gets one.
* Values of enum members and constants, which a stub has no place for, are kept: ``TF32: ClassVar[Annotated[BuilderFlag,
  5]]``. So a stand-in can be made of the stub alone (``tests.support.standin``).
* ``trt.bool`` is a constant of the module, so the type is written ``builtins.bool``.
* What returns null where it fails, by its documentation or by ``NULLABLE``, is Optional; so is what defaults to None.
* A parameter that is a ``Dims`` takes sequences of integers too: pybind11 converts them.
* Methods that TensorRT calls and users write have the signature that they are called with (``CALLBACKS``): that of the
  bindings is C++'s.
* What the package adds to its extension module in Python (``__version__``, ``volume``, ``nptype``) is there too.

Not a part of the package's import: nothing here may need the rest of the repository.
"""

from __future__ import annotations

import ast
import importlib
import keyword
import logging
import re
import sys
from types import ModuleType
from typing import Any

# pybind11 writes the pointer's class; these return None where they fail, and their documentation does not say so.
NULLABLE = {
    "Builder.build_serialized_network",
    "Builder.build_engine_with_config",
    "ICudaEngine.create_execution_context",
    "ICudaEngine.create_engine_inspector",
    "ICudaEngine.serialize",
    "ICudaEngine.serialize_with_config",
    "ILayer.get_input",
    "ILayer.get_output",
    "IBuilderConfig.create_timing_cache",
    "IBuilderConfig.get_timing_cache",
    "Runtime.deserialize_cuda_engine",
}
# Documented as None for an index out of range only.
_NEVER_NULL = {"INetworkDefinition.get_input", "INetworkDefinition.get_output", "INetworkDefinition.get_layer"}
# What TensorRT calls in a Python subclass, by the classes' documentation.
CALLBACKS = {
    "IStreamReaderV2.read": "def read(self, num_bytes: int, stream: int) -> typing_extensions.Buffer: ...",
    "IStreamReaderV2.seek": "def seek(self, offset: int, where: SeekPosition) -> builtins.bool: ...",
    "IStreamWriter.write": "def write(self, data: bytes) -> int: ...",
    "IProgressMonitor.phase_start": (
        "def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None: ..."
    ),
    "IProgressMonitor.step_complete": "def step_complete(self, phase_name: str, step: int) -> builtins.bool: ...",
}
# The buffer protocol leaves no trace in a signature.
_BUFFERS = {"IHostMemory": "def __buffer__(self, flags: int, /) -> memoryview: ..."}
_BARE = {"tuple": "tuple[typing.Any, ...]", "list": "list[typing.Any]", "dict": "dict[typing.Any, typing.Any]"}
_BARE |= {"Iterable": "collections.abc.Iterable[typing.Any]", "Callable": "collections.abc.Callable[..., typing.Any]"}
_AS_OBJECT = ("__enter__", "__exit__", "__getstate__", "__setstate__", "__hash__", "__eq__", "__ne__", "__del__")
_SAYS_NONE = re.compile(r":returns?:[^:]*(or|,)\s+(:class:)?`{0,2}None`{0,2}", re.DOTALL)
_CXX_NAME = re.compile(r"\b(?:\w+::)+(\w+)")
_MEMBER = re.compile(r"<(\w+)\.(\w+): -?\d+>")
_PYTHON_ADDITIONS = """
__version__: typing.Annotated[str, {version!r}]
def volume(iterable: typing.Iterable[int]) -> int: ...
def nptype(trt_type: DataType) -> type[typing.Any]: ...
"""


def stub_of_module(name: str) -> str:
    """The stub of the bindings' package ``name`` and its extension module, as one text."""
    package = importlib.import_module(name)
    extension = next(
        module for module_name, module in sys.modules.items() if module_name.startswith(f"{name}.tensorrt")
    )
    tree = ast.parse(_printed(extension))
    tree = _Cleaning(extension).visit(tree)
    tree.body += ast.parse(_PYTHON_ADDITIONS.format(version=package.__version__)).body
    tree.body[1:1] = ast.parse("import builtins").body
    # True of the bindings: some layers' "type" is not that of a layer, and a second overload takes part of the first's.
    head = '# mypy: disable-error-code="assignment, override, overload-cannot-match"\n'
    return head + ast.unparse(ast.fix_missing_locations(tree)) + "\n"


def _printed(extension: ModuleType) -> str:
    """What pybind11-stubgen makes of ``extension``, its own docstrings and line breaks included."""
    from pybind11_stubgen import CLIArgs, arg_parser, stub_parser_from_args
    from pybind11_stubgen.printer import Printer
    from pybind11_stubgen.structs import Identifier, QualifiedName, Value

    logging.disable(logging.ERROR)  # its errors are the expressions that are mended below; mypy finds what is left
    classes = _classes(extension)
    arguments = arg_parser().parse_args([extension.__name__], namespace=CLIArgs())
    parser = stub_parser_from_args(arguments)

    class Parser(type(parser)):  # type: ignore[misc] # its class is made of mixins in a function
        def parse_annotation_str(self, annotation_str: str) -> Any:
            def python_name(match: re.Match[str]) -> str:
                return classes.get(match[1], "typing.Any")

            return super().parse_annotation_str(_CXX_NAME.sub(python_name, annotation_str))

        def parse_value_str(self, value: str) -> Any:
            member = _MEMBER.fullmatch(value.strip())  # a default: <Severity.WARNING: 2>
            if member is not None and member[1] in classes:
                return Value(f"{classes[member[1]]}.{member[2]}", is_print_safe=True)
            return super().parse_value_str(value)

        def parse_args_str(self, args_str: str) -> Any:
            result = super().parse_args_str(args_str)
            has_default = False
            for argument in result:
                if keyword.iskeyword(argument.name):
                    argument.name = Identifier(f"{argument.name}_")
                has_default |= argument.default is not None
                if has_default and argument.default is None and not (argument.variadic or argument.kw_variadic):
                    argument.default = Value("...")
            return result

    mended = Parser()
    module = mended.handle_module(QualifiedName.from_str(extension.__name__), extension)
    mended.finalize()
    return "\n".join(Printer(invalid_expr_as_ellipses=True).print_module(module))


def _classes(extension: ModuleType) -> dict[str, str]:
    """C++ name -> Python name, where they are the same but for the place: ``Severity`` -> ``ILogger.Severity``."""
    found: dict[str, str] = {}
    for owner in vars(extension).values():
        if isinstance(owner, type):
            found.setdefault(owner.__name__, owner.__qualname__)
            for inner in vars(owner).values():
                if isinstance(inner, type):
                    found.setdefault(inner.__name__, inner.__qualname__)
    # Two have other names in Python.
    return {**found, "IParserError": "ParserError", "IBuilder": "Builder", "IRefitter": "Refitter"}


class _Cleaning(ast.NodeTransformer):
    """Leaves declarations only, and mends them as the head of this file says."""

    def __init__(self, extension: ModuleType) -> None:
        self._owners: list[Any] = [extension]  # the module, and the classes that the current line is in

    def visit_Module(self, node: ast.Module) -> ast.AST:
        self.generic_visit(node)
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        cls = vars(self._owners[-1])[node.name]
        path = ".".join([*(owner.__name__ for owner in self._owners[1:]), node.name])
        if cls.__qualname__ != path:  # the same class under a second name
            return ast.Assign([ast.Name(node.name)], _parsed(cls.__qualname__), lineno=0)
        self._owners.append(cls)
        self.generic_visit(node)
        self._owners.pop()
        if path in _BUFFERS:
            node.body += ast.parse(_BUFFERS[path]).body
        node.body = _once([*node.body, *_iteration(node)]) or [ast.Expr(ast.Constant(...))]
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST | None:
        if node.name in _AS_OBJECT:
            return None  # as object has them, deprecated, or never called by name
        documentation = ast.get_docstring(node) or ""
        owner = self._owners[-1]
        is_method = isinstance(owner, type)
        path = f"{owner.__name__}.{node.name}"
        if is_method and path in CALLBACKS:
            return ast.parse(CALLBACKS[path]).body[0]
        node.body = [ast.Expr(ast.Constant(...))]
        if is_method and not _is_marked(node, "staticmethod"):
            _receive_self(node.args)
        self.generic_visit(node)
        for argument in (node.args.vararg, node.args.kwarg):
            if argument is not None and argument.annotation is None:
                argument.annotation = _parsed("typing.Any")  # no signature was found
        for argument in node.args.args:
            if argument.annotation is not None:
                argument.annotation = _with_sequences(argument.annotation)
        _allow_none(node.args)
        if node.returns is None:
            node.returns = _parsed("None" if node.name == "__init__" or _is_setter(node) else "typing.Any")
        elif isinstance(node.returns, ast.Constant) and node.returns.value is ...:
            node.returns = _parsed("typing.Any")
        elif path in NULLABLE or (_SAYS_NONE.search(documentation) and path not in _NEVER_NULL):
            node.returns = _or_none(node.returns)
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST | None:
        assert isinstance(node.target, ast.Name)
        name, owner = node.target.id, self._owners[-1]
        if name in ("__all__", "__hash__"):
            return None
        value = vars(owner).get(name)
        node.annotation = self.visit(node.annotation)
        node.value = None
        if hasattr(type(value), "__members__"):
            annotated = f"typing.Annotated[{type(value).__qualname__}, {int(value)}]"
            node.annotation = _parsed(f"typing.ClassVar[{annotated}]" if isinstance(owner, type) else annotated)
        return node

    def visit_Assign(self, node: ast.Assign) -> ast.AST | None:
        return None if isinstance(node.value, ast.Constant) else node  # a private name without a type

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return _parsed("builtins.bool") if node.id == "bool" else _parsed(_BARE.get(node.id, node.id))

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        return _parsed(_BARE.get(node.attr, ast.unparse(node)))

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        node.slice = self.visit(node.slice)  # what it is of has parameters already
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        return None if isinstance(node.value, ast.Constant) and node.value.value is not ... else node  # a docstring


def _once(body: list[ast.stmt]) -> list[ast.stmt]:
    """Each signature once: two C++ overloads may be one in Python, and one overload is none."""
    kept = list({_signature(node): node for node in reversed(body)}.values())[::-1]
    names = [node.name for node in kept if isinstance(node, ast.FunctionDef) and _is_marked(node, "typing.overload")]
    for node in kept:
        if isinstance(node, ast.FunctionDef) and names.count(node.name) == 1:
            node.decorator_list = [mark for mark in node.decorator_list if ast.unparse(mark) != "typing.overload"]
    return kept


def _signature(node: ast.stmt) -> str:
    if not isinstance(node, ast.FunctionDef):
        return ast.unparse(node)
    return f"{node.name}({ast.unparse(node.args)}) {[ast.unparse(mark) for mark in node.decorator_list]}"


def _iteration(node: ast.ClassDef) -> list[ast.stmt]:
    """Python iterates what has ``__getitem__``; mypy asks for ``__iter__``."""
    functions = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
    if node.name != "Dims" or "__getitem__" not in functions or "__iter__" in functions:
        return []
    return ast.parse("def __iter__(self) -> collections.abc.Iterator[int]: ...").body


def _receive_self(arguments: ast.arguments) -> None:
    """The first parameter is self, without a type: pybind11 writes the class that it converts to."""
    if arguments.args:
        arguments.args[0].annotation = None
        arguments.args[0].arg = "self"
    else:
        arguments.args = [ast.arg("self")]


def _with_sequences(annotation: ast.expr) -> ast.expr:
    if isinstance(annotation, ast.Name) and annotation.id.startswith("Dims") and annotation.id != "DimsExprs":
        return ast.BinOp(annotation, ast.BitOr(), _parsed("collections.abc.Sequence[typing.SupportsInt]"))
    return annotation


def _allow_none(arguments: ast.arguments) -> None:
    for argument, default in zip(reversed(arguments.args), reversed(arguments.defaults), strict=False):
        if isinstance(default, ast.Constant) and default.value is None and argument.annotation is not None:
            argument.annotation = _or_none(argument.annotation)


def _or_none(annotation: ast.expr) -> ast.expr:
    return ast.BinOp(annotation, ast.BitOr(), ast.Constant(None))


def _is_marked(node: ast.FunctionDef, decorator: str) -> bool:
    return any(ast.unparse(mark) == decorator for mark in node.decorator_list)


def _is_setter(node: ast.FunctionDef) -> bool:
    return any(isinstance(mark, ast.Attribute) and mark.attr == "setter" for mark in node.decorator_list)


def _parsed(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


if __name__ == "__main__":
    sys.stdout.write(stub_of_module(sys.argv[1]))
