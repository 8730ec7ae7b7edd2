"""``bei bench``: a load generator for any embedding, reranking or classification server. Knows nothing of bei's own."""
