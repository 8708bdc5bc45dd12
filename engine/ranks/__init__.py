"""A target, and perhaps its draft, on several GPUs: one process a rank, each with a share of every
layer.

Rank 0 is the engine's own process: it schedules, draws and verifies. The others follow: they run
phases of the models on the integers that rank 0 sends them (`followers.py`, `follower.py`). Within
a phase the ranks exchange tokens, and the parts of sums, on their devices (`group.py`).
"""
