"""Input files as numbered rows."""
