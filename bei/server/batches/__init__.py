"""OpenAI's batches: files of requests, each line answered by the application itself, for a command and for clients."""
