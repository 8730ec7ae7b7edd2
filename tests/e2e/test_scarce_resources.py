"""Commands of a process that may have little memory, or few threads: one line that says what to do."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from bei.artifact.manifest import Artifact
from tests.e2e.process import BEI, DEADLINE_S

_STRANGER = 12345
# Root has no limit of processes. Another user must still be able to read this interpreter and these files.
_AS_STRANGER = (
    *("setpriv", f"--reuid={_STRANGER}", "--clear-groups"),
    *("--inh-caps", "+dac_override,+dac_read_search", "--ambient-caps", "+dac_override,+dac_read_search"),
)


def error_lines(
    limit: str, arguments: Sequence[object], env: Mapping[str, str], cwd: Path, user: Sequence[str]
) -> list[str]:
    """The errors of a ``bei``, one a process, that fails within ``limit`` (of ulimit). Libraries may write lines of
    their own."""
    command = [*user, "sh", "-c", f'ulimit {limit}; exec "$@"', "sh", *BEI, *map(str, arguments)]
    ended = subprocess.run(
        command, env=dict(env), cwd=cwd, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert ended.returncode == 2, ended.stderr
    assert "Traceback" not in ended.stderr
    lines = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert lines, ended.stderr
    return lines


# With less the modules of NumPy themselves lack memory, and some of them then crash.
@pytest.mark.parametrize(
    ("command", "kilobytes"),
    [("inspect", 150_000), *(("serve", kilobytes) for kilobytes in (180_000, 292_000, 300_000, 320_000))],
)
def test_too_little_memory_is_called_so(
    command: str, kilobytes: int, tiny: Artifact, env: Mapping[str, str], tmp_path: Path
) -> None:
    port = ("--port", 0) if command == "serve" else ()
    (line,) = error_lines(f"-v {kilobytes}", [command, tiny.path, *port], env, tmp_path, ())
    assert line.startswith("error: There is no memory left for this process (")
    assert "ulimit -v" in line


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs another user")
@pytest.mark.parametrize("flags", [(), ("--http-workers", "2")], ids=["one process", "several"])
@pytest.mark.parametrize("count", [4, 9])
def test_too_few_threads_are_called_so(
    count: int, flags: tuple[str, ...], tiny: Artifact, env: Mapping[str, str], tmp_path: Path
) -> None:
    arguments = ["serve", tiny.path, "--port", 0, *flags]
    for line in error_lines(f"-{'u' if _has_u() else 'p'} {count}", arguments, env, tmp_path, _AS_STRANGER):
        # A process of several puts its name before it.
        assert re.match(r"error: ([\w-]+: )?No thread or process can be started \(", line), line
        assert "ulimit -u" in line


def _has_u() -> bool:
    """Bash has -u for what dash calls -p."""
    return subprocess.run(["sh", "-c", "ulimit -u"], capture_output=True, check=False).returncode == 0
