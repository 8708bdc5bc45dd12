"""The target's part of a step: it scores the drafts and decides which to accept."""
