"""Sockets, HTTP, clocks and metrics: everything of the router that touches the world."""
