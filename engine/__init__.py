"""The speculative decoding engine: token ids in, token ids out. No text, no HTTP."""
