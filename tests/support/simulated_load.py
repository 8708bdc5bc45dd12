"""A server under load on a simulated clock: what steps cost and how often drafts are accepted are
given, and whoever chooses k is measured by the tokens a second that come of it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from outrider.engine.acceptance import Acceptance, OwnAcceptance
from outrider.engine.scheduling.adaptive_speculation import AdaptiveSpeculation
from outrider.engine.scheduling.price import Price


@dataclass(frozen=True)
class Costs:
    """Milliseconds of a step: `rows` of the target, `draft` of one draft of so many sequences."""

    rows: Callable[[int], float]
    draft: Callable[[int], float]
    seq: float = 0.0  # the host's, for each sequence
    read: float = 0.0  # of the draft, for each token that it must read before it drafts
    is_captured: bool = True  # padded to powers of two of sequences, and whole rows of each

    def padding(self, num_seqs: int, num_rows: int) -> tuple[int, int]:
        if not self.is_captured:
            return num_seqs, num_rows
        size = 1 << (num_seqs - 1).bit_length()
        return size, -(-num_rows // size) * size

    def step_ms(self, num_seqs: int, num_rows: int, num_drafts: int, num_read: int) -> float:
        target = self.rows(self.padding(num_seqs, num_rows)[1]) + self.seq * num_seqs
        return target + self.drafting_ms(num_seqs, num_drafts, num_read)

    def drafting_ms(self, num_seqs: int, num_drafts: int, num_read: int) -> float:
        return num_drafts * self.draft(num_seqs) + self.read * num_read if num_drafts else 0.0


@dataclass(frozen=True)
class Mixture:
    """Who asks for what. Clients ask again as soon as they have an answer."""

    costs: Costs
    clients: int
    acceptance: Sequence[float]  # of a sequence's drafts; client i has that of i modulo their count
    falls: float = 0.0  # each draft of a step is accepted so much less often than the one before
    context: Sequence[int] = (1000,)  # tokens before each answer, client by client likewise
    answer: int = 200  # tokens, on the average
    prompt: int = 64
    later: Sequence[float] | None = None  # acceptance in the second half
    fewer_threads: Costs | None = None  # what steps cost then
    pinned: float = 0.0  # share of clients that name k = 3
    rests: bool = False  # all clients ask at once, when all have their answers
    max_k: int = 4
    steps: int = 800
    slows_down: float = 1.0  # how much longer steps take by the end


@dataclass
class Clients:
    """What the clients of a mixture have, client by client."""

    mixture: Mixture
    rng: np.random.Generator
    of_all: Acceptance
    left: np.ndarray = field(init=False)  # tokens of the answer; 0: the prompt is to be read
    unread: np.ndarray = field(init=False)  # by the draft
    own: list[OwnAcceptance] = field(init=False)

    def __post_init__(self) -> None:
        count = self.mixture.clients
        self.left, self.unread = np.zeros(count, int), np.zeros(count, int)
        self.own = [OwnAcceptance() for _ in range(count)]
        self.context = np.resize(np.array(self.mixture.context), count)
        self.pinned = np.arange(count) < self.mixture.pinned * count

    def join(self) -> np.ndarray:
        """Those whose prompts the next step reads."""
        joins = self.left <= 0
        if self.mixture.rests and not joins.all():
            return np.zeros_like(joins)
        for i in joins.nonzero()[0].tolist():
            self.own[i] = OwnAcceptance()
            self.own[i].ratio = self.of_all.of_length(int(self.context[i])).ratio
        return joins

    def accepted(self, wanted: np.ndarray, is_late: bool) -> np.ndarray:
        mixture = self.mixture
        of_kind = mixture.later if is_late and mixture.later else mixture.acceptance
        each = np.resize(np.array(of_kind, float), mixture.clients)
        positions = np.arange(mixture.max_k)
        chance = (each[:, None] - mixture.falls * positions).clip(0.0, 1.0)
        is_accepted = self.rng.random(chance.shape) < chance
        return np.minimum(wanted, is_accepted.cumprod(1).sum(1))


def learned(costs: Costs, clients: int, max_k: int) -> Price:
    """As a server on a GPU learns it at its start."""
    price = Price(costs.padding)
    sizes = [1 << i for i in range((clients - 1).bit_length() + 1)]
    for num_seqs in sizes:
        for k in range(max_k + 1):
            for _ in range(4):
                num_rows = num_seqs * (k + 1)
                drafting_s = costs.drafting_ms(num_seqs, k, 0) / 1e3
                step_s = costs.step_ms(num_seqs, num_rows, k, 0) / 1e3
                price.observe(num_seqs, num_rows, k, step_s, drafting_s, is_usual=False)
    return price


def tokens_per_s(mixture: Mixture, fixed_k: int | None = None, seed: int = 0) -> float:
    """Tokens a second of all clients; `fixed_k` None: the engine's own choice."""
    costs = mixture.costs
    price = learned(costs, mixture.clients, mixture.max_k) if costs.is_captured else None
    falls_behind = costs.read > 0
    adaptive = AdaptiveSpeculation(mixture.max_k, falls_behind=falls_behind, price=price)
    adaptive.use_threads(16)
    clients = Clients(mixture, np.random.default_rng(seed), adaptive.acceptance)
    unread_observation: tuple | None = None
    num_tokens, seconds = 0, 0.0
    for step in range(mixture.steps):
        is_late = 2 * step > mixture.steps
        if is_late and mixture.fewer_threads is not None:
            costs = mixture.fewer_threads
            adaptive.use_threads(1)
        joins = clients.join()
        decodes = clients.left > 0
        num_seqs, num_prompt = int(decodes.sum()), int(joins.sum()) * mixture.prompt
        is_timed = num_prompt <= 2 * num_seqs
        is_open = (decodes & ~clients.pinned).nonzero()[0]
        ks, is_trial, drafts_new = np.zeros(mixture.clients, int), False, fixed_k != 0
        if fixed_k is None:
            owns = [clients.own[i] for i in is_open.tolist()]
            named = [min(3, mixture.max_k)] * int((decodes & clients.pinned).sum())
            ks[is_open] = adaptive.choose(num_seqs, owns, named, num_prompt_rows=num_prompt)
            is_trial, drafts_new = adaptive.is_trial, adaptive.k > 0
        else:
            ks[is_open] = fixed_k
        ks[clients.pinned & decodes] = min(3, mixture.max_k)
        ks = np.minimum(ks, np.maximum(clients.left - 1, 0))
        accepted = clients.accepted(ks, is_late)
        clients.unread[joins] = mixture.prompt
        reads = (ks > 0) | (joins & drafts_new & (num_seqs > 0) & bool(ks.any()))
        num_read = int(clients.unread[reads].sum())
        clients.unread[reads] = 0
        clients.unread[~reads & decodes] += 1
        num_rows, depth = num_seqs + num_prompt + int(ks.sum()), int(ks.max())
        batch = max(1, num_seqs + int(joins.sum()))
        pace = 1.0 + (mixture.slows_down - 1.0) * step / mixture.steps
        pace *= clients.rng.uniform(0.98, 1.02)
        step_s = pace * costs.step_ms(batch, max(batch, num_rows), depth, num_read) / 1e3
        drafting_s = pace * costs.drafting_ms(batch, depth, num_read) / 1e3
        brought = np.where(joins | decodes, accepted + 1, 0)
        clients.left[joins] = clients.rng.integers(
            mixture.answer // 2, mixture.answer * 3 // 2, int(joins.sum())
        )
        clients.left -= brought
        num_tokens, seconds = num_tokens + int(brought.sum()), seconds + step_s
        if fixed_k is not None:
            continue
        if unread_observation is not None:  # the host reads a step after it has planned the next
            observe(adaptive, *unread_observation)
        drawing = (joins | decodes).nonzero()[0].tolist()
        unread_observation = (
            num_seqs, ks[drawing].tolist(), accepted[drawing].tolist(),
            step_s if is_timed and step else None, drafting_s, is_trial,
            [clients.own[i] for i in drawing], clients.context[drawing].tolist(),
        )  # fmt: skip
    return num_tokens / seconds


def observe(
    adaptive: AdaptiveSpeculation,
    num_seqs: int,
    wanted: list[int],
    accepted: list[int],
    step_s: float | None,
    drafting_s: float,
    is_trial: bool,
    own: list[OwnAcceptance],
    context: list[int],
) -> None:
    """As `commit.py` does it."""
    of_all, ratios = adaptive.acceptance, [each.ratio for each in own]
    for each, num_tokens, *drafts in zip(own, context, wanted, accepted, strict=True):
        if any(wanted):
            alike = of_all.of_length(num_tokens)
            alike.observe(*drafts, of_all.by_position)
            each.observe(*drafts, of_all.by_position, alike.ratio)
    adaptive.observe(
        num_seqs, wanted, accepted, step_s, drafting_s, is_trial=is_trial, ratios=ratios
    )
