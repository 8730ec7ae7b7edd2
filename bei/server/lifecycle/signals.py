"""Signal handling that works while the event loop hangs, and the forced end of the process."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

from bei.utils.sighup import LogTerminal

log = logging.getLogger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGINT)

_EXIT_S = 4.0
# So much later faulthandler ends a process in which something holds the interpreter's lock. Both together stay below
# five seconds. Where nothing holds the lock, the thread that says why comes first.
_HELD_S = 0.7


def on_signals(
    first: Callable[[], object], later: Callable[[], object], reload: Callable[[], object], terminal: LogTerminal
) -> None:
    """Call ``first`` at the first SIGTERM or SIGINT, ``later`` at each one after it, and ``reload`` at every SIGHUP, in
    a thread of their own. A SIGHUP that says that the ``terminal`` was closed is like SIGTERM.

    A thread, because the main thread with its event loop may hang: neither a handler of the loop nor one of Python's
    would then run. Replaces the wake-up descriptor of the loop that runs.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    # First the descriptor: a signal that comes before its handler is the former one's, and none is lost between them.
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    for number in (*_SIGNALS, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # Python must have a handler to write to the descriptor

    def listen() -> None:
        handler = first
        while True:
            for number in os.read(reading, 1):
                if number in _SIGNALS or (number == signal.SIGHUP and terminal.is_closed):
                    handler()
                    handler = later
                elif number == signal.SIGHUP:
                    reload()

    threading.Thread(target=listen, name="signals", daemon=True).start()


def exit_now() -> None:
    """End the process with exit code 0 though a thread is inside work that cannot be interrupted."""
    logging.shutdown()
    os._exit(0)


def exit_soon() -> None:
    """End the process with exit code 1 if it has not ended by itself within five seconds. In any thread.

    It cannot be called where a library holds the interpreter's lock since before the signal: no thread of Python hears
    of it then. Such a process needs SIGKILL, which the supervisor of several processes sends.
    """

    def end() -> None:
        time.sleep(_EXIT_S)
        log.error("the process has not ended within %.0f s of the second signal: it is ended now", _EXIT_S)
        logging.shutdown()
        os._exit(1)

    threading.Thread(target=end, name="exit", daemon=True).start()
    # Python's threads need the lock. faulthandler's does not: it writes where all threads are, and ends the process.
    faulthandler.dump_traceback_later(_EXIT_S + _HELD_S, exit=True, file=sys.stderr)
