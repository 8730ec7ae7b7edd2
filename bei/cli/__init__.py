"""The ``bei`` commands."""
