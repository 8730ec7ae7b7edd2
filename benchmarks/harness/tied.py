"""``python harness/tied.py PARENT COMMAND...``: becomes COMMAND, and gets SIGTERM when PARENT, its parent, ends.

However that ends: a benchmark that is stopped or killed leaves no server behind that would disturb the next one. A
program of its own and not a ``preexec_fn``, which would run Python in the fork of a process with threads.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, *command = sys.argv[1:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(parent):  # it has ended before this process could say so
        sys.exit(128 + signal.SIGTERM)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
