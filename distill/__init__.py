"""Makes a draft for a target: the target writes text, and a small model learns from it."""
