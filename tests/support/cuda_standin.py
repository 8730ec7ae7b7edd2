"""cuda-python's runtime module for tests without a GPU: its types, and functions that are checked against its own.

``cuda.bindings.runtime`` can be imported anywhere, so its enums, structures and handles here are the real ones. Its
functions are those of ``behaviours``, by name: another name is a ValueError, calling what has none an AssertionError
with its name, and what CUDA lacks an AttributeError. Calls are checked against the real function: number and names of
the arguments (its Python signature), integers and enums (the C types in the first line of its documentation; handles
and pointers may be anything but floats and texts). A wrong call is TypeError, as it would be. What a behaviour returns
is checked too, AssertionError: a tuple of a ``cudaError_t``, or its name (``"cudaSuccess"``), and of as many values as
the documentation says that the function returns; where it fails, one alone becomes None for each value, as CUDA's
does. A behaviour that returns None returned ``cudaSuccess``.
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable, Mapping
from functools import cache
from types import ModuleType
from typing import Any

from tests.support.standin.calls import brief

_INTEGER = re.compile(r"^(?:unsigned |signed )?(?:size_t|int|long long|long|short|char)$")


def cuda_stand_in(behaviours: Mapping[str, Callable[..., Any]]) -> Any:
    """A module like ``cuda.bindings.runtime``; see above. Raises ValueError, and ImportError without cuda-bindings."""
    from cuda.bindings import runtime

    module = ModuleType("cuda.bindings.runtime")
    for name, value in vars(runtime).items():
        if name.startswith("_"):
            continue
        is_function = name.startswith("cuda") and callable(value) and not isinstance(value, type)
        vars(module)[name] = _checked(value, behaviours.get(name)) if is_function else value
    if unknown := sorted(name for name in behaviours if not hasattr(vars(module).get(name), "__wrapped__")):
        raise ValueError(f"cuda.bindings.runtime has no function {', '.join(unknown)}.")
    return module


def _checked(real: Any, behaviour: Callable[..., Any] | None) -> Callable[..., Any]:
    name = real.__name__

    def function(*args: Any, **kwargs: Any) -> Any:
        signature, types, num_values = _facts(real)
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{name}(): {error}") from None
        for parameter, value in bound.arguments.items():
            if not _accepts(types.get(parameter), value):
                wanted = types.get(parameter) or "a handle or a pointer"
                raise TypeError(f"{name}(): {parameter} is {brief(value)}, not {wanted}")
        assert behaviour is not None, f"{name} has no behaviour"
        return _result(name, behaviour(*bound.args, **bound.kwargs), num_values)

    function.__name__ = function.__qualname__ = name
    function.__wrapped__ = real  # type: ignore[attr-defined] # inspect.signature shows the real one's
    return function


@cache
def _facts(real: Any) -> tuple[inspect.Signature, dict[str, str], int]:
    """Signature, C type or enum of the parameters that have one, and number of values after the status."""
    documentation = real.__doc__ or ""
    signature = inspect.signature(real)
    head = re.match(r"\w+\((.*)\)", documentation)
    types = {}
    for part in head[1].split(",") if head else ():
        declared, _, annotation = part.partition(":")  # "kind: cudaMemcpyKind", or "size_t count"
        kind, _, parameter = declared.split("=")[0].strip().rpartition(" ")
        if parameter in signature.parameters and (annotation or kind):
            types[parameter] = (annotation or kind).strip()
    return signature, types, max(0, _num_returned(documentation) - 1)


def _num_returned(documentation: str) -> int:
    """Entries of the section Returns: its lines that are not indented below its title."""
    lines = documentation.splitlines()
    titles = [index for index, pair in enumerate(itertools.pairwise(lines)) if _is_title(*pair)]
    start = next((index for index in titles if lines[index].strip() == "Returns"), None)
    if start is None:
        return 1
    end = next((index for index in titles if index > start), len(lines))
    indent = len(lines[start]) - len(lines[start].lstrip())
    return sum(bool(line.strip()) and len(line) - len(line.lstrip()) == indent for line in lines[start + 2 : end])


def _is_title(title: str, rule: str) -> bool:
    return bool(title.strip()) and re.fullmatch(r"\s*-{3,}\s*", rule) is not None


def _accepts(kind: str | None, value: Any) -> bool:
    if kind is not None and _INTEGER.match(kind):
        return hasattr(value, "__index__")
    named = re.fullmatch(r"(Optional\[)?(cuda\w+)\]?", kind or "")
    if named is None:
        return kind is not None or not isinstance(value, (float, str))
    from cuda.bindings import runtime

    expected = getattr(runtime, named[2], None)
    is_optional = named[1] is not None and value is None
    return is_optional or not isinstance(expected, type) or isinstance(value, expected)


def _result(name: str, result: Any, num_values: int) -> tuple[Any, ...]:
    from cuda.bindings import runtime

    result = ("cudaSuccess",) if result is None else result
    assert isinstance(result, tuple), f"the behaviour of {name} gave {brief(result)}, not a tuple"
    assert result, f"the behaviour of {name} gave an empty tuple"
    status = getattr(runtime.cudaError_t, result[0], None) if isinstance(result[0], str) else result[0]
    assert isinstance(status, runtime.cudaError_t), f"the behaviour of {name} gave the status {brief(result[0])}"
    values = result[1:]
    if status != runtime.cudaError_t.cudaSuccess and not values:
        values = (None,) * num_values
    assert len(values) == num_values, f"the behaviour of {name} gave {len(values)} values, CUDA's gives {num_values}"
    return (status, *values)
