"""``python -m bei.multiprocess NAME``: a process of a server, started by its supervisor.

Standard input is the control socket. The process ends with its supervisor, and ignores signals: those of a terminal or
of a service manager reach all processes of a server, and only the supervisor knows in which order to end.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import socket
import sys

from bei.multiprocess.control.ignored_signals import IGNORED
from bei.utils.scarce_resources import prepare_for_scarcity, scarce_resource

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Be the process of this name."""
    prepare_for_scarcity()
    faulthandler.enable()  # the stacks of a process that a native library ends are all that it leaves
    name = sys.argv[1]
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED)  # the supervisor has held them back until now
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        _run(name, _control_socket())
    except Exception as error:  # a lack shows as any error of any library; others are raised again
        if (lack := scarce_resource(error)) is None:
            raise
        sys.exit(f"error: {name}: {lack}")


def _run(name: str, sock: socket.socket) -> None:
    role = name.partition("-")[0]
    if role == "engine":
        from bei.multiprocess.roles.engine import run
    elif role == "manager":
        from bei.multiprocess.roles.batch_manager import run
    else:
        from bei.multiprocess.roles.frontend import run

    from bei.multiprocess.control.channel import ControlChannel

    run(ControlChannel(sock, name))


def _control_socket() -> socket.socket:
    """Standard input, which is empty from now on, for us and for processes of ours."""
    try:
        sock = socket.socket(fileno=os.dup(0))
    except OSError:
        sys.exit("error: this is a process of a server: 'bei serve' starts it.")
    os.set_inheritable(sock.fileno(), False)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return sock


if __name__ == "__main__":
    main()
