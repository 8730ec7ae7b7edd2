"""peers.toml: environments with pinned versions, peers, models."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Task = Literal["embed", "rerank"]

FILE = Path(__file__).with_name("peers.toml")


@dataclass(frozen=True)
class Environment:
    """A virtual environment. ``packages``: all that is in it, pinned; ``note``: what a reader should know of the pins.
    ``checkout``: this checkout and its kernels are installed too. ``llama_cpp``: the package, pinned, whose sources of
    llama.cpp are compiled."""

    name: str
    packages: Sequence[str] = ()
    checkout: bool = False
    llama_cpp: str = ""
    note: str = ""


@dataclass(frozen=True)
class Peer:
    """One thing to measure: a server (``transport`` http) or a library in a process of its own.

    ``software`` names the code that starts it (``servers.COMMANDS``, ``worker.LOADERS``); ``environment`` where it
    is installed, empty for a binary that is given by path; ``settings`` go to that code.
    """

    name: str
    software: str
    environment: str
    transport: Literal["http", "process"]
    precision: str
    tasks: Sequence[Task] = ("embed",)
    settings: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True)
class Model:
    """``checkpoint``: a name of ``benchmarks.harness.models.checkpoint_folder``. ``random``: its weights are, so that
    quality says nothing. ``pooling``: "mean", "cls" or "last"."""

    name: str
    checkpoint: str
    task: Task
    max_tokens: int
    pooling: str = "mean"
    random: bool = False


@dataclass(frozen=True)
class Table:
    environments: dict[str, Environment]
    peers: dict[str, Peer]
    models: dict[str, Model]


@cache
def table() -> Table:
    found = tomllib.loads(FILE.read_text())
    environments = {name: Environment(name, **fields) for name, fields in found["environment"].items()}
    peers = {name: Peer(name, **fields) for name, fields in found["peer"].items()}
    models = {name: Model(name, **fields) for name, fields in found["model"].items()}
    return Table(environments, peers, models)


def cache_folder() -> Path:
    """Environments, exported models and artifacts: ``BENCHMARK_PEERS``, or a folder beside bei's own cache."""
    return Path(os.environ.get("BENCHMARK_PEERS", Path.home() / ".cache" / "bei-peers"))


def environment_folder(name: str) -> Path:
    return cache_folder() / "environments" / name
