"""What lives on a device between steps, and how a step reaches it."""
