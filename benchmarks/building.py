"""How long ``bei build`` takes for MiniLM, verification included: seconds, before and after.

python -m benchmarks.building --before CHECKOUT [--repetitions 11]
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from benchmarks.common import alternate, ratio, seconds, write
from benchmarks.models import minilm_folder
from benchmarks.server import revision

_HERE = Path(__file__).parents[1]


def main() -> None:
    """Measure and write ``results/building.json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="another checkout, which builds too")
    parser.add_argument("--repetitions", type=int, default=11)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "artifact"
        checkouts = {"now": _HERE, "before": options.before.resolve()}
        sides = {name: partial(build_s, checkout, out) for name, checkout in checkouts.items()}
        found = alternate(sides, options.repetitions)
    commits = {name: revision(checkout) for name, checkout in checkouts.items()}
    write("building", {"commits": commits, "seconds": found, "now / before": ratio(found, "now", "before")})


def build_s(checkout: Path, out: Path) -> float:
    """Seconds of one build by ``checkout``, its process's start included."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (checkout, checkout / "build")))}
    command = [sys.executable, "-m", "bei", "build", str(minilm_folder()), "--out", str(out)]
    took = seconds(lambda: subprocess.run(command, env=env, cwd=checkout, check=True, capture_output=True))
    shutil.rmtree(out)
    return took


if __name__ == "__main__":
    main()
