"""What a pair is worth on this machine: acceptance, and speed against plain decoding."""
