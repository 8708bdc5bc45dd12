"""Grammars: which tokens a sequence may emit next."""
