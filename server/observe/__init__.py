"""Metrics and traces, and their names."""
