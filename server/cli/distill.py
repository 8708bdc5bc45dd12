"""`outrider distill`: make a draft for a target."""

import signal
from pathlib import Path
from typing import Annotated

import typer

from outrider.distill.recipe import DraftKind, Recipe

from .errors import errors_shown
from .progress import ProgressDisplay
from .signals import be_interrupted_by


def distill_command(
    target: Annotated[
        str,
        typer.Option(
            metavar="MODEL",
            help="The model to draft for: a hub id, a directory, a GGUF file or a built-in name.",
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            metavar="PATH", help="Directory to create for the draft; it must not exist yet."
        ),
    ],
    prompts: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|DATASET",
            help="User turns: a text file (one per line), a .jsonl file or a hub data set. Half "
            "are used whole; the target rewrites the others from their first words on. "
            "[default: it writes them all]",
        ),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="Directory that keeps the target's text for other drafts of this target.",
        ),
    ] = None,
    kind: Annotated[
        DraftKind,
        typer.Option(
            metavar="draft|eagle3|mtp|dflash",
            help="draft: a small model; eagle3: a head over the target's hidden states; mtp: the "
            "MTP head of a hybrid (Qwen3.5, Qwen3.6, Qwen3-Next), trained further; dflash: the "
            "DFlash, DFlash2 or DSpark head in --start, trained further.",
        ),
    ] = "draft",
    draft_vocab: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=0,
            help="How many of the most frequent tokens a head can draft; 0: as the target's size "
            "suggests.",
        ),
    ] = 0,
    size: Annotated[
        str, typer.Option(metavar="LAYERSxWIDTH", help="Shape of a new draft.")
    ] = "3x256",
    start: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Train this draft or head further, a directory or a hub id; its shape is kept.",
        ),
    ] = None,
    budget: Annotated[
        str,
        typer.Option(
            metavar="TIME|TOKENS",
            help="Total time (90s, 10m, 2h), or training tokens (500K, 50M, 1B).",
        ),
    ] = "10m",
    seed: Annotated[
        int, typer.Option(metavar="N", min=0, help="The same seed makes the same draft.")
    ] = 0,
    device: Annotated[
        str,
        typer.Option(
            metavar="DEVICE", help="auto | cpu | cuda | cuda:N; cuda uses every visible GPU."
        ),
    ] = "auto",
) -> None:
    """Train a small draft model, or a head, for a target.

    Run the same command again to resume.
    """
    # Only now: they bring in torch.
    from outrider.distill.run import distill

    from ..models.pair import resolve_device
    from ..models.resolve import resolve

    be_interrupted_by(signal.SIGTERM)
    try:
        with errors_shown(), ProgressDisplay() as display:
            recipe = Recipe.of(
                resolve_device(device),
                target=str(resolve(target, report=display)),
                out=str(out),
                kind=kind,
                draft_vocab=draft_vocab,
                text=str(text) if text else None,
                prompts=prompts,
                size=size,
                start=str(resolve(start, report=display)) if start else None,
                budget=budget,
                seed=seed,
            )
            held_out = distill(recipe, display)
    except KeyboardInterrupt:
        typer.echo("outrider: stopped; the same command goes on from here", err=True)
        raise typer.Exit(130) from None
    typer.echo(
        f"{out}: on held-out text its first choice is the target's {held_out.greedy_agreement:.1%} "
        f"of the time; a draft drawn at temperature 1 is accepted {held_out.sampled_acceptance:.1%}"
    )
