"""What ``bei build`` writes and ``bei serve`` reads: manifest, files and their hashes, signature, cache of built artifacts."""
