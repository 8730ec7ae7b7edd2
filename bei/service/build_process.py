"""``python -m bei.service.build_process MODEL PRECISION OUT``: a build in a process of its own, so that a server keeps
neither the memory nor the libraries of what it builds before it serves.

Standard input is open as long as the server waits: at its end the build ends too. Standard output gets one line, the
error as JSON, or null. The settings of the environment hold as in the server.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import time
import traceback
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from bei import errors
from bei.utils.module_command import module_command
from bei.utils.scarce_resources import prepare_for_scarcity, scarce_resource
from bei.utils.threads import started

if TYPE_CHECKING:
    from bei.artifact.manifest import Artifact

COMMAND = module_command("bei.service.build_process")
# A build that is to end removes what it has written, unless a compiler's library does not return in that time.
_TIDIES_S = 10.0
_answers = msgspec.json.Decoder(tuple[str, str] | None)


def build_apart(config: Any, *_: object) -> Artifact:
    """``bei_build.pipeline.build`` of a BuildConfig, whose settings are the environment's but for model, precision and
    out. Raises what it raises, and BuildError where the process dies."""
    from bei.artifact.store import load

    assert config.out is not None
    # A session of its own: Ctrl-C in a terminal reaches the server alone, which then ends the build.
    process = subprocess.Popen(
        [*COMMAND, config.model, config.precision, config.out],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
    finally:
        process.stdin.close()
        process.stdout.close()
        try:
            process.wait(_TIDIES_S + 5)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # compilers that it has started too
            process.wait()
    if not line:
        reason = ", probably for want of memory: build where there is more, and serve the artifact"
        raise errors.BuildError(
            f"The process that built {config.model} has ended by itself (exit code {process.returncode})"
            f"{reason if process.returncode == -signal.SIGKILL else ''}."
        )
    if (failure := _answers.decode(line)) is not None:
        name, message = failure
        error: errors.BeiError = getattr(errors, name).__new__(getattr(errors, name))
        error.args = (message,)
        raise error
    return load(Path(config.out))


def main() -> None:
    """Build, answer, and end at once: libraries would say at their end what they leak."""
    prepare_for_scarcity()
    faulthandler.enable()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the build cleans up after itself
    waiting, answer = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # what the build starts, and prints, has nothing to do with the pipes
    os.dup2(2, 1)
    started(partial(_end_with, waiting), "bei-end-with-server")
    failure = None
    try:
        _build(*sys.argv[1:])
    except errors.BeiError as error:
        lack = None if isinstance(error, errors.ConfigError) else scarce_resource(error)
        known = next(one for one in type(error).__mro__ if hasattr(errors, one.__name__))
        failure = (known.__name__, lack or str(error))
    except Exception as error:  # a border: a bug of the build is an error of the server, with its traceback in the log
        if (lack := scarce_resource(error)) is None and not isinstance(error, OSError):
            traceback.print_exc()
        failure = (errors.BuildError.__name__, lack or f"The build has failed ({type(error).__name__}: {error}).")
    sys.stderr.flush()
    os.write(answer, msgspec.json.encode(failure) + b"\n")
    os._exit(0)


def _build(model: str, precision: str, out: str) -> None:
    from bei.config.build_flags import with_variable_names
    from bei.config.sources import load
    from bei.engine.load import load_engine
    from bei_build.config import BuildConfig
    from bei_build.pipeline import build
    from bei_build.progress import Progress

    config = load(BuildConfig, {"model": model, "precision": precision, "out": out})
    build(config, load_engine, Progress(worded=partial(with_variable_names, build_config=BuildConfig)))


def _end_with(waiting: int) -> None:
    os.read(waiting, 1)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_TIDIES_S)
    os._exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    main()
