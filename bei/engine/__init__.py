"""Engines, one module or package a target, opened by ``load.load_engine``; and the packing of their inputs."""
