"""The kernels of this CPU against plain loops, with AddressSanitizer and UndefinedBehaviorSanitizer."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent.parent / "kernels"
SANITIZED = "-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=undefined"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (shutil.which("cmake") and shutil.which("c++")), reason="needs cmake and a C++ compiler"),
]


def test_every_kernel_gives_what_plain_loops_give(tmp_path: Path) -> None:
    flags = f"-DCMAKE_CXX_FLAGS={SANITIZED}"
    configure = ["cmake", "-S", str(FOLDER), "-B", str(tmp_path), "-DBEI_TESTS=ON", flags]
    subprocess.run(configure, check=True, capture_output=True)
    subprocess.run(["cmake", "--build", tmp_path], check=True, capture_output=True)
    found = subprocess.run([tmp_path / "fuzz", "0", "120"], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    assert found.stdout.split()[-1] == "portable"
