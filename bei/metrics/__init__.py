"""Prometheus metrics: names, counters, histograms, gauges, request timing, the last minute, sums over processes."""
