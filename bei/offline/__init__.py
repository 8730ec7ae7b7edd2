"""``bei.Model``: a model in the caller's own process, without a server (docs/python.md)."""
