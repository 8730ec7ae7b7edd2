"""The two kinds of objects of a stand-in, the module's and the behaviours', and how values go from one to the other."""

from __future__ import annotations

import ast
import enum
import threading
import weakref
from types import ModuleType
from typing import Any

from tests.support.standin.annotations import Annotations
from tests.support.standin.calls import brief

_OBJECT = "_stand_in_object"  # on a behaviour: a weak reference to the module's object
_BEHAVIOUR = "_stand_in_behaviour"  # on an object of the module
MADE = "_stand_in_made"  # on an object of the module: its class's __init__ has run


class Translation:
    """``classes_of``: a behaviour's class -> the module's."""

    def __init__(self, module: ModuleType, annotations: Annotations) -> None:
        self._module = module
        self._annotations = annotations
        self._lock = threading.RLock()
        self.class_of: dict[Any, Any] = {}

    def inward(self, value: Any) -> Any:
        """What a behaviour gets for ``value`` of the code under test."""
        if type(value) in (list, tuple):
            return type(value)(self.inward(item) for item in value)
        if type(value) is dict:
            return {self.inward(key): self.inward(item) for key, item in value.items()}
        behaviour = behaviour_behind(value)
        return value if behaviour is None else behaviour

    def outward(self, value: Any, annotation: ast.expr, path: str) -> Any:
        """What the code under test gets for a behaviour's ``value``. Raises AssertionError if it is of a wrong type."""
        translated = self._translated(value, annotation)
        fits = self._annotations.accepts(annotation, translated)
        assert fits, f"the behaviour of {path} gave {brief(value)}, the stub says {ast.unparse(annotation)}"
        return translated

    def join(self, obj: Any, behaviour: Any) -> None:
        """Make ``obj`` the module's object of ``behaviour``."""
        obj.__dict__[_BEHAVIOUR] = behaviour
        behaviour.__dict__[_OBJECT] = weakref.ref(obj)
        released = getattr(behaviour, "_released", None)
        if released is not None:
            weakref.finalize(obj, released).atexit = False

    def _translated(self, value: Any, annotation: ast.expr) -> Any:
        if type(value) in (list, tuple):
            inner = _items_annotation(annotation)
            items = type(value)(self._translated(item, inner) for item in value)
            return self._object("Dims", items) if "Dims" in _choices(annotation) else items
        if type(value) is dict:
            inner = _items_annotation(annotation)
            return {self._translated(key, inner): self._translated(item, inner) for key, item in value.items()}
        if type(value) is str:
            return self._member(value, annotation)
        known = next((cls for cls in type(value).__mro__ if cls in self.class_of), None)
        return value if known is None else self._object_of(value, self.class_of[known])

    def _member(self, name: str, annotation: ast.expr) -> Any:
        """The member called ``name`` of the enum that the stub says; ``name`` itself where it says none."""
        kinds = [self._annotations.classes.get(choice) for choice in _choices(annotation)]
        enums = [kind for kind in kinds if isinstance(kind, enum.EnumMeta)]
        return next((kind[name] for kind in enums if name in kind.__members__), name)

    def _object(self, path: str, items: Any) -> Any:
        made = self._annotations.classes.get(path)
        behaviour = next((key for key, value in self.class_of.items() if value is made), None)
        return items if behaviour is None else self._object_of(behaviour(items), made)

    def _object_of(self, behaviour: Any, made: Any) -> Any:
        with self._lock:
            reference = behaviour.__dict__.get(_OBJECT)
            obj = reference() if reference is not None else None
            if obj is None:
                obj = made.__new__(made)
                if issubclass(made, bytearray):
                    bytearray.__init__(obj, behaviour)
                behaviour._module = self._module
                self.join(obj, behaviour)
                obj.__dict__[MADE] = True
            return obj


def behaviour_behind(obj: Any) -> Any:
    """None where there is none."""
    return getattr(obj, "__dict__", {}).get(_BEHAVIOUR)


def _choices(annotation: ast.expr) -> list[str]:
    """The alternatives of a union, as texts."""
    if isinstance(annotation, ast.BinOp):
        return _choices(annotation.left) + _choices(annotation.right)
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value).endswith(("Optional", "Union")):
        return [choice for each in _parameters(annotation) for choice in _choices(each)]
    return [ast.unparse(annotation)]


def _items_annotation(annotation: ast.expr) -> ast.expr:
    """Of what a container is; anything where that cannot be told."""
    if isinstance(annotation, ast.BinOp):
        left = _items_annotation(annotation.left)
        return left if not isinstance(left, ast.Constant) else _items_annotation(annotation.right)
    if isinstance(annotation, ast.Subscript):
        inner = _parameters(annotation)[0]
        return _items_annotation(inner) if ast.unparse(annotation.value).endswith("Optional") else inner
    return ast.Constant(...)


def _parameters(annotation: ast.Subscript) -> list[ast.expr]:
    return annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
