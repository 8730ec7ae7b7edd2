"""How close an engine is to its reference, as a record, a page and thresholds."""
