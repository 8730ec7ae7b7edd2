"""bei's own routes, one module each."""
