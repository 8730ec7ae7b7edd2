"""Text to token ids: encoder, thread pool, prompts, truncation."""
