"""The HTTP front. Imports the service; nothing imports it but the CLI."""
