"""What is recorded of a request: access log, ``Server-Timing``, traces."""
