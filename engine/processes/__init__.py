"""Runs the engine in a process of its own, and lets other processes talk to it."""
