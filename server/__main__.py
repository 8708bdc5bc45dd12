"""`python -m outrider.server`: the `outrider` command."""

from outrider.server.cli import app

app()
