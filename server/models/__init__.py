"""The model store: turns names, hub ids and files into local directories for transformers."""
