"""Makes the module: its classes, with checked methods and attributes, its functions and constants. See the package."""

from __future__ import annotations

import ast
import enum
import functools
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.support.standin.annotations import Annotations
from tests.support.standin.calls import Shape, brief, overload_of, passed_on
from tests.support.standin.declarations import AttributeDeclaration, ClassDeclaration, FunctionDeclaration, read_stub
from tests.support.standin.translation import MADE, Translation, behaviour_behind

_DEFAULTS: dict[str, type] = {"Dims": Shape}
# What bytearray has and a buffer has not, unless its stub says so.
_BYTES_ONLY = ("__len__", "__iter__", "__getitem__", "__setitem__", "__delitem__", "__contains__", "__add__", "__mul__")
_UNSAID = ("__eq__", "__hash__", "__iter__", "__repr__", "__str__")  # what any object can do, and a stub need not say


class Behaviour:
    """Optional base class of behaviours: ``_module`` is the stand-in."""

    _module: Any = None


def stand_in(stub: Path, name: str, behaviours: Mapping[str, Callable[..., Any]]) -> ModuleType:
    """The module ``name`` of what ``stub`` declares. ``behaviours``: class or function of it -> what it does.

    Raises ValueError for behaviours that do not fit the stub.
    """
    return _StandIn(read_stub(stub.read_text()), name, behaviours).module


def behaviour_of(obj: Any) -> Any:
    """The behaviour behind an object of a stand-in. Raises AssertionError where there is none."""
    behaviour = behaviour_behind(obj)
    assert behaviour is not None, f"{brief(obj)} has no behaviour"
    return behaviour


def call(user_object: Any, method: str, *args: Any) -> Any:
    """Call what a user's class overrides, as the library would: behaviours and members' names are translated.

    Raises AssertionError where the arguments or the result are not as the stub says.
    """
    stand_in: _StandIn = type(user_object).__stand_in__
    return stand_in.call_user(user_object, method, args)


def unknown_annotations(module: ModuleType) -> list[str]:
    """Annotations of ``module``'s stub that were met so far and are not checked."""
    made: _StandIn = module.__dict__["__stand_in__"]
    return sorted(made.annotations.unknown)


class _Class(type):
    """The metaclass of the module's classes and of users' subclasses of them."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        obj = super().__call__(*args, **kwargs)
        if MADE not in obj.__dict__:
            raise TypeError(f"{cls.__qualname__}.__init__() must be called when overriding __init__")
        return obj


def _declaration(cls: type) -> ClassDeclaration | None:
    """Of a class of the module; None of users' subclasses."""
    declared: ClassDeclaration | None = vars(cls).get("__declared__")
    return declared


def _declarations(cls: type) -> list[ClassDeclaration]:
    """Those of ``cls`` and its bases."""
    return [declared for base in cls.__mro__ if (declared := _declaration(base)) is not None]


class _Enum(enum.Enum):
    """pybind11's: converts to an integer, and is equal to its own kind only."""

    def __int__(self) -> int:
        return int(self.value)

    __index__ = __int__


class _OrderedEnum(_Enum):
    def __lt__(self, other: Any) -> Any:
        return self.value < other.value if type(other) is type(self) else NotImplemented

    def __le__(self, other: Any) -> Any:
        return self.value <= other.value if type(other) is type(self) else NotImplemented

    def __gt__(self, other: Any) -> Any:
        return self.value > other.value if type(other) is type(self) else NotImplemented

    def __ge__(self, other: Any) -> Any:
        return self.value >= other.value if type(other) is type(self) else NotImplemented


