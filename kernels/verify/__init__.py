"""Kernels that draw drafts and decide which of them stand."""
