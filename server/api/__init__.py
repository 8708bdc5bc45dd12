"""The OpenAI-compatible API: requests in, answers out."""
