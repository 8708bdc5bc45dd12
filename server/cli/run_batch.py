"""`outrider run-batch`: answer a file of requests."""

import asyncio
import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated

import typer

from .config import ConfigOption, DraftOption, ModelArgument, SetOption, chosen, settings_or_exit
from .errors import errors_told
from .progress import ProgressDisplay

if TYPE_CHECKING:
    from ..config.settings import Settings


def run_batch_command(
    *,
    model: ModelArgument = None,
    draft: DraftOption = None,
    input_file: Annotated[
        str, typer.Option("--input", "-i", help="File of requests, one per line; - reads stdin.")
    ],
    output_file: Annotated[
        str, typer.Option("--output", "-o", help="File for the answers; - writes to stdout.")
    ],
    config: ConfigOption = None,
    assignments: SetOption = None,
) -> None:
    """Answer a file of requests in OpenAI's batch format, and exit.

    Each line of the output has the custom_id of its request; lines come in
    the order in which answers finish.
    """
    config, named = chosen(model, draft, config)
    settings = settings_or_exit(config, assignments, named)
    with errors_told(), _opened(input_file, "r") as given, _opened(output_file, "w") as answers:
        num_done, num_failed = asyncio.run(_run(settings, given, answers))
    typer.echo(f"{num_done} requests, {num_failed} of them failed", err=True)


@contextlib.contextmanager
def _opened(name: str, mode: str) -> Iterator[IO[str]]:
    if name == "-":
        yield sys.stdin if mode == "r" else sys.stdout
        return
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(Path(name).open(mode, encoding="utf-8"))
        except OSError as error:
            flag = "--input" if mode == "r" else "--output"
            raise OSError(f"{flag} {name}: {error.strerror}") from None
        yield file


async def _run(settings: "Settings", given: IO[str], answers: IO[str]) -> tuple[int, int]:
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
    with ProgressDisplay() as progress:
        prepared = await prepare(settings, progress)
        engine = ProcessEngine(prepared.engine, progress)
        try:
            await engine.start()
            app = await load_app(prepared, engine, Gate())
            at_once = prepared.settings.scheduler.max_num_seqs
            async for line in answer_lines(app, given, max_at_once=at_once):
                answers.write(json.dumps(line, ensure_ascii=False) + "\n")
                answers.flush()
                num_done += 1
                num_failed += line["error"] is not None or line["response"]["status_code"] != 200
        finally:
            await engine.stop()
    return num_done, num_failed
