"""One served model: loading, admission, submission to the engine, readiness. No HTTP."""
