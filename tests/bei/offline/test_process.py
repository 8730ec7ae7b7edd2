"""Processes with a Model: forks, exit without ``close``, settings of the process that a Model leaves alone."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bei.artifact.manifest import Artifact
from tests.e2e.process import DEADLINE_S, ROOT, environment

_OPEN = """
import os, signal, sys, threading, time
from unittest import mock
from bei import Model
from bei.engine.fake import FakeEngine
from bei.errors import ForkedProcessError, ShuttingDownError
from tests.support.artifacts import LIMITS

class Slow(FakeEngine):
    seconds = 0.02

    def run(self, batch, outputs=None):
        time.sleep(self.seconds)
        return super().run(batch)

mock.patch("bei.service.loader.load_engine", lambda *_: Slow(LIMITS)).start()
opened = lambda: Model(sys.argv[1], tune="off", tokenizer_threads=1)
"""

Run = Callable[[str], subprocess.CompletedProcess[str]]


@pytest.fixture
def run(artifact: Artifact, tmp_path: Path) -> Run:
    """``run(code)`` in a new process, which must exit with code 0 and print nothing on standard error."""

    def ran(code: str) -> subprocess.CompletedProcess[str]:
        quiet = ("-W", "ignore::DeprecationWarning")  # of forks, where Python warns of what this is about
        command = [sys.executable, *quiet, "-c", _OPEN + textwrap.dedent(code), str(artifact.path)]
        done = subprocess.run(
            command,
            env=environment(tmp_path),
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        return done

    return ran


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks here")
def test_a_fork_is_refused_with_a_sentence_and_the_parent_goes_on(run: Run) -> None:
    done = run(
        """
        model = opened()
        model.embed(["cat"])
        if not (child := os.fork()):
            stream = lambda: next(model.embed_iter(["cat"]))
            for use in (lambda: model.embed(["cat"]), stream, lambda: model.name, opened):
                try:
                    use()
                except ForkedProcessError as error:
                    print(error.code, error)
            model.close()
            with model:
                pass
            sys.exit(0)  # not os._exit: what is registered for the exit runs too
        print(os.waitpid(child, 0)[1], model.embed(["cat"]).shape)
        """
    )
    *child, parent = done.stdout.splitlines()
    assert parent == "0 (1, 8)"
    assert len(child) == 4
    assert set(child) == {
        "forked_process A fork lacks the threads of the process that has made a Model: start processes with "
        "multiprocessing.get_context('spawn'), and make a Model in each."
    }


def test_a_fork_may_make_the_first_model(run: Run) -> None:
    done = run(
        """
        if not (child := os.fork()):
            print(opened().embed(["cat"]).shape, flush=True)
            os._exit(0)
        os.waitpid(child, 0)
        """
    )
    assert done.stdout == "(1, 8)\n"


@pytest.mark.parametrize(
    "at_the_end",
    ["", "threading.Thread(target=call, daemon=True).start()"],
    ids=["idle", "in the middle of a call"],
)
def test_a_process_that_does_not_close_its_model_ends_without_waiting_for_it(run: Run, at_the_end: str) -> None:
    done = run(
        f"""
        mock.patch("bei.offline.service_thread._EXIT_S", 600).start()
        model = opened()
        model.embed(["cat"])
        Slow.seconds = 0.5  # the call would take minutes
        def call():
            try:
                model.embed([f"cat {{i}}" for i in range(5000)])
            except ShuttingDownError:
                pass
        {at_the_end}
        time.sleep(0.1)
        print(time.time())
        """
    )
    assert time.time() - float(done.stdout) < DEADLINE_S / 2


def test_threads_that_outlive_the_main_one_get_their_answers(run: Run) -> None:
    """Python joins such threads at exit, when its pools accept no more work: large windows do without the pool."""
    done = run(
        """
        from bei.tasks import support
        support._MANY_NUMBERS = 0
        model = opened()
        def work():
            threading.main_thread().join()
            print(model.embed([f"cat {i}" for i in range(300)]).shape, flush=True)
        threading.Thread(target=work).start()
        """
    )
    assert done.stdout == "(300, 8)\n"


def test_a_model_leaves_the_process_as_it_was(run: Run) -> None:
    done = run(
        """
        import gc, logging
        def state():
            handlers = [signal.getsignal(number) for number in signal.valid_signals()]
            loggers = [(logging.getLogger(name).handlers, logging.getLogger(name).level) for name in ("", "bei")]
            collector = gc.get_threshold(), gc.get_freeze_count()
            return handlers, loggers, dict(os.environ), sys.getswitchinterval(), collector
        before = state()
        model = opened()
        model.embed([f"cat {i}" for i in range(300)])
        print(before == state())
        """
    )
    assert done.stdout == "True\n"


def test_importing_bei_is_cheap_and_knows_its_model() -> None:
    code = """
    import sys, bei
    print(sorted({"numpy", "tokenizers", "msgspec", "asyncio", "rich"} & sys.modules.keys()))
    from bei import Model
    print(Model is bei.Model, sorted({"fastapi", "uvicorn", "rich", "openvino", "bei_build"} & sys.modules.keys()))
    try:
        bei.Modle
    except AttributeError as error:
        print(error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["[]", "True []", "module 'bei' has no attribute 'Modle'"]
