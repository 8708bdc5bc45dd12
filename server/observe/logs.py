"""The log: for a person, or as JSON."""

import logging

from rich.console import Console
from rich.logging import RichHandler

from outrider.engine.processes.log_lines import JSONFormatter, LineFormatter

PLAIN_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def configure_logging(level: str, log_format: str, console: Console) -> None:
    """Log to the console: as JSON, or with colour on a terminal, else in plain lines."""
    if log_format == "json":
        handler: logging.Handler = logging.StreamHandler(console.file)
        handler.setFormatter(JSONFormatter())
    elif console.is_terminal:
        handler = RichHandler(
            console=console, show_path=False, log_time_format="[%X]", omit_repeated_times=False
        )
        handler.setFormatter(LineFormatter("%(message)s"))
    else:
        handler = logging.StreamHandler(console.file)
        handler.setFormatter(LineFormatter(PLAIN_FORMAT))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.captureWarnings(True)  # warnings may quote what clients send
    logging.getLogger("outrider").setLevel(level.upper())
