"""Reading a Hugging Face checkpoint: folder, config, sentence-transformers modules, heads, adapters."""
