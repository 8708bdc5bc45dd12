"""Make a draft for a target: the target writes text, a small model learns its distributions."""
