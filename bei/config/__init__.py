"""Settings of a server: names, defaults, sources (flags, environment, file), and the checks of their combinations."""
