"""Metrics, traces and what they are called."""
