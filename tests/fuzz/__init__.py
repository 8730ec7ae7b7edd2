"""Fuzzing of all that reads what somebody else wrote: requests, artifacts, settings and keys, checkpoints."""
