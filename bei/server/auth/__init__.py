"""API keys, their rate limits, and a request's lane and deadline."""
