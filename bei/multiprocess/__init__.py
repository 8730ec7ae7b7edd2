"""One server in several processes: a supervisor, front ends, a batch manager, engines (docs/multiprocess.md)."""

import signal

# The supervisor's children ignore these: it knows in which order to end.
IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
