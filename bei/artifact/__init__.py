"""Built artifacts on disk: manifest, validation, hashes, signature, certificate, and the cache of ``bei serve``."""
