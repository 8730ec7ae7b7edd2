"""Calls through a stand-in: which overload they are of, and what is passed on."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tests.support.standin.annotations import Annotations
from tests.support.standin.declarations import FunctionDeclaration

_STARS: dict[object, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}


class Shape:
    """The behaviour of ``Dims`` where none is given: integers that can be read, compared and counted."""

    def __init__(self, shape: Sequence[int] = ()) -> None:
        self._sizes = tuple(map(int, shape))

    def __len__(self) -> int:
        return len(self._sizes)

    def __getitem__(self, index: Any) -> Any:
        return self._sizes[index]

    def __iter__(self) -> Iterator[int]:
        return iter(self._sizes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (tuple, list, Shape)) and self._sizes == tuple(other)

    __hash__ = None  # type: ignore[assignment] # as the bindings' own

    def __repr__(self) -> str:
        return repr(self._sizes)


def overload_of(
    function: FunctionDeclaration, annotations: Annotations, args: tuple[Any, ...], kwargs: dict[str, Any], name: str
) -> tuple[inspect.Signature, inspect.BoundArguments]:
    """The first signature of ``function`` that takes the arguments. Raises TypeError that says why none does."""
    reasons = []
    for signature in function.signatures:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            reasons.append(f"{described(signature)}: {error}")
            continue
        wrong = next((text for text in _wrong(signature, bound, annotations)), None)
        if wrong is None:
            return signature, bound
        reasons.append(f"{described(signature)}: {wrong}")
    raise TypeError(f"{name}(): incompatible function arguments. The stub has {'; '.join(reasons)}")


def _wrong(signature: inspect.Signature, bound: inspect.BoundArguments, annotations: Annotations) -> Iterator[str]:
    for name, value in bound.arguments.items():
        parameter = signature.parameters[name]
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            values = list(value)
        elif parameter.kind is inspect.Parameter.VAR_KEYWORD:
            values = list(value.values())
        else:
            values = [value]
        for each in values:
            if not annotations.accepts(parameter.annotation, each):
                yield f"{name} is {brief(each)}"


def passed_on(
    signature: inspect.Signature, bound: inspect.BoundArguments, default_of: Callable[[ast.expr], Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Positional and named arguments for a behaviour: those of ``bound``, and the defaults that the stub tells."""
    positional: list[Any] = []
    named: dict[str, Any] = {}
    contiguous = True
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            positional += bound.arguments.get(name, ())
            continue
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            named |= bound.arguments.get(name, {})
            continue
        if name in bound.arguments:
            value = bound.arguments[name]
        elif _is_untold(parameter.default):
            contiguous = False  # it is the behaviour's to know
            continue
        else:
            value = default_of(parameter.default)
        if contiguous and parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
            positional.append(value)
        else:
            named[name] = value
    return positional, named


def _is_untold(default: Any) -> bool:
    return isinstance(default, ast.Constant) and default.value is ...


def described(signature: inspect.Signature) -> str:
    """``(name: str, profile_index: SupportsInt) -> int``."""
    parameters = []
    for parameter in signature.parameters.values():
        star = _STARS.get(parameter.kind, "")
        default = "" if parameter.default is inspect.Parameter.empty else f" = {ast.unparse(parameter.default)}"
        parameters.append(f"{star}{parameter.name}: {ast.unparse(parameter.annotation)}{default}")
    return f"({', '.join(parameters)}) -> {ast.unparse(signature.return_annotation)}"


def brief(value: object) -> str:
    """A value for a message: its type, and its text where that is short."""
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) < 60 else text[:57] + '...'}"
