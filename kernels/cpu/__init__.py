"""Compiled layers that a CPU runs instead of kernels, if installing Outrider compiled them."""
