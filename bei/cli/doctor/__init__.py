"""``bei doctor``: what this machine can build and serve, and what it lacks."""
