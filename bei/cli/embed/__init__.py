"""``bei embed``."""
