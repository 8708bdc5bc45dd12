"""`outrider bench`: what the drafts of a running server are worth under load."""

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ..evaluation.remote import DEFAULT_URL, RemoteError, find
from .errors import check_file, give_up
from .options import ApiKeyOption, ModelOption, UrlArgument, finite
from .progress import ProgressDisplay
from .signals import run_until_ended

if TYPE_CHECKING:
    from ..evaluation.load import LoadResult


def bench_command(
    url: UrlArgument = DEFAULT_URL,
    concurrency: Annotated[
        list[int] | None,
        typer.Option(
            "-c",
            "--concurrency",
            metavar="N",
            min=1,
            help="Concurrent requests; repeatable. [default: 1, 8]",
        ),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Requests per round. [default: twice the concurrency, at least 4]",
        ),
    ] = None,
    rounds: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=1,
            help="Measured rounds, alternating with and without drafts, after one warm-up round.",
        ),
    ] = 2,
    max_tokens: Annotated[int, typer.Option(metavar="N", min=2, help="Tokens per answer.")] = 96,
    temperature: Annotated[
        float, typer.Option(metavar="NUMBER", parser=finite, help="Sampling temperature.")
    ] = 0.0,
    k: Annotated[
        int | None,
        typer.Option("-k", metavar="N", min=1, help="Draft tokens per step. [default: adaptive]"),
    ] = None,
    model: ModelOption = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="PATH", help="Write the measurements to this file."),
    ] = None,
    api_key: ApiKeyOption = None,
) -> None:
    """Measure the speed of a running server under load, with drafts and without."""
    check_file(json_file)
    from ..evaluation.load import measure_load  # brings in the engine's part of the package

    try:
        remote = find(url, api_key, model)
        loads = {}
        with ProgressDisplay() as display:
            for at_once in concurrency or [1, 8]:
                loads[at_once] = run_until_ended(
                    measure_load(
                        remote,
                        concurrency=at_once,
                        rounds=rounds,
                        requests_per_round=requests or max(4, 2 * at_once),
                        max_tokens=max_tokens,
                        temperature=temperature,
                        k=k,
                        counted=partial(display, f"{at_once} at once"),
                    )
                )
    except RemoteError as error:
        give_up(error, 1)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    rows = [_row(at_once, *pair) for at_once, pair in loads.items()]
    Console(highlight=False).print(_table(rows, f"{remote.model} at {remote.url}"))
    if not any(drafted.num_drafts for _, drafted in loads.values()):
        typer.echo(
            "The server drafted nothing: it has no draft, or drafting did not pay at this load, or "
            "it is not an Outrider server. -k 4 makes it draft, whatever that costs."
        )
    if json_file:
        about = {"url": remote.url, "model": remote.model, "temperature": temperature}
        json_file.write_text(json.dumps(about | {"loads": rows}, indent=2) + "\n")


def _row(at_once: int, plain: "LoadResult", drafted: "LoadResult") -> dict[str, Any]:
    from ..evaluation.load import percentile

    def of(load: "LoadResult") -> dict[str, float]:
        return {
            "num_requests": len(load.first_token_s),
            "tokens_per_s": load.tokens_per_s,
            "first_token_s_p50": percentile(load.first_token_s, 0.5),
            "first_token_s_p99": percentile(load.first_token_s, 0.99),
            "token_s_p50": percentile(load.token_s, 0.5),
            "token_s_p99": percentile(load.token_s, 0.99),
        }

    return {
        "concurrency": at_once,
        "speedup": drafted.tokens_per_s / plain.tokens_per_s,
        "acceptance": drafted.acceptance,
        "plain": of(plain),
        "drafted": of(drafted),
    }


def _table(rows: list[dict[str, Any]], title: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name in (
        "at once",
        "tokens/s plain",
        "with drafts",
        "times",
        "first token plain",
        "with drafts",
        "later token plain",
        "with drafts",
        "accepted",
    ):
        # As narrow as its words, so that the table fits a terminal of 80 columns.
        table.add_column(name.replace(" ", "\n"), justify="right", no_wrap=True)
    for row in rows:
        plain, drafted = row["plain"], row["drafted"]
        table.add_row(
            str(row["concurrency"]),
            f"{plain['tokens_per_s']:.1f}",
            f"{drafted['tokens_per_s']:.1f}",
            f"{row['speedup']:.2f}",
            *(f"{each['first_token_s_p50'] * 1e3:.0f} ms" for each in (plain, drafted)),
            *(f"{each['token_s_p50'] * 1e3:.1f} ms" for each in (plain, drafted)),
            "-" if row["acceptance"] is None else f"{row['acceptance']:.0%}",
        )
    return table
