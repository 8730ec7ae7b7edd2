"""One server in several processes: a supervisor, front ends, a batch manager, engines (docs/multiprocess.md)."""
