"""Unix sockets, frames and messages between the processes."""
