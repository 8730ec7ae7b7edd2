"""``bei serve`` in several processes, whose children are those of ``tests.e2e.standin_child``."""

from __future__ import annotations

import sys
from unittest import mock

from bei import cli

COMMAND = (sys.executable, "-m", "tests.e2e.standin_child")

if __name__ == "__main__":
    with mock.patch("bei.processes.supervisor.COMMAND", COMMAND):
        cli.main(["serve", *sys.argv[1:], "--port", "0"])
