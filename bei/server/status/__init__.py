"""``/stats`` and metrics over all processes of a server."""
