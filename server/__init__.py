"""The HTTP front end: text in, text out, over one engine process."""
