"""``bei bench``: a load generator for embedding, reranking and classification servers. Independent of bei's server."""
