"""Connections, keys, limits, routes and processes."""
