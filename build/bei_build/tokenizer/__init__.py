"""The model library's tokenizer, the artifact's, and their comparison id by id."""
