"""``bei completion SHELL``: a script for the shell, of the parser's own commands, flags, choices and files."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from bei.utils import libraries

SHELLS = ("bash", "zsh", "fish")
# Arguments that are often paths.
_PATHS = ("artifact", "model", "models")


def completion_script(shell: str, parser: argparse.ArgumentParser) -> str:
    """The script for ``shell``, one of ``SHELLS``. Raises MissingDependencyError."""
    shtab = libraries.load("shtab", "shtab", "completion", "bei completion")
    for action in _actions(parser):
        metavar = action.metavar if isinstance(action.metavar, str) else ""
        if metavar.startswith("FILE") or action.dest in _PATHS:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        elif metavar == "FOLDER":
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    script: str = shtab.complete(parser, shell=shell)
    return script


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                yield from _actions(child)
        else:
            yield action
