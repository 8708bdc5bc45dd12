"""Who runs in a step, over which pages, and with how many drafts."""
