"""Kernels of the logit edits that requests ask for."""