class _StandIn:
    def __init__(self, declared: ClassDeclaration, name: str, behaviours: Mapping[str, Callable[..., Any]]) -> None:
        self.module = ModuleType(name)
        self.module.__dict__["__stand_in__"] = self
        self.annotations = Annotations()
        self._translation = Translation(self.module, self.annotations)
        defaults = {key: value for key, value in _DEFAULTS.items() if key in declared.classes}
        self._behaviours: dict[str, Any] = {**defaults, **behaviours}
        for key, value in self._behaviours.items():
            _check_behaviour(name, declared, key, value)
        self._fill_module(declared)
        classes = {key: value for key, value in self._behaviours.items() if key in declared.classes}
        self._translation.class_of = {value: self.annotations.classes[key] for key, value in classes.items()}
        if len(self._translation.class_of) != len(classes):
            raise ValueError("Two classes of the stand-in have the same behaviour: derive a class for each.")

    def call_user(self, user_object: Any, method: str, args: tuple[Any, ...]) -> Any:
        functions = [each.functions[method] for each in _declarations(type(user_object)) if method in each.functions]
        assert functions, f"{type(user_object).__name__} is of no class with a method {method}"
        path = self._name(functions[0].path)
        fitting = [each for each in functions[0].signatures if len(each.parameters) == len(args)]
        assert fitting, f"{path} does not take {len(args)} arguments"
        annotations = [parameter.annotation for parameter in fitting[0].parameters.values()]
        passed = [self._translation.outward(*pair, path) for pair in zip(args, annotations, strict=True)]
        result = getattr(user_object, method)(*passed)
        wanted = fitting[0].return_annotation
        fits = self.annotations.accepts(wanted, result)
        assert fits, f"{type(user_object).__name__}.{method} gave {brief(result)}, the stub says {ast.unparse(wanted)}"
        return self._translation.inward(result)

    def _fill_module(self, declared: ClassDeclaration) -> None:
        target = vars(self.module)
        for inner in _bases_first(declared.classes):
            target[inner.name] = self._make_class(inner)
        for alias, path in declared.aliases.items():
            target[alias] = self._resolved(path)
        for function in declared.functions.values():
            target[function.path] = self._static(function, self._behaviours.get(function.path))
        for attribute in declared.attributes.values():
            target[attribute.path] = self._constant(attribute)

    def _make_class(self, declared: ClassDeclaration) -> type:
        names = {"__module__": self.module.__name__, "__qualname__": declared.path}
        if declared.members is not None:
            make: Any = _OrderedEnum if "__lt__" in declared.functions else _Enum
            members = make(declared.name, declared.members, module=names["__module__"], qualname=declared.path)
            self.annotations.classes[declared.path] = members
            return members  # type: ignore[no-any-return] # an enum's functional form has no type
        namespace: dict[str, Any] = {**names, "__declared__": declared, "__stand_in__": self}
        for inner in declared.classes.values():
            namespace[inner.name] = self._make_class(inner)
        for alias, path in declared.aliases.items():
            namespace[alias] = self._resolved(path)
        for name, function in declared.functions.items():
            namespace[name] = self._initializer(declared.path) if name == "__init__" else self._method(function)
        for name, attribute in declared.attributes.items():
            namespace[name] = self._class_attribute(attribute) if attribute.of_class else self._attribute(attribute)
        bases = tuple(self.annotations.classes[base] for base in declared.bases if base in self.annotations.classes)
        made = self._with_python_manners(declared, bases, namespace)
        self.annotations.classes[declared.path] = made
        return made

    def _with_python_manners(
        self, declared: ClassDeclaration, bases: tuple[type, ...], namespace: dict[str, Any]
    ) -> type:
        """The class, with what Python's objects have whatever a stub says: attributes, equality, buffers."""
        behaviour = self._behaviours.get(declared.path, object)
        if issubclass(behaviour, bytes):
            bases = (*bases, bytearray)  # bytes have no weak references
            namespace |= {name: None for name in _BYTES_ONLY if name not in declared.functions}
            namespace |= {name: getattr(object, name) for name in ("__eq__", "__hash__", "__repr__", "__str__")}
            namespace["__getattribute__"] = _get_attribute
        else:
            said = {name for cls in behaviour.__mro__ if cls is not object for name in vars(cls)} & {*_UNSAID}
            namespace |= {name: self._forwarded(behaviour, name) for name in said}
        namespace["__setattr__"] = _set_attribute
        if "__init__" not in declared.functions and not any(issubclass(type(base), _Class) for base in bases):
            namespace["__init__"] = _no_constructor
        return _Class(declared.name, bases or (object,), namespace)

    def _forwarded(self, behaviour: type, name: str) -> Any:
        if getattr(behaviour, name) is None:
            return None  # __hash__ of what cannot be hashed

        def method(obj: Any, *args: Any) -> Any:
            return getattr(behaviour_of(obj), name)(*(self._translation.inward(value) for value in args))

        return method

    # Methods and attributes.

    def _initializer(self, path: str) -> Callable[..., None]:
        @functools.wraps(object.__init__)
        def initialize(obj: Any, *args: Any, **kwargs: Any) -> None:
            function = self._functions_of(obj, path)["__init__"]
            behaviour_class = self._behaviours.get(path)
            if behaviour_class is None:
                overload_of(function, self.annotations, args, kwargs, self._name(function.path))
                assert _declaration(type(obj)) is None, f"{self._name(path)} has no behaviour"
            else:
                behaviour = behaviour_class.__new__(behaviour_class)
                behaviour._module = self.module
                self._called(function, behaviour.__init__, args, kwargs)
                self._translation.join(obj, behaviour)
            obj.__dict__[MADE] = True

        return initialize

    def _functions_of(self, obj: Any, path: str) -> dict[str, FunctionDeclaration]:
        return next(declared for declared in _declarations(type(obj)) if declared.path == path).functions

    def _method(self, function: FunctionDeclaration) -> Any:
        path, _, name = function.path.rpartition(".")
        if function.is_static:
            return staticmethod(self._static(function, getattr(self._behaviours.get(path), name, None)))

        def method(obj: Any, *args: Any, **kwargs: Any) -> Any:
            def target() -> Any:
                return getattr(_having(obj, name), name, None)

            return self._called(function, target, args, kwargs)

        method.__name__, method.__qualname__ = name, function.path
        return method

    def _static(self, function: FunctionDeclaration, behaviour: Any) -> Callable[..., Any]:
        def checked(*args: Any, **kwargs: Any) -> Any:
            return self._called(function, lambda: behaviour, args, kwargs)

        checked.__name__ = checked.__qualname__ = function.path
        return checked

    def _attribute(self, attribute: AttributeDeclaration) -> property:
        name, path = attribute.path.rpartition(".")[2], self._name(attribute.path)

        def read(obj: Any) -> Any:
            behaviour = _having(obj, name)
            assert behaviour is not None, f"{path} has no behaviour"
            return self._translation.outward(getattr(behaviour, name), attribute.read_as, path)

        def write(obj: Any, value: Any) -> None:
            assert attribute.set_as is not None
            if not self.annotations.accepts(attribute.set_as, value):
                raise TypeError(f"{path} is {ast.unparse(attribute.set_as)}, not {brief(value)}")
            behaviour = _having(obj, name)
            assert behaviour is not None, f"{path} has no behaviour"
            setattr(behaviour, name, self._translation.inward(value))

        return property(read, None if attribute.set_as is None else write)

    def _class_attribute(self, attribute: AttributeDeclaration) -> Any:
        path, _, name = attribute.path.rpartition(".")
        if attribute.value is not None:
            return self._constant(attribute)
        return getattr(self._behaviours.get(path), name, _Missing(self._name(attribute.path)))

    def _constant(self, attribute: AttributeDeclaration) -> Any:
        kind = self.annotations.classes.get(ast.unparse(attribute.read_as))
        is_member = isinstance(kind, enum.EnumMeta) and attribute.value is not None
        return kind(attribute.value) if is_member and kind is not None else attribute.value

    def _called(
        self, function: FunctionDeclaration, target_of: Callable[[], Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The behaviour's answer, checked on both sides. Arguments first: a typo is a TypeError, behaviour or not."""
        path = self._name(function.path)
        signature, bound = overload_of(function, self.annotations, args, kwargs, path)
        target = target_of if function.path.endswith(".__init__") else target_of()
        assert target is not None, f"{path} has no behaviour"
        positional, named = passed_on(signature, bound, self._default)
        positional = [self._translation.inward(value) for value in positional]
        named = {key: self._translation.inward(value) for key, value in named.items()}
        _check_takes(target, positional, named, path)
        return self._translation.outward(target(*positional, **named), signature.return_annotation, path)

    def _default(self, default: ast.expr) -> Any:
        return self._resolved(ast.unparse(default)) if isinstance(default, ast.Attribute) else ast.literal_eval(default)

    def _resolved(self, path: str) -> Any:
        """What a dotted name of the stub is: a class, or a member of one."""
        if path in self.annotations.classes:
            return self.annotations.classes[path]
        owner, _, name = path.rpartition(".")
        return getattr(self.annotations.classes[owner], name)

    def _name(self, path: str) -> str:
        return f"{self.module.__name__}.{path}"


class _Missing:
    """A class attribute of the stub that the behaviour lacks."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __get__(self, obj: Any, owner: type) -> Any:
        raise AssertionError(f"{self._path} has no behaviour")


def _having(obj: Any, name: str) -> Any:
    """The behaviour of ``obj`` if it has ``name``, without running a property; else None."""
    behaviour = behaviour_behind(obj)
    missing = object()
    return None if inspect.getattr_static(behaviour, name, missing) is missing else behaviour


def _set_attribute(obj: Any, name: str, value: Any) -> None:
    _check_said(obj, name)
    object.__setattr__(obj, name, value)


def _get_attribute(obj: Any, name: str) -> Any:
    """Of what derives from bytearray: none of their methods."""
    _check_said(obj, name)
    return object.__getattribute__(obj, name)


def _check_said(obj: Any, name: str) -> None:
    """Objects of the module have what their classes declare; those of users' subclasses what they like."""
    cls = type(obj)
    if _declaration(cls) is None or name.startswith("__"):
        return
    if not any(
        name in (*each.functions, *each.attributes, *each.classes, *each.aliases) for each in _declarations(cls)
    ):
        raise AttributeError(f"'{cls.__module__}.{cls.__qualname__}' object has no attribute '{name}'")


def _no_constructor(obj: Any, *args: Any, **kwargs: Any) -> None:
    raise TypeError(f"{type(obj).__module__}.{type(obj).__qualname__}: No constructor defined!")


def _check_behaviour(module: str, declared: ClassDeclaration, key: str, behaviour: Any) -> None:
    """Raises ValueError where the stub has no such class or function, or not all names of the behaviour."""
    if key in declared.functions:
        return
    cls = declared.classes.get(key)
    if cls is None or cls.members is not None:
        raise ValueError(f"{module} has no class or function {key}, for which there is a behaviour.")
    if not isinstance(behaviour, type):
        raise ValueError(f"The behaviour of the class {module}.{key} is a class, not {brief(behaviour)}.")
    known: set[str] = set()
    pending = [key]
    while pending:
        each = declared.classes.get(pending.pop())
        if each is not None:
            known |= {*each.functions, *each.attributes, *each.classes, *each.aliases}
            pending += each.bases
    own = [name for base in behaviour.__mro__ if base not in (object, bytes) for name in vars(base)]
    unknown = sorted({name for name in own if not name.startswith("_")} - known)
    if unknown:
        raise ValueError(f"{module}.{key} has no {', '.join(unknown)}, for which {behaviour.__name__} has a behaviour.")


def _bases_first(classes: Mapping[str, ClassDeclaration]) -> list[ClassDeclaration]:
    """Enums and what has enums inside first, because others have members of them; then each class after its bases."""
    order: dict[str, ClassDeclaration] = {}

    def add(declared: ClassDeclaration) -> None:
        for base in declared.bases:
            if base in classes and base not in order:
                add(classes[base])
        order.setdefault(declared.path, declared)

    for declared in sorted(classes.values(), key=lambda each: each.members is None and not each.classes):
        add(declared)
    return list(order.values())


def _check_takes(target: Any, positional: list[Any], named: dict[str, Any], path: str) -> None:
    """A behaviour with other parameters is at fault, and must not look like a TypeError of the library."""
    try:
        inspect.signature(target).bind(*positional, **named)
    except TypeError as error:
        raise AssertionError(f"the behaviour of {path} does not take its arguments: {error}") from error
