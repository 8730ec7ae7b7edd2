"""What ``bei build`` writes and ``bei serve`` reads: manifest, hashes, signature, certificate, cache."""
