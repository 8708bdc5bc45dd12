"""Models over a paged KV cache: our own decoder where we know the structure, else transformers'."""
