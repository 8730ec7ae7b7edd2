"""Compares an engine's answers with a reference's, in figures."""
