"""The control socket between the supervisor and each of its processes."""
