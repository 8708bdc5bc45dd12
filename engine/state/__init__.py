"""The state that stays on the device between steps, and how a step reaches it."""
