"""The shared memory as several front ends see it, in this process and in others."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from bei.multiprocess.shared_memory.limits_page import SharedPage
from tests.support.engines import DEADLINE_S


@contextmanager
def pages(num_cells: int) -> Iterator[list[SharedPage]]:
    """One memory: what the supervisor sees of it first, then what each front end does.

    In one process record locks keep nobody out.
    """
    found = [SharedPage.create(num_cells, 2)]
    try:
        for cell in range(num_cells):
            found.append(SharedPage(os.dup(found[0].fileno()), num_cells, 2, cell))
        yield found
    finally:
        for page in found:
            page.close()


class Other:
    """Another process with the memory's descriptor, which it shares with this one. It runs ``code`` with a ``page`` and
    a function ``say``, and goes on from ``wait()`` when it is told to."""

    def __init__(self, page: SharedPage, code: str, cell: int | None = None) -> None:
        descriptor = page.fileno()
        self.process = subprocess.Popen(
            [sys.executable, "-c", _PRELUDE.format(descriptor=descriptor, num_cells=page.num_cells, cell=cell) + code],
            pass_fds=[descriptor],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def hear(self) -> str:
        """The next line that it says."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def go_on(self) -> None:
        """It returns from ``wait``."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        """SIGKILL, whatever it does."""
        self.process.kill()
        self.process.wait(DEADLINE_S)

    def __enter__(self) -> Other:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


_PRELUDE = """
import sys
from bei.multiprocess.shared_memory.limits_page import SharedPage

page = SharedPage({descriptor}, {num_cells}, 2, {cell})

def say(what):
    print(what, flush=True)

def wait():
    sys.stdin.readline()

"""
