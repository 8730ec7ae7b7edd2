"""Files, locks, threads, units, log format and HTML; knows nothing of models."""
