"""What a decoder computes: attention, products, norms, rotary positions."""
