"""`python -m outrider.server`: the `outrider` command."""

from .cli import app

app()
