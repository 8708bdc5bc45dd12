"""Kernels that draw drafts and decide which to accept."""
