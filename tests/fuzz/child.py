"""The process that tries the inputs of one target: see ``runner``."""

from __future__ import annotations

import faulthandler
import importlib
import json
import logging
import sys
from pathlib import Path

from tests.fuzz.trial import Finding, MakeTrial, State, quiet, try_many


def main() -> None:
    """Try inputs; each finding is a line of JSON on standard output."""
    table, target, seed, start, stop, state, folder = sys.argv[1:]
    faulthandler.enable()
    quiet()
    logging.disable()
    scratch = Path(folder)
    scratch.mkdir()
    make: MakeTrial = importlib.import_module(table).TARGETS[target].make

    def report(found: Finding) -> None:
        print(json.dumps(found), flush=True)

    try_many(make(scratch), int(seed), int(start), int(stop), State(Path(state)), report)


if __name__ == "__main__":
    main()
