"""What a request's parameters change about its logits."""
