"""Clients and servers of engine ports and engines that live in another process."""
