"""What a person sees while the server runs: the start-up summary, the status line."""

import asyncio
import logging
import time

from rich.console import Console
from rich.table import Table

from outrider.engine.api import EngineInfo, EngineStats
from outrider.engine.processes.client import EngineClient

from ..config.settings import Settings
from ..text.message_format import MessageFormat

log = logging.getLogger("outrider.server")


def show_summary(
    settings: Settings, info: EngineInfo, form: MessageFormat, url: str, console: Console
) -> None:
    """Show what was loaded: as a table on a terminal, otherwise as log lines."""
    rows = _summary(settings, info, form, url)
    if not console.is_terminal:
        for name, value in rows:
            log.info("%s: %s", name, value)
        return
    table = Table(box=None, show_header=False, padding=(0, 2))
    for name, value in rows:
        table.add_row(f"[bold]{name}[/]", value)
    console.print(table)


def _summary(
    settings: Settings, info: EngineInfo, form: MessageFormat, url: str
) -> list[tuple[str, str]]:
    k = info.num_speculative_tokens
    if info.proposer is None or k == 0:
        draft = "none: the target decodes plainly"
    elif info.draft_dtype is None:
        draft = "none: drafts need no model"
    else:
        is_named = info.proposer in ("draft_model", settings.draft.model)
        kind = "" if is_named else f"{info.proposer}, "
        draft = f"{settings.draft.model} ({kind}{info.draft_dtype}), k = {k}"
        if info.share_of_text is not None:
            draft += f", another tokenizer with {info.share_of_text:.0%} of text in common"
    sources = [("sources of drafts", ", ".join(info.sources))] if info.sources else []
    loaded = f"{info.load_s:.1f} s"
    if info.device != "cpu":
        loaded += f", of which {info.warm_up_s:.1f} s to warm up"
    cache_gib, num_tokens = info.cache_bytes / 2**30, info.num_pages * info.page_size_tokens
    notes = ", used as needed" if info.device == "cpu" else ""
    if saved_bytes := info.saved_by_windows_bytes:
        notes += f"; sliding windows save {saved_bytes / 2**30:.1f} GiB"
    states = []
    if info.state_bytes:
        of_each = info.state_bytes / info.num_states / 2**20
        text = f"{info.state_bytes / 2**30:.1f} GiB, {of_each:.1f} MiB a sequence or prefix"
        states = [("states", text)]
    host = []
    if info.host_bytes:
        num_kept, host_gib = info.host_pages * info.page_size_tokens, info.host_bytes / 2**30
        host = [("in host memory", f"up to {num_kept:,} more cached tokens ({host_gib:.1f} GiB)")]
    page = [("page", f"{url}/ui")] if settings.server.ui else []
    shared = ""
    if info.tensor_parallel > 1:
        kind = "processes" if info.device == "cpu" else "GPUs"
        what = "target and draft" if info.draft_tensor_parallel > 1 else "the target"
        shared = f", {info.tensor_parallel} {kind} share {what}"
    return [
        ("target", f"{settings.target.model} ({info.target_dtype})"),
        ("draft", draft),
        *sources,
        ("device", f"{info.device}{shared}"),
        ("reproducible", "yes" if info.batch_invariant else "no: rounding depends on the batch"),
        ("KV cache", f"up to {num_tokens:,} tokens ({cache_gib:.1f} GiB{notes})"),
        *host,
        *states,
        ("context", f"{info.max_model_len} tokens, {info.max_num_seqs} sequences at once"),
        ("tool calls", form.name),
        ("reasoning", "separated from content" if form.has_reasoning else "none"),
        ("loaded in", loaded),
        ("serving", f"{', '.join(settings.served_model_names)} at {url}/v1"),
        *page,
    ]


async def report_status(client: EngineClient, interval_s: float) -> None:
    """Log the status every few seconds while requests are running."""
    before, before_s = client.stats, time.perf_counter()
    while True:
        await asyncio.sleep(interval_s)
        now, now_s = client.stats, time.perf_counter()
        if now.num_running or now.num_waiting or now.steps != before.steps:
            log.info("%s", status_line(before, now, now_s - before_s))
        before, before_s = now, now_s


def status_line(before: EngineStats, now: EngineStats, elapsed_s: float) -> str:
    """The present gauges, and how much the counters have grown since `before`."""
    generated = (now.generation_tokens - before.generation_tokens) / elapsed_s
    prompt = (now.prompt_tokens - before.prompt_tokens) / elapsed_s
    drafted = sum(now.drafted_per_position) - sum(before.drafted_per_position)
    accepted = sum(now.accepted_per_position) - sum(before.accepted_per_position)
    parts = [f"{now.num_running} running, {now.num_waiting} waiting", f"{generated:.1f} tokens/s"]
    if prompt:
        parts.append(f"{prompt:.1f} prompt tokens/s")
    if drafted:
        parts.append(f"{accepted / drafted:.0%} accepted")
    if now.pages_total:  # there are none while no engine runs
        parts.append(f"{now.pages_used}/{now.pages_total} pages")
    return " | ".join(parts)
