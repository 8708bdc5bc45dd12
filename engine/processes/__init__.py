"""The engine in a process of its own, and how others talk to it."""
