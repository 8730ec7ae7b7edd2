"""Memory that the processes of a server share: limits, rows of engines, the crash journal."""
