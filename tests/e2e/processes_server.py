"""``bei serve`` in several processes, whose children are those of ``tests.e2e.standin_child``.

While it drains it waits 2 s for an engine that is away, not 20. The variable EXIT_S is how long processes have after a
second signal.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from unittest import mock

from bei.cli import main

COMMAND = (sys.executable, "-m", "tests.e2e.standin_child")

if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR2)
    if "EXIT_S" in os.environ:
        for name in ("bei.multiprocess.supervisor.supervisor._ABANDON_S", "bei.server.lifecycle.signals._EXIT_S"):
            mock.patch(name, float(os.environ["EXIT_S"])).start()
    with (
        mock.patch("bei.multiprocess.supervisor.supervisor.COMMAND", COMMAND),
        mock.patch("bei.multiprocess.supervisor.supervisor._DRAIN_S", 2.0),
    ):
        main.main(["serve", *sys.argv[1:], "--port", "0"])
