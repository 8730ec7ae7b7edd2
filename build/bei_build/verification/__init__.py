"""Verification of a build: the engine against its reference."""
