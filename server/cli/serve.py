"""`outrider serve`: a model behind HTTP."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from ..config.server_settings import LogLevel
from .config import ConfigOption, DraftOption, ModelArgument, SetOption, chosen, settings_or_exit
from .errors import give_up

_models = partial(typer.Option, rich_help_panel="Models and speculation")
_http = partial(typer.Option, rich_help_panel="HTTP")
_engine = partial(typer.Option, rich_help_panel="Engine")

EXAMPLES = """\
Examples:

  outrider serve                                the default pair, on any machine

  outrider serve Qwen/Qwen3-8B                  a hub model, with its best known draft

  outrider serve ./my-model --draft ./my-draft  directories, or GGUF files

  outrider serve Qwen/Qwen3-8B --no-draft       plain decoding

  outrider serve qwen3-8b-eagle3                a bundled config, or PATH.toml
"""


def serve_command(
    model: ModelArgument = None,
    draft: DraftOption = None,
    k: Annotated[
        int | None,
        _models(
            "-k",
            "--num-speculative-tokens",
            metavar="N",
            help="Maximum draft tokens per request and step; fewer are used when that is faster. "
            "\\[default: what suits the draft]",
        ),
    ] = None,
    no_draft: Annotated[
        bool, _models("--no-draft", help="Decode plainly, without drafts.")
    ] = False,
    config: ConfigOption = None,
    assignments: SetOption = None,
    host: Annotated[str | None, _http(help="Address to listen on. \\[default: 127.0.0.1]")] = None,
    port: Annotated[
        int | None, _http(help="Port to listen on; 0 takes a free one. \\[default: 8000]")
    ] = None,
    uds: Annotated[
        Path | None, _http(metavar="PATH", help="Unix socket to listen on instead.")
    ] = None,
    root_path: Annotated[
        str | None,
        _http(
            metavar="/PATH", help="Path prefix under which a reverse proxy publishes this server."
        ),
    ] = None,
    max_logprobs: Annotated[
        int | None,
        _http(
            metavar="N",
            help="Maximum logprobs per token that a request may ask for. \\[default: 20]",
        ),
    ] = None,
    served_model_name: Annotated[
        list[str] | None,
        _http(
            metavar="NAME",
            help="Name by which clients ask for the model; repeatable: answers carry the first; "
            "'*' takes any name. "
            "\\[default: the model's own]",
        ),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        _http(
            help="Bearer key that clients must send; repeatable. It shows in the process list; "
            "with --api-key-file or OUTRIDER_SERVER__API_KEYS it does not."
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None, _http(help="File of bearer keys that clients must send, one per line.")
    ] = None,
    api_workers: Annotated[
        int | None, _http(metavar="N", help="Number of HTTP processes. \\[default: 1]")
    ] = None,
    shutdown_timeout: Annotated[
        float | None,
        _http(
            metavar="SECONDS",
            help="Time that running requests get to finish at shutdown. \\[default: 30]",
        ),
    ] = None,
    generation_config: Annotated[
        str | None,
        _engine(
            metavar="auto|outrider|PATH",
            help="Defaults of sampling parameters. auto: the model's generation_config.json; "
            "outrider: temperature 1 and no filters; PATH: a directory with such a file. "
            "\\[default: auto]",
        ),
    ] = None,
    gpu_memory_utilization: Annotated[
        float | None,
        _engine(
            metavar="FRACTION",
            help="Fraction of the GPU's memory that the engine may use. \\[default: 0.9]",
        ),
    ] = None,
    enforce_eager: Annotated[
        bool | None,
        _engine("--enforce-eager", help="Capture no CUDA graphs: starts sooner, decodes slower."),
    ] = None,
    log_level: Annotated[
        LogLevel | None, _engine(help="Lowest severity to log. \\[default: info]")
    ] = None,
) -> None:
    """Serve a model over HTTP, sped up by a draft, until Ctrl-C or SIGTERM.

    MODEL is a hub id, a directory, a GGUF file or a built-in name; without it,
    the default pair is served. Without --draft, the best known draft for the
    model is used; the server says which one, and why.
    """
    if no_draft and (draft is not None or k):
        give_up("--no-draft excludes --draft and -k", 2)
    flags: dict[str, object] = {
        "speculation.num_speculative_tokens": k,
        "server.host": host,
        "server.port": port,
        "server.uds": uds,
        "server.root_path": root_path,
        "server.max_logprobs": max_logprobs,
        "server.api_workers": api_workers,
        "server.served_model_name": served_model_name or None,
        "server.generation_config": generation_config,
        "server.api_keys": api_key or None,
        "server.api_key_file": api_key_file,
        "server.shutdown_timeout_s": shutdown_timeout,
        "engine.gpu_memory_utilization": gpu_memory_utilization,
        "engine.enforce_eager": enforce_eager,
        "server.log_level": log_level,
    }
    config, named = chosen(model, draft, config)
    if no_draft:
        flags["speculation.proposer"] = "none"
    settings = settings_or_exit(config, assignments, named | flags)
    if k and settings.speculation.proposer == "none":
        give_up(
            f"-k {k} needs a draft, and speculation.proposer is none: name one with --draft, or "
            "--set speculation.proposer=auto",
            2,
        )
    # Only now: it brings in the whole server, which the other commands need not wait for.
    from ..http.serving import serve

    raise typer.Exit(serve(settings))
