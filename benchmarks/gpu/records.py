"""In place of msgspec, where a GPU machine does not have it: its records in memory, and nothing that reads or writes
them. The builder and the engine of target cuda need no more of it."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import sys
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

from benchmarks.gpu.record import Skipped


def provide() -> None:
    """Make ``import msgspec`` work."""
    if "msgspec" not in sys.modules and importlib.util.find_spec("msgspec") is None:
        sys.modules["msgspec"] = _module()


class _Struct:
    def __init_subclass__(cls, frozen: bool = False, kw_only: bool = False, eq: bool = True, **_: Any) -> None:
        for name in inspect.get_annotations(cls):  # each record has an empty one of its own, as msgspec's
            default = getattr(cls, name, None)
            if isinstance(default, (dict, list, set)):
                setattr(cls, name, dataclasses.field(default_factory=type(default)))
        dataclasses.dataclass(frozen=frozen, kw_only=kw_only, eq=eq)(cls)


class _UnsetType:
    def __bool__(self) -> bool:
        return False


class _Coder:
    """A decoder or encoder, which modules make when they are imported."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> NoReturn:
        raise Skipped("msgspec is not installed, which reads and writes records")


def _module() -> Any:
    module: Any = ModuleType("msgspec")
    module.Struct, module.UnsetType, module.UNSET = _Struct, _UnsetType, _UnsetType()
    module.Raw, module.Meta, module.field = bytes, SimpleNamespace, dataclasses.field
    module.DecodeError = type("DecodeError", (ValueError,), {})
    module.ValidationError = type("ValidationError", (module.DecodeError,), {})
    module.structs = SimpleNamespace(replace=dataclasses.replace)
    module.json = module.msgpack = SimpleNamespace(Decoder=_Coder, Encoder=_Coder)
    module.__spec__ = importlib.util.spec_from_loader("msgspec", None)
    return module
