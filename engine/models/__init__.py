"""Models over a paged KV cache: our own decoder if we know the structure, else transformers'."""
