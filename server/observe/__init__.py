"""The log, metrics and traces, and their names."""
