"""Settings: their schema, and where their values come from."""
