"""Prometheus metrics: names, counters, histograms, gauges of the engine, and sums over processes."""
