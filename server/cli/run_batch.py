"""`outrider run-batch`: answer a file of requests."""

import contextlib
import json
import os
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated

import typer

from .errors import errors_shown, unwritable
from .options import ConfigOption, DraftOption, ModelOrConfigArgument, SetOption, pair_settings
from .progress import ProgressDisplay
from .signals import run_until_ended

if TYPE_CHECKING:
    from ..config.settings import Settings


def run_batch_command(
    *,
    model: ModelOrConfigArgument = None,
    draft: DraftOption = None,
    input_file: Annotated[
        str,
        typer.Option(
            "--input", "-i", metavar="PATH", help="File of requests, one per line; - reads stdin."
        ),
    ],
    output_file: Annotated[
        str,
        typer.Option(
            "--output", "-o", metavar="PATH", help="File for the answers; - writes to stdout."
        ),
    ],
    config: ConfigOption = None,
    assignments: SetOption = None,
) -> None:
    """Answer a file of requests in OpenAI's batch format, and exit.

    Each line of the output has the custom_id of its request; lines come in
    the order in which answers finish. If the engine dies, it is started again
    and requests wait for it. The exit status is 1 if it cannot start, or if
    all requests failed.
    """
    settings = pair_settings(model, draft, config, assignments)
    with errors_shown(), _opened("--input", input_file) as given:
        _check_output(output_file, given)
        num_done, num_failed = run_until_ended(_run(settings, given, output_file))
    typer.echo(f"{num_done} requests, {num_failed} of them failed", err=True)
    if num_done and num_failed == num_done:
        raise typer.Exit(1)


def _opened(flag: str, name: str) -> IO[bytes]:
    number, mode = (0, "rb") if flag == "--input" else (1, "wb")
    try:
        # Not sys.stdin: a thread that still reads it would keep Python from ending.
        return open(number if name == "-" else name, mode, closefd=name != "-")
    except OSError as error:
        raise OSError(f"{flag} {name}: {error.strerror}") from None


def _check_output(name: str, given: IO[bytes]) -> None:
    """Check before minutes of loading. The file is opened, and so emptied, only after them."""
    path = Path(name)
    if name != "-" and (why := unwritable(path)):
        raise OSError(f"--output {name}: {why}")
    if path.is_file() and os.path.samestat(path.stat(), os.fstat(given.fileno())):
        raise OSError(f"--output {name}: the same file as --input; name another")


async def _run(settings: "Settings", given: IO[bytes], output: str) -> tuple[int, int]:
    """Returns how many requests there were, and how many of them failed."""
    from outrider.engine.processes.process_engine import ProcessEngine

    from ..http.batch import answer_lines
    from ..http.http_server import load_app
    from ..http.middleware import Gate
    from ..models.prepare import prepare

    # There are no other clients, so no keys are needed.
    open_to_us = settings.server.model_copy(
        update={
            "api_keys": (),
            "api_key_file": None,
            "priority_api_keys": (),
            "priority_api_key_file": None,
            "allowed_hosts": ("*",),
        }
    )
    settings = settings.model_copy(update={"server": open_to_us})
    num_done = num_failed = 0
    with ProgressDisplay() as display:
        prepared = await prepare(settings, display)
        step_timeout_s = settings.engine.step_timeout_s
        engine = ProcessEngine(prepared.engine, display, step_timeout_s=step_timeout_s)
        try:
            info = await engine.start()
            app = await load_app(prepared, engine, Gate())
            # What is under way must end before the engine, whose stop it would take for a failure.
            lines = answer_lines(app, engine, given, max_at_once=info.max_num_seqs)
            async with contextlib.aclosing(lines):
                with _opened("--output", output) as answers:
                    async for line in lines:
                        answers.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
                        answers.flush()
                        num_done += 1
                        is_good = line["error"] is None and line["response"]["status_code"] == 200
                        num_failed += not is_good
        finally:
            await engine.stop()
    return num_done, num_failed
