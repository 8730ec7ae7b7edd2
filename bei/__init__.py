"""bei: an embedding, reranking and classification server with engines compiled ahead of time."""

__version__ = "0.1.0"
