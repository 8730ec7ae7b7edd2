"""The signals that the supervisor's children ignore: it knows in which order to end."""

import signal

IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
