"""Inputs of verification, and its roads: Triton kernels, torch references, compiled for a CPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import Any, NamedTuple

import torch

from outrider.kernels._dispatch import INTERPRET
from outrider.kernels.cpu import layers
from outrider.kernels.edits import bad_words, bitmask, edited_rows, penalties, thinking, token_bias
from outrider.kernels.verify import logprobs as logprobs_module
from outrider.kernels.verify import verify as verify_module
from outrider.kernels.verify.sampling import STATE_WIDTH, Rule, Sampling
from outrider.kernels.verify.step import SlotContents

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HAS_KERNELS = INTERPRET or DEVICE.type == "cuda"
ROADS = ["reference", "kernel"] if HAS_KERNELS else ["reference"]
DRAWING_ROADS = [*ROADS, "compiled"] if DEVICE.type == "cpu" and layers.compiled() else ROADS
MARGIN = 84  # steps of 2**-23: 1e-5, wider than float32 can err


@contextmanager
def on_road(road: str) -> Iterator[None]:
    """Run on the kernels, on the references or on what was compiled, whatever the device."""
    modules = (
        verify_module,
        layers,
        logprobs_module,
        bad_words,
        bitmask,
        edited_rows,
        penalties,
        thinking,
        token_bias,
    )
    saved = [module.uses_triton for module in modules]
    reads = layers.reads
    for module in modules:
        module.uses_triton = lambda tensor: road == "kernel"
    layers.reads = lambda logits: road == "compiled" and reads(logits)
    try:
        yield
    finally:
        layers.reads = reads
        for module, dispatch in zip(modules, saved, strict=True):
            module.uses_triton = dispatch


def make_sampling(
    batch: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    rule: Rule = Rule.TOKEN,
    seed: int = 0,
) -> Sampling:
    """The same parameters for every request, a seed of its own for each."""

    def full(value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((batch,), value, dtype=dtype, device=DEVICE)

    return Sampling(
        full(temperature, torch.float32),
        full(top_k, torch.int32),
        full(top_p, torch.float32),
        full(min_p, torch.float32),
        (torch.arange(batch, device=DEVICE) + seed) * 0x9E3779B97F4A7C1 + seed,
        full(int(rule), torch.int32),
    )


def mixed_sampling(batch: int, seed: int) -> Sampling:
    """Greedy and sampled requests of every rule, filtered and not, side by side."""
    generator = torch.Generator().manual_seed(seed)

    def choose(values: list[float], dtype: torch.dtype) -> torch.Tensor:
        index = torch.randint(len(values), (batch,), generator=generator)
        return torch.tensor(values)[index].to(dtype).to(DEVICE)

    return Sampling(
        choose([0.0, 0.7, 1.0, 1.5], torch.float32),
        choose([0, 0, 3, 40], torch.int32),
        choose([1.0, 1.0, 0.9, 0.5], torch.float32),
        choose([0.0, 0.0, 0.05], torch.float32),
        make_sampling(batch, seed=seed).seed,
        choose([Rule.TOKEN, Rule.BLOCK, Rule.MATCH], torch.int32),
    )


def cu_rows_of(num_drafts: torch.Tensor) -> torch.Tensor:
    """Offsets of requests of num_drafts + 1 rows each."""
    cu_rows = torch.zeros(len(num_drafts) + 1, dtype=torch.int32, device=num_drafts.device)
    cu_rows[1:] = (num_drafts + 1).cumsum(0)
    return cu_rows


def logits_of(probabilities: list[Fraction]) -> torch.Tensor:
    """Logits whose softmax is the distribution; 0 becomes -inf."""
    p = torch.tensor([float(value) for value in probabilities], dtype=torch.float64)
    return p.log().float()


def word_of(u: float) -> int:
    """The 32-bit word whose uniform is next to u."""
    return min(max(round(u * 2**23 - 0.5), 0), 2**23 - 1) << 9


def words40_of(u: float) -> tuple[int, int]:
    """The two words whose 40 bits are next to u."""
    bits = min(max(int(u * 2**40), 0), 2**40 - 1)
    return bits >> 8, (bits & 0xFF) << 24


def sides_of(edges: list[float]) -> list[float]:
    """A point just below and just above every edge inside (0, 1), and the two ends."""
    step = MARGIN * 2.0**-23
    points = {step, 1 - step}
    for edge in edges:
        points |= {edge - step, edge + step}
    inside = sorted(point for point in points if 0 < point < 1)
    # Where two edges are too close for a point between them, there is nothing to test.
    return [u for u in inside if all(abs(u - edge) > 0.9 * step for edge in edges)]


class Verified(NamedTuple):
    token_ids: torch.Tensor  # [B, K + 1] int64, padded with -1
    num_tokens: torch.Tensor  # [B] int64, 1..k_i + 1
    is_bad: torch.Tensor  # [B] bool

    @staticmethod
    def of(out: torch.Tensor) -> "Verified":
        token_ids = out[:, :-1]
        return Verified(token_ids, (token_ids >= 0).sum(1), out[:, -1].bool())


class DraftSample(NamedTuple):
    token_ids: torch.Tensor  # [N] int64
    state: torch.Tensor  # [N, 4] float32


def seated(sampling: Sampling, anchor: torch.Tensor, draft_ids: torch.Tensor) -> SlotContents:
    """Slots of requests in this order, with their drafts after the known tokens; and the dummy.

    Shape: sampling, anchor [B]; draft_ids [B, K].
    """
    width = int(anchor.max()) + draft_ids.shape[1] + 1
    shape = len(anchor) + 1, -(-width // 64) * 64  # the kernels compile once for any multiple of 16
    token_ids = torch.zeros(shape, dtype=torch.int32, device=anchor.device)
    offset = torch.arange(draft_ids.shape[1], device=anchor.device)
    token_ids[:-1].scatter_(1, anchor[:, None] + offset, draft_ids.int())
    return SlotContents(token_ids, anchor.clone(), sampling)


def draw_draft(
    logits: torch.Tensor,
    sampling: Sampling,
    position: torch.Tensor,
    anchor: torch.Tensor,
    vocab_size: int,
    **options: Any,
) -> DraftSample:
    """Drafts of requests that are not in slots yet. Shape: logits [N, V'], the others [N]."""
    slot, offset = torch.arange(len(logits), device=logits.device), position - anchor
    columns = int(offset.max()) + 1
    kept = (
        logits.new_empty(len(logits), columns, logits.shape[1]),
        logits.new_empty(len(logits), columns, STATE_WIDTH, dtype=torch.float32),
    )
    slots = seated(sampling, anchor, slot.new_zeros(len(logits), columns))
    token_ids = verify_module.draw_draft(logits, slots, slot, offset, kept, vocab_size, **options)
    assert torch.equal(slots.token_ids[slot, position], token_ids.int())
    assert torch.equal(slots.num_tokens, anchor)
    return DraftSample(token_ids, kept[1][slot, offset])


def verify(
    target_logits: torch.Tensor,
    cu_rows: torch.Tensor,
    draft_token_ids: torch.Tensor,
    num_drafts: torch.Tensor,
    draft_logits: torch.Tensor | None,
    draft_state: torch.Tensor | None,
    sampling: Sampling,
    positions: torch.Tensor,
    vocab_size: int,
    **options: Any,
) -> Verified:
    """Verification of requests that are not in slots yet, with the drafts' logits in their order.

    Their slots must get what is returned.
    """
    slots = seated(sampling, positions, draft_token_ids)
    slot = torch.arange(len(positions), dtype=torch.int32, device=positions.device)
    kept = None if draft_logits is None or draft_state is None else (draft_logits, draft_state)
    columns = draft_token_ids.shape[1]
    verified = Verified.of(
        verify_module.verify(
            target_logits, cu_rows, slots, slot, num_drafts, columns, kept, vocab_size, **options
        )
    )
    at = positions[:, None] + torch.arange(columns + 1, device=positions.device)
    written = slots.token_ids[:-1].gather(1, at)
    assert torch.equal(written, verified.token_ids.clamp_min(0).int())
    known = torch.where(positions > 0, positions + verified.num_tokens, 0)
    assert torch.equal(slots.num_tokens, known)
    return verified


class Batch:
    """One step of a batch, everything that `verify` takes: random logits, and drafts drawn from
    draft logits near them.
    """

    def __init__(
        self,
        generator: torch.Generator,
        num_drafts: list[int],
        vocab_size: int,
        dtype: torch.dtype,
        sampling: Sampling,
        spread: float = 3.0,
        draft_width: int | None = None,
        noise: float = 0.3,
    ) -> None:
        batch, k_max = len(num_drafts), max(num_drafts)
        self.vocab_size = vocab_size
        self.sampling = sampling
        self.num_drafts = torch.tensor(num_drafts, dtype=torch.int32, device=DEVICE)
        self.cu_rows = cu_rows_of(self.num_drafts)
        rows = int(self.cu_rows[-1])
        target = torch.randn(rows, vocab_size, generator=generator) * spread
        width = draft_width or vocab_size
        self.draft_logits = torch.zeros(batch, k_max, width, dtype=dtype, device=DEVICE)
        shared = min(width, vocab_size)
        for i, k in enumerate(num_drafts):
            first = int(self.cu_rows[i])
            change = torch.randn(k, shared, generator=generator) * spread * noise
            near = target[first : first + k, :shared] + change
            self.draft_logits[i, :k, :shared] = near.to(self.draft_logits)
        self.target_logits = target.to(dtype).to(DEVICE)
        self.positions = torch.arange(batch, device=DEVICE) * 7 + 11
        self.draft_ids = torch.zeros(batch, k_max, dtype=torch.int64, device=DEVICE)
        self.state = torch.zeros(batch, k_max, 4, device=DEVICE)
        with on_road("reference"):
            for j in range(k_max):
                drawn = draw_draft(
                    self.draft_logits[:, j],
                    sampling,
                    self.positions + j,
                    self.positions,
                    vocab_size,
                )
                self.draft_ids[:, j], self.state[:, j] = drawn.token_ids, drawn.state

    def verify(self, road: str, one_hot: bool = False) -> Verified:
        with on_road(road):
            return verify(
                self.target_logits,
                self.cu_rows,
                self.draft_ids,
                self.num_drafts,
                None if one_hot else self.draft_logits,
                None if one_hot else self.state,
                self.sampling,
                self.positions,
                self.vocab_size,
            )


def equal(a: Verified, b: Verified) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def spread_out(x: torch.Tensor, stride: int) -> torch.Tensor:
    """A copy whose first dimension has this stride."""
    count = (len(x) - 1) * stride + x[0].numel()
    far = torch.empty(count, dtype=x.dtype, device=x.device)
    return far.as_strided(x.shape, (stride, *x.stride()[1:])).copy_(x)
