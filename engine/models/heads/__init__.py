"""Heads that draft from the hidden states of a target: their formulas, and how they are read."""
