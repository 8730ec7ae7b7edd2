"""A process that does what the names of models tell it: ``python -m tests.bei.multiprocess.scripted NAME``."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading

from bei.errors import ConfigError
from bei.multiprocess.control.channel import ControlChannel
from bei.multiprocess.control.messages import Close, Command, Reload, Stop


def main() -> None:
    channel = ControlChannel(socket.socket(fileno=os.dup(0)), sys.argv[1])
    is_over = threading.Event()

    def ask(number: int) -> None:
        replies = asyncio.run(channel.ask("name"))
        channel.failed(number, ConfigError(f"{dict(replies.answers)} {replies.silent}"))

    def act(number: int, command: Command, descriptors: list[int]) -> None:
        if isinstance(command, Reload):  # with descriptors: says which they are
            for descriptor in descriptors:
                os.write(descriptor, f"{channel.name} ".encode())
            channel.done(number)
        elif isinstance(command, Close):
            if command.key == "refuse":
                channel.failed(number, ConfigError("It is refused."))
            elif command.key == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            elif command.key == "fail and die":
                channel.failed(number, ConfigError("Last words."))
                os._exit(3)
            elif command.key == "offer":
                channel.offer("name", channel.name.encode)
                channel.offer("nothing", lambda: b"" + None)  # type: ignore[operator]
                channel.done(number)
            elif command.key == "ask":
                threading.Thread(target=ask, args=(number,)).start()
        elif isinstance(command, Stop):
            is_over.set()

    channel.start(act)
    is_over.wait()


if __name__ == "__main__":
    main()
