"""Helpers without knowledge of models: untrusted files, locks, threads, units, log format, HTML pages and charts."""
