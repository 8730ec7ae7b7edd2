"""Engines: one module or package for each target, opened by ``load.load_engine``; inputs and post-processing."""
