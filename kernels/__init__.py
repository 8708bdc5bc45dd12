"""Triton kernels of speculative verification, each with its plain-torch reference. Tensors only."""
