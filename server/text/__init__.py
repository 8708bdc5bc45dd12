"""Between text and token ids, and what text means in a chat."""
