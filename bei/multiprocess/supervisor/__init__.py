"""The supervisor: starts, watches, replaces, swaps and stops the other processes."""
