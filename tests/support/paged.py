"""Logits of a network, step by step, against Hugging Face's eager attention."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tiny_models import DEVICE, VOCAB
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM

from outrider.engine.models.network import Network
from outrider.engine.models.one_prompt import PAGE as PROMPT_PAGE
from outrider.engine.models.one_prompt import num_pages_of, one_prompt
from outrider.engine.state.batch import HostBatch
from outrider.engine.state.slots import Slots

PAGE = 4
PROMPT = (torch.arange(40, device=DEVICE) * 7) % VOCAB


@torch.inference_mode()
def run_prompt(network: Network, input_ids: torch.Tensor = PROMPT) -> Any:
    """A pass over a prompt, in pages of NaN; every row gets logits."""
    network.bind_cache(num_pages_of(len(input_ids)), PROMPT_PAGE)
    for attention in network.attentions:
        for pages in attention.bound_pages:
            pages.fill_(torch.nan)
    return network(one_prompt(input_ids))


@torch.inference_mode()
def eager_logits(
    path: Path,
    inputs: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
    *,
    of_experts: bool = False,
) -> torch.Tensor:
    """Logits of PROMPT as transformers has them, with `inputs` of each linear layer; of those of
    experts as well if `of_experts`.
    """
    model = AutoModelForCausalLM.from_pretrained(
        path, attn_implementation="eager", experts_implementation="eager"
    ).to(DEVICE)
    for name, module in model.named_modules():
        if name.endswith("_proj"):
            module.register_forward_pre_hook(lambda _, args: (inputs(args[0]),))
    stacked = {each.untyped_storage().data_ptr() for each in model.parameters() if each.ndim == 3}
    with _LinearInputs(stacked, inputs) if of_experts else nullcontext():
        logits: torch.Tensor = model(PROMPT[None]).logits[0]
    return logits


class _LinearInputs(TorchFunctionMode):
    """Changes the inputs of linear functions whose weights lie in these memories."""

    def __init__(self, memories: set[int], change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._memories, self._change = memories, change

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear and args[1].untyped_storage().data_ptr() in self._memories:
            args = self._change(args[0]), *args[1:]
        return func(*args, **(kwargs or {}))


@torch.inference_mode()
def paged_logits(
    model: Network, sequences: list[list[int]], steps: list[list[tuple[int, int]]], graphs: bool
) -> list[torch.Tensor]:
    """Run the steps, each a (start, length) range per sequence; all rows' logits of each step."""
    slots = Slots(len(sequences), 128, 8, PAGE, DEVICE, model.vocab_size)
    model.bind_slots(slots)
    if graphs:
        model.capture(5, 2048, True, lambda done, total: None)
    # Pages are dealt out of order, so that a wrong block table cannot go unnoticed.
    pages = torch.randperm(127, generator=torch.Generator().manual_seed(0)).int() + 1
    for i, token_ids in enumerate(sequences):
        slots.token_ids[i, : len(token_ids)] = torch.tensor(token_ids, dtype=torch.int32)
        slots.block_tables[0, i, :32] = pages[i * 32 : (i + 1) * 32]
    logits = []
    for s, step in enumerate(steps):
        rows = np.array([i for i, (_, length) in enumerate(step) if length])
        lens = np.array([step[i][1] for i in rows])
        # Known are the rows behind which the next step goes on; if it goes back, the first one.
        known = [_num_known(i, *step[i], steps[s + 1 :]) for i in rows]
        slots.num_tokens[torch.from_numpy(rows)] = torch.tensor(known, device=DEVICE)
        starts = np.array([step[i][0] for i in rows]) - known
        # A copy: the next graph's output may lie in the same place.
        logits.append(model.forward(HostBatch.build(rows, starts, lens, lens)).logits.clone())
    return logits


def _num_known(i: int, start: int, length: int, later: list[list[tuple[int, int]]]) -> int:
    end = start + length
    following = next((step[i][0] for step in later if step[i][1]), end)
    return end if following == end else start + 1


# Relative error of all logits of a step; below it for float32, every single logit is close.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.03}
# Of the median row, if there are experts: rounded, a router may choose others for a row, and the
# rows after it read its keys, values and states. Medians were up to 0.06.
TOLERANCE_OF_ROUTED = {torch.float32: 1e-4, torch.bfloat16: 0.1}


def check_against_eager(model: Network, path: Path, *, graphs: bool = False) -> None:
    """Ragged steps of every kind over three sequences of the model of `path`; with `graphs`, the
    steps of few rows are replayed.
    """
    # The weights as they are rounded, the arithmetic exact: what differs is the model's own error.
    eager = AutoModelForCausalLM.from_pretrained(
        path, attn_implementation="eager", dtype=model.dtype
    )
    eager.float().eval()
    model.bind_cache(num_pages=128, page_size=PAGE)
    generator = torch.Generator().manual_seed(1)
    sequences = [
        torch.randint(0, VOCAB, (length,), generator=generator).tolist() for length in (45, 19, 9)
    ]
    # Chunked prefill beside a whole one, decode beside prefill, a verification of 5 rows, and a
    # second pass over the same positions, as after a rejection.
    steps = [
        [(0, 20), (0, 7), (0, 0)],
        [(20, 17), (7, 1), (0, 5)],
        [(37, 1), (8, 5), (5, 4)],
        [(38, 5), (10, 4), (0, 0)],
        [(40, 5), (14, 5), (8, 1)],
    ]
    got = paged_logits(model, sequences, steps, graphs)
    is_routed = hasattr(eager.config, "num_experts_per_tok")  # how many there are has many names
    with torch.inference_mode():
        truth = [eager(torch.tensor([ids])).logits[0] for ids in sequences]
    for step, logits in zip(steps, got, strict=True):
        expected = torch.cat(
            [truth[i][start : start + length] for i, (start, length) in enumerate(step)]
        )
        logits = logits.float().cpu()
        error = (logits - expected).norm(dim=-1) / expected.norm(dim=-1)
        if is_routed:
            assert error.median() < TOLERANCE_OF_ROUTED[model.dtype], error
        else:
            assert error.square().mean().sqrt() < TOLERANCE[model.dtype], error
        if model.dtype == torch.float32:
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
