"""``bei bench``: load for any server of embeddings, reranking or classification, and what became of it.

Knows no part of the server: it asks over HTTP as everybody does.
"""
