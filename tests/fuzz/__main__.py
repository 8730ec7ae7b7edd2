"""``python -m tests.fuzz`` tries changed inputs on every reader, a million by default.

Each target has its share of them and a process of its own. Nothing may be found: an error that is not of bei's tree, a
message that repeats an input, an end of the process, more than 10 s of processor time or a gigabyte for one input. What
is found can be tried again: ``--target NAME --seed SEED --only INDEX``, which keeps the files.
"""

from __future__ import annotations

import argparse
import io
import math
import sys
import tempfile
import traceback
from pathlib import Path
from random import Random

from bei.errors import BeiError
from tests.fuzz.runner import run
from tests.fuzz.targets import TARGETS


def main() -> int:
    """Returns the exit code: 1 where something was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=1_000_000, help="of all targets (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn (default: %(default)s)")
    parser.add_argument("--target", action="append", choices=sorted(TARGETS), help="only this one; may be repeated")
    parser.add_argument("--only", type=int, metavar="INDEX", help="only this input, in this process")
    asked = parser.parse_args()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # findings quote inputs
    names = asked.target or [*TARGETS]
    if asked.only is not None:
        return _again(names[0], asked.seed, asked.only)
    all_shares = sum(TARGETS[name].share for name in names)
    num_inputs = num_found = 0
    seconds = 0.0
    for name in names:
        outcome = run(name, math.ceil(asked.inputs * TARGETS[name].share / all_shares), asked.seed)
        print(outcome, flush=True)
        for found in outcome.findings:
            print(f"  --target {name!r} --seed {asked.seed} --only {found.number}: {found.what}")
            print("".join(f"    {line}\n" for line in found.detail.splitlines()[-12:]), end="", flush=True)
        num_inputs, num_found = num_inputs + outcome.num_inputs, num_found + len(outcome.findings)
        seconds += outcome.seconds
    print(f"{num_inputs:,} inputs in {seconds:,.0f} s: {num_found or 'nothing'} found")
    return int(num_found > 0)


def _again(name: str, seed: int, index: int) -> int:
    """One input, whose files stay."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    print(f"in {folder}")
    trial = TARGETS[name].make(folder)
    try:
        trial(Random(f"{seed}:{index}"))
    except BeiError as error:
        print(f"refused with {type(error).__name__}: {error}")
    except BaseException:  # shown as the finding that it is
        traceback.print_exc()
        return 1
    else:
        print("read")
    return 0


if __name__ == "__main__":
    sys.exit(main())
