"""Presents tallies to people (tables) and to programs (JSON)."""

from typing import Any

from rich.console import Console
from rich.table import Table

from .measure import OWN_CHOICE, PLAIN, Tallies, Tally

ALL = "all"


def by_category(tallies: Tallies) -> Tallies:
    """The tallies, and their sums over all categories."""
    out = dict(tallies)
    for (_, temperature, k), tally in tallies.items():
        out.setdefault((ALL, temperature, k), Tally()).add(tally)
    return out


def speed_up(tallies: Tallies, category: str, temperature: float, k: int | None) -> float:
    """Tokens a second, relative to plain decoding."""
    plain = tallies[category, temperature, PLAIN]
    return tallies[category, temperature, k].tokens_per_s / plain.tokens_per_s


def best_k(tallies: Tallies, category: str, temperature: float) -> int:
    fixed = [k for c, t, k in tallies if (c, t) == (category, temperature) and k is not None]
    return max(fixed, key=lambda k: speed_up(tallies, category, temperature, k))


def as_json(tallies: Tallies, description: dict[str, Any]) -> dict[str, Any]:
    """All measurements and what follows from them; k null means that the engine chose."""
    tallies = by_category(tallies)
    return description | {
        "results": [
            {
                "category": category,
                "temperature": temperature,
                "k": k,
                "tokens": tally.num_tokens,
                "steps": tally.num_steps,
                "seconds": round(tally.seconds, 4),
                "tokens_per_s": round(tally.tokens_per_s, 2),
                "tokens_per_step": round(tally.tokens_per_step, 3),
                "speed_up": round(speed_up(tallies, category, temperature, k), 3),
                "acceptance": None if tally.acceptance is None else round(tally.acceptance, 3),
                "acceptance_by_position": [round(a, 3) for a in tally.acceptance_by_position],
                "best_k": best_k(tallies, category, temperature),
            }
            for (category, temperature, k), tally in tallies.items()
        ]
    }


def print_tables(tallies: Tallies, title: str, console: Console) -> None:
    """For each temperature: the gain of each k by category, and how often drafts are right."""
    tallies = by_category(tallies)
    for temperature in dict.fromkeys(t for _, t, _ in tallies):
        categories = list(dict.fromkeys(c for c, t, _ in tallies if t == temperature))
        ks = list(dict.fromkeys(k for c, t, k in tallies if t == temperature))
        fixed = sorted(k for k in ks if k)
        columns = [*fixed, OWN_CHOICE] if OWN_CHOICE in ks else fixed
        speed = Table(title=f"{title}, temperature {temperature:g}: speed, of plain decoding's")
        speed.add_column("")
        speed.add_column("plain, tokens/s", justify="right")
        for k in columns:
            speed.add_column("own k" if k is OWN_CHOICE else f"k = {k}", justify="right")
        speed.add_column("best k", justify="right")
        drafts = Table(title=f"k = {fixed[-1]}: drafts")
        drafts.add_column("")
        drafts.add_column("accepted", justify="right")
        for position in range(1, fixed[-1] + 1):
            drafts.add_column(f"up to {position}", justify="right")
        drafts.add_column("tokens a step", justify="right")
        for category in categories:
            plain, most = (tallies[category, temperature, k] for k in (PLAIN, fixed[-1]))
            ups = [speed_up(tallies, category, temperature, k) for k in columns]
            speed.add_row(
                category,
                f"{plain.tokens_per_s:.1f}",
                *(f"{up:.2f}" for up in ups),
                str(best_k(tallies, category, temperature)),
            )
            # Looked-up drafts may go further than k.
            shares = [f"{a:.3f}" for a in most.acceptance_by_position[: fixed[-1]]]
            shares += [""] * (fixed[-1] - len(shares))
            drafts.add_row(
                category, f"{most.acceptance or 0:.3f}", *shares, f"{most.tokens_per_step:.2f}"
            )
        console.print(speed)
        console.print(drafts)
