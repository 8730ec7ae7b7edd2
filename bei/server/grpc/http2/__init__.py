"""HTTP/2 as gRPC uses it (RFC 9113): one connection, its streams, and their messages."""
