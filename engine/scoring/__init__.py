"""The target's part of a step: scores of every proposal, and which proposals stand."""
