"""Jobs over files: every row of the input gets its answer exactly once, whatever ends the process meanwhile."""
