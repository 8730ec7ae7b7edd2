"""Servers, load, texts, rounds of measurements and records: what all benchmarks share."""
