"""The kinds of layers' parts, one file each; see `base.py`."""
