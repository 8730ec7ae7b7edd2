"""sentence-transformers' Router (once Asym): several lists of modules, its routes; one route reads a text.

The text's task, "query" or "document", selects it. An artifact holds one route; a table of weights, a
SparseStaticEmbedding, may serve the other side beside it. Formats of sentence-transformers 2 to 6. For an Asym without
a default, versions from 5 on take its first route and earlier ones none: bei takes the first.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, get_args

from bei.artifact.sides import Side
from bei.errors import CheckpointError, ConfigError
from bei.utils.untrusted_files import UnfitError, within
from bei_build.files.json_settings import read_object, setting

# A module's class, as the files name it, and its folder.
Module: TypeAlias = tuple[str, Path]

_ROUTERS = ("Router", "Asym")
_CONFIGS = ("router_config.json", "config.json")  # the second one before version 5
_TABLE = "SparseStaticEmbedding"
_MODALITY = "text"


@dataclass(frozen=True)
class Routing:
    """The texts that the chosen modules read.

    ``default``: the task of texts for which none is given, None where that is refused; ``absent``: names of tasks that
    they do not read. ``table``: the side that a table of weights serves instead, and its module's folder.
    """

    default: str | None
    absent: tuple[str, ...] = ()
    table: tuple[Side, Path] | None = None


def class_of(kind: str) -> str:
    """The class name at the end of a module's ``kind``, its import path."""
    return kind.rsplit(".", 1)[-1]


def select_route(modules: Sequence[Module], asked: str | None) -> tuple[list[Module], Routing | None]:
    """``modules`` with the Router replaced by the modules of one route: route ``asked``, else its default.

    Also the texts that they read, None where they read all. Raises CheckpointError, ConfigError.
    """
    places = [place for place, (kind, _) in enumerate(modules) if class_of(kind) in _ROUTERS]
    if not places:
        if asked is not None:
            raise ConfigError("--route is for checkpoints with a Router, and modules.json has none: leave it out.")
        return [*modules], None
    if len(places) > 1:
        raise CheckpointError("modules.json asks for two Routers; bei builds a route of one.")
    (place,) = places
    router = _Router(modules[place][1])
    chosen, routing = router.with_table() if asked is None and len(modules) == 1 else (None, None)
    if chosen is None:
        chosen, routing = router.chosen(asked)
    return [*modules[:place], *router.modules(chosen), *modules[place + 1 :]], routing


class _Router:
    """A Router's settings in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        path = next((folder / name for name in _CONFIGS if (folder / name).is_file()), folder / _CONFIGS[0])
        self._path, config = path, read_object(path)
        self._types, self._structure = (setting(path, config, key, dict) or {} for key in ("types", "structure"))
        parameters = setting(path, config, "parameters", dict) or {}
        listed = [name for names in self._structure.values() for name in (names if isinstance(names, list) else [None])]
        named = all(isinstance(name, str) and isinstance(self._types.get(name), str) for name in listed)
        if not listed or not named:
            raise CheckpointError(f"{path} does not say which modules its routes are. Download the checkpoint again.")
        self._mappings = _mappings(path, setting(path, parameters, "route_mappings", dict) or {})
        self._default = setting(path, parameters, "default_route", str)
        if self._default is None and setting(path, parameters, "allow_empty_key", bool) is not False:
            self._default = next(iter(self._structure))
        for route in (self._default, *self._mappings.values()):
            if route is not None and route not in self._structure:
                raise CheckpointError(f"{path} names the route {route!r}, and has {self._names}.")

    @property
    def _names(self) -> str:
        return ", ".join(self._structure)

    def modules(self, route: str) -> list[Module]:
        """The modules of ``route``. Raises CheckpointError for a path outside of the checkpoint."""
        try:
            return [(self._types[name], within(self._folder, name)) for name in self._structure[route]]
        except UnfitError as error:
            raise CheckpointError(
                f"{self._path} names a module's folder that bei does not read: {error}. Download the checkpoint again."
            ) from error

    def with_table(self) -> tuple[str | None, Routing | None]:
        """The route beside a table of weights that serves the other side; (None, None) where there is no such table."""
        routes = {side: self._route_of(side) for side in get_args(Side)}
        tables = {side: route for side, route in routes.items() if route is not None and self._is_table(route)}
        if len(tables) != 1 or {*self._structure} != {*routes.values()}:
            return None, None
        ((side, table),) = tables.items()
        other = next(name for name in routes if name != side)
        default = self._route_of(None)
        named = None if default is None else side if default == table else other
        return routes[other], Routing(named, table=(side, self.modules(table)[0][1]))

    def chosen(self, asked: str | None) -> tuple[str, Routing | None]:
        """Route ``asked``, else the default, and the texts that other routes read."""
        if asked is not None and asked not in self._structure:
            raise ConfigError(f"--route {asked}: the checkpoint's Router has {self._names}.")
        route = asked or (next(iter(self._structure)) if len(self._structure) == 1 else self._route_of(None))
        if route is None:
            raise CheckpointError(
                f"The checkpoint's Router has the routes {self._names}, and no default; an artifact holds one: choose "
                "it with --route."
            )
        names = dict.fromkeys([*get_args(Side), *self._structure])
        absent = tuple(name for name in names if self._route_of(name) != route)
        return route, Routing(route, absent) if absent and len(self._structure) > 1 else None

    def _is_table(self, route: str) -> bool:
        return [class_of(kind) for kind, _ in self.modules(route)] == [_TABLE]

    def _route_of(self, task: str | None) -> str | None:
        """The route of texts with this task, None where the library refuses them."""
        for key in ((task, _MODALITY), (task, None), (None, _MODALITY), (None, None)):
            if key in self._mappings:
                return self._mappings[key]
        for name in (task, _MODALITY):
            if name in self._structure:
                return name
        return self._default if task is None else None


def _mappings(path: Path, stored: Mapping[str, Any]) -> dict[tuple[Any, ...], str]:
    """Routes by (task, modality): the keys are Python tuples written as text."""
    found: dict[tuple[Any, ...], str] = {}
    for key, route in stored.items():
        try:
            read = ast.literal_eval(key)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            read = None
        if not isinstance(read, tuple) or len(read) != 2 or not isinstance(route, str) or not all(map(_is_name, read)):
            raise CheckpointError(f"{path} has the route_mapping {key!r}, which is no task and modality.")
        found[read] = route
    return found


def _is_name(part: object) -> bool:
    """True if ``part`` is a task or a modality, or several; None means any."""
    return part is None or isinstance(part, str) or (isinstance(part, tuple) and all(isinstance(p, str) for p in part))
