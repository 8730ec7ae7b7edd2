"""The server process: event loop, signals, reload, hot swap, drain."""
