"""The model store: names, hub ids and files in, local directories that transformers loads out."""
