"""Turns text into token ids and back, and takes the text of chats apart."""
