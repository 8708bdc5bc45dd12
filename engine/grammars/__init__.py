"""What a grammar lets a sequence say next, in token ids."""
