"""Settings of a server, their sources (flags, environment, file), and what cannot be combined."""
