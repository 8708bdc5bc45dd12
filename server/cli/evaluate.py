"""`outrider evaluate`: what a pair is worth on this machine."""

import json
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from .errors import check_file, errors_shown, give_up
from .options import (
    ConfigOption,
    DraftOption,
    ModelOrConfigArgument,
    SetOption,
    finite,
    pair_settings,
)
from .progress import ProgressDisplay
from .signals import be_interrupted_by, run_until_ended

if TYPE_CHECKING:
    from outrider.engine.api import EngineInfo

    from ..evaluation.exactness import Exactness
    from ..evaluation.measure import Tallies
    from ..text.tokenizer import Tokenizer


def evaluate_command(
    model: ModelOrConfigArgument = None,
    draft: DraftOption = None,
    config: ConfigOption = None,
    temperature: Annotated[
        list[float] | None,
        typer.Option(
            metavar="NUMBER", parser=finite, help="Temperature; repeatable. [default: 0, 0.8]"
        ),
    ] = None,
    k: Annotated[
        list[int] | None,
        typer.Option(
            "-k",
            metavar="N",
            min=1,
            help="Draft tokens per step; repeatable. [default: 1, 2, 4, …]",
        ),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(metavar="N", min=2, help="Maximum tokens per answer.")
    ] = 96,
    prompts_per_category: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Use this many prompts of each kind. [default: all]"),
    ] = None,
    category: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A kind of prompts; repeatable. [default: all]"),
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="PATH", help="Write all measurements to this file."),
    ] = None,
    check_exact: Annotated[
        bool,
        typer.Option(
            "--check-exact",
            help="Instead of measuring, check that greedy and seeded answers are the same to the "
            "bit with every k, alone and all together. Print the first difference and exit with "
            "status 1 if there is one.",
        ),
    ] = False,
    assignments: SetOption = None,
) -> None:
    """Measure how many drafts are accepted, and the speed compared with plain decoding."""
    settings = pair_settings(model, draft, config, assignments)
    speculation = settings.speculation
    if speculation.proposer == ("none",) or speculation.num_speculative_tokens == 0:
        give_up(
            "there is nothing to evaluate: speculation.proposer is none, or num_speculative_tokens "
            "is 0",
            2,
        )
    if check_exact and json_file:
        give_up("--check-exact measures nothing: leave out --json", 2)
    check_file(json_file)
    from outrider.engine.processes.process_engine import ProcessEngine

    from ..evaluation import exactness, measure, report
    from ..models.pair import engine_config, prepare_pair, resolve_device
    from ..text.tokenizer import Tokenizer

    conversations = measure.held_out_prompts()
    if unknown := set(category or []) - set(conversations):
        give_up(f"--category {min(unknown)}: give one of {', '.join(conversations)}", 2)
    be_interrupted_by(signal.SIGTERM)
    with errors_shown():
        resolve_device(settings.target.device)  # reports a missing GPU before any fetching
        with ProgressDisplay() as display:
            pair = prepare_pair(settings, display)
            settings = pair.settings
            most = settings.speculation.num_speculative_tokens or 0
            _check_ks(k, most)  # only now: the draft may have brought its own k
            # k is of a model's drafts; looked-up ones have their own number.
            fixed = k or (_powers_up_to(most) if pair.draft else [most])
            ks: list[int | None] = [measure.PLAIN, *sorted(set(fixed))]
            if settings.speculation.adaptive:
                ks.append(measure.OWN_CHOICE)
            tokenizer = Tokenizer(pair.tokenizer)
            prompts = {
                name: [
                    _encode(tokenizer, turns, is_raw=name == measure.RAW)
                    for turns in of_name[:prompts_per_category]
                ]
                for name, of_name in conversations.items()
                if not category or name in category
            }
            wanted = engine_config(pair)
            cache = replace(wanted.cache, kv_events_endpoint=None)  # a server may have it
            if not check_exact:  # so that every repetition of a prompt computes the same
                cache = replace(cache, prefix_caching=False, host_gib=0)
            wanted = replace(wanted, cache=cache)
            step_timeout_s = settings.engine.step_timeout_s
            engine = ProcessEngine(wanted, display, step_timeout_s=step_timeout_s)
            asked = temperature or [0.0, 0.8], ks, max_tokens

            async def evaluated() -> "tuple[EngineInfo, Exactness | Tallies]":
                try:
                    info = await engine.start()
                    fit = measure.that_fit(prompts, info.max_model_len)
                    if check_exact:
                        found = exactness.check(engine, fit, *asked, partial(display, "checking"))
                        return info, await found
                    counted = partial(display, "measuring")
                    return info, await measure.measure(engine, fit, *asked, counted)
                finally:
                    await engine.stop()

            info, found = run_until_ended(evaluated())
    fit = measure.that_fit(prompts, info.max_model_len)
    if num_left_out := sum(map(len, prompts.values())) - sum(map(len, fit.values())):
        typer.echo(
            f"{num_left_out} prompts were left out: the context holds {info.max_model_len} tokens"
        )
    if isinstance(found, exactness.Exactness):
        typer.echo(exactness.describe(found, tokenizer.token_text))
        raise typer.Exit(1 if found.differences else 0)
    draft = settings.draft.model if pair.draft else None
    title = f"{settings.target.model} + {draft or ', '.join(settings.speculation.proposer)}"
    report.print_tables(found, title, Console())
    if json_file:
        description = {
            "target": settings.target.model,
            "draft": draft,
            "proposer": info.proposer,
            "device": info.device,
            "dtype": info.target_dtype,
            "max_tokens": max_tokens,
            "prompts_left_out": num_left_out,
        }
        json_file.write_text(json.dumps(report.as_json(found, description), indent=2) + "\n")


def _check_ks(ks: list[int] | None, most: int) -> None:
    if ks and max(ks) > most:
        raise ValueError(
            f"-k {max(ks)} is more than speculation.num_speculative_tokens, which is {most} for "
            "this draft; set it with --set"
        )


def _powers_up_to(most: int) -> list[int]:
    """1, 2, 4, … and `most` itself."""
    return [*(2**i for i in range(most.bit_length()) if 2**i < most), most]


def _encode(tokenizer: "Tokenizer", turns: list[str], *, is_raw: bool) -> list[int]:
    """The prompt of the model's next turn; the texts alone if raw, or without a chat template."""
    from ..evaluation.measure import as_messages

    if is_raw or tokenizer.chat_template is None:
        return tokenizer.encode("\n\n".join(turns), add_special_tokens=True)
    rendered = tokenizer.chat_template.render(
        as_messages(turns),
        tools=[],
        add_generation_prompt=True,
        continue_final_message=False,
        variables={},
    )
    return tokenizer.encode(rendered, add_special_tokens=False)
