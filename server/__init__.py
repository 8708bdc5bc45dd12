"""The HTTP front end: text in, text out, in front of one engine process."""
