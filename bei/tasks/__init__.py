"""Embedding, reranking, classification and token classification on top of a service. No HTTP."""
