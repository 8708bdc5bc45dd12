"""Turns a request's demands on the form of its answer into a grammar."""
