"""Reading files of unknown origin: JSON settings, size limits, a sandbox process, formats that are refused."""
