"""Signals that are heard, and a process that ends, whatever hangs."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGINT)

_EXIT_S = 4.0


def on_signals(
    first: Callable[[], object], later: Callable[[], object], reload: Callable[[], object] | None = None
) -> None:
    """Call ``first`` at the first SIGTERM or SIGINT, ``later`` at each one after it, and ``reload`` at every SIGHUP, in
    a thread of their own. Without ``reload`` SIGHUP does what it always does.

    A thread, because the main thread with its event loop may hang: neither a handler of the loop nor one of Python's
    would then run. Replaces the wake-up descriptor of the loop that runs.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    for number in _SIGNALS if reload is None else (*_SIGNALS, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # Python must have a handler to write to the descriptor
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)

    def listen() -> None:
        handler = first
        while True:
            for number in os.read(reading, 1):
                if number in _SIGNALS:
                    handler()
                    handler = later
                elif number == signal.SIGHUP and reload is not None:
                    reload()

    threading.Thread(target=listen, name="signals", daemon=True).start()


def exit_soon() -> None:
    """End the process with exit code 1 if it has not ended by itself in time. In any thread."""

    def end() -> None:
        time.sleep(_EXIT_S)
        log.error("the process has not ended within %.0f s of the second signal: it is ended now", _EXIT_S)
        logging.shutdown()
        os._exit(1)

    threading.Thread(target=end, name="exit", daemon=True).start()
    # Python's threads need its lock. What holds that for ever is ended from outside of Python, and says where it is.
    faulthandler.dump_traceback_later(_EXIT_S + 0.5, exit=True, file=sys.stderr)
