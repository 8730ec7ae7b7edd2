"""HTTP over uvicorn: listeners, connections, limits, compression, TLS, errors as responses."""
