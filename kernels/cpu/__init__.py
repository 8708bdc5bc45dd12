"""What a CPU runs in place of the kernels, if it was compiled when Outrider was installed."""
