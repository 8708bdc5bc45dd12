"""What sequences leave on the device, and how far target and draft have come in it."""
