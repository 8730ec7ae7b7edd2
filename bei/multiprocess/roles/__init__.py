"""What each process runs: front end, batch manager, engine."""
