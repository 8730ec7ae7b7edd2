"""How long ``bei build`` takes for MiniLM, verification and the start of its process included: seconds.

python -m benchmarks.building [--before CHECKOUT] [--repetitions 11]
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from benchmarks.harness.arguments import parsed
from benchmarks.harness.models import minilm_folder
from benchmarks.harness.record import write
from benchmarks.harness.rounds import alternate, ratio, seconds
from benchmarks.harness.servers import BEFORE, NOW, ROOT, environment, revision


def main() -> None:
    options = parsed(__doc__, before=Path, repetitions=11)
    checkouts = {NOW: ROOT} | ({BEFORE: options.before.resolve()} if options.before else {})
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "artifact"
        found = alternate(
            {name: partial(build_s, checkout, out) for name, checkout in checkouts.items()}, options.repetitions
        )
    compared = {"now / before": ratio(found, NOW, BEFORE)} if options.before else {}
    commits = {name: revision(checkout) for name, checkout in checkouts.items()}
    write("building", {"commits": commits, "seconds": found, **compared})


def build_s(checkout: Path, out: Path) -> float:
    command = [sys.executable, "-m", "bei", "build", str(minilm_folder()), "--out", str(out)]
    env = environment(checkout)
    took = seconds(lambda: subprocess.run(command, env=env, cwd=checkout, check=True, capture_output=True))
    shutil.rmtree(out)
    return took


if __name__ == "__main__":
    main()
