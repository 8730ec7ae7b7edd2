"""The servers of a run, side by side, and texts that none of them has met."""

from __future__ import annotations

import json
import random
import shlex
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from benchmarks.load import closed_loop
from benchmarks.prose import Prose, ProseExhaustedError, Words
from benchmarks.server import ROOT, Server, built_by, revision, serving

NOW, BEFORE = "now", "before"
_WARM_REQUESTS = 12
_WARM_TEXTS = 16


@dataclass(frozen=True)
class Kind:
    """How to start one server: the artifacts it serves, its flags, whose code it runs."""

    artifacts: Sequence[Path]
    flags: Sequence[str] = ()
    checkout: Path = ROOT


def kinds(
    models: Mapping[Path, Path], flags: str, before: Path | None, flags_before: str, scratch: Path
) -> dict[str, Kind]:
    """The server of this checkout and, where ``before`` is given, that checkout's; flags as in a shell.

    ``models``: the artifacts to serve, and the checkpoint of each, from which the other checkout builds its own.
    """
    now = {NOW: Kind(list(models), tuple(shlex.split(flags)))}
    if before is None:
        return now
    built = [built_by(before.resolve(), folder, artifact, scratch) for artifact, folder in models.items()]
    return {**now, BEFORE: Kind(built, tuple(shlex.split(flags_before)), before.resolve())}


class Fleet:
    """Named servers, all running. A context manager; ``home`` is the HOME of all of them, for the whole run."""

    def __init__(self, kinds: Mapping[str, Kind], home: Path) -> None:
        self._kinds = kinds
        self._home = home
        self._stack = ExitStack()
        self._servers: dict[str, Server] = {}
        self.num_starts = 0

    def __enter__(self) -> Fleet:
        self._home.mkdir(parents=True, exist_ok=True)
        self.restart()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def __getitem__(self, name: str) -> Server:
        return self._servers[name]

    def restart(self) -> None:
        """Stop all servers and start them anew: they have met no word. Their engines are warmed by token ids."""
        self._stack.close()
        for name, kind in self._kinds.items():
            server = serving(kind.artifacts, *kind.flags, checkout=kind.checkout, home=self._home)
            self._servers[name] = self._stack.enter_context(server)
            for artifact in kind.artifacts:
                _warm(self._servers[name].port, json.loads((artifact / "manifest.json").read_bytes())["name"])
        self.num_starts += 1

    def described(self) -> dict[str, object]:
        """What ran, for the results."""
        return {
            name: {"commit": revision(kind.checkout), "flags": shlex.join(kind.flags)}
            for name, kind in self._kinds.items()
        }


class FirstTime:
    """Texts that no server of a fleet has met. Take them between measurements: it may restart all servers."""

    def __init__(self, prose: Prose, fleet: Fleet) -> None:
        self._prose = prose
        self._fleet = fleet

    def take(self, *wanted: tuple[int, Words]) -> list[list[str]]:
        """As many texts of each kind as asked for. Where the prose ends, it begins again and the servers too."""
        try:
            return self._take(wanted)
        except ProseExhaustedError:
            self._prose.new_lap()
            self._fleet.restart()
        return self._take(wanted)

    def give_back(self, texts: Sequence[str], length: Words) -> None:
        """Texts that were not sent."""
        self._prose.give_back(texts, length)

    def described(self) -> dict[str, int]:
        """Counts for the results."""
        counts = {"laps": self._prose.lap + 1, "server starts": self._fleet.num_starts}
        return {"distinct texts in the last lap": self._prose.num_taken, **counts}

    def _take(self, wanted: Sequence[tuple[int, Words]]) -> list[list[str]]:
        taken: list[list[str]] = []
        for count, length in wanted:
            taken.append(self._prose.take(count, length))
        return taken


def _warm(port: int, model: str) -> None:
    """Run batches of many shapes, without showing the tokenizer a word."""
    rng = random.Random(0)
    bodies = [
        json.dumps({"model": model, "inputs": [_ids(rng) for _ in range(_WARM_TEXTS)]}) for _ in range(_WARM_REQUESTS)
    ]
    closed_loop(port, 4, bodies, path="/embed")  # TEI's route takes token ids as they are
    closed_loop(
        port, 1, [json.dumps({"model": model, "inputs": [_ids(rng, 29)]}) for _ in range(_WARM_TEXTS)], path="/embed"
    )


def _ids(rng: random.Random, length: int | None = None) -> list[int]:
    return [rng.randrange(1000, 20_000) for _ in range(length or rng.randint(8, 256))]
