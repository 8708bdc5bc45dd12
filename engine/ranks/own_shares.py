"""A follower's shares of target and draft, with their pages: what rank 0 has it do."""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial

import numpy as np
import torch

from outrider.kernels.compiling import compile_together

from ..config import EngineConfig
from ..cpu_share import set_threads
from ..gpu_memory import begin_measuring, left_bytes, measured_bytes
from ..models.batch_invariance import make_batch_dependent
from ..models.decoder import Decoder
from ..models.groups import LayerGroup, grouped
from ..models.host_pages import HostPages, host_pages_of
from ..models.network import short_batches
from ..models.pair import load_shares
from ..state.phase import Shape
from ..state.slots import Slots
from .group import RankGroup, path_of
from .shared_decoder import SharedDecoder


class OwnShares:
    """The share of the target, and that of the draft if ranks share it, of one follower."""

    networks: list[SharedDecoder]  # the target first
    slots: Slots
    host_pages: HostPages

    def __init__(self, rank: int, config: EngineConfig) -> None:
        """Load it; of devices only the kind is as in rank 0's config."""
        self.device = torch.device(config.device)
        if self.device.type == "cuda":
            self.device = torch.device("cuda", rank)
            torch.cuda.set_device(self.device)
        size = config.target.tensor_parallel
        set_threads(config.num_threads, size, self.device)
        self._utilization = config.gpu_memory_utilization
        self._group = RankGroup(rank, size)
        self._loaded = load_shares(replace(config, device=str(self.device)), rank=rank)
        self._max_model_len = config.max_model_len or self._loaded[0].max_positions
        self._num_bytes = self._step_bytes = 0
        self._why_no_copy = ""

    @property
    def batch_invariant(self) -> bool:
        return self._loaded[0].batch_invariant

    def join(self, meeting_fd: int, *, keep_bits: bool) -> None:
        """`keep_bits`: whether rows of the target are to be batch-invariant, as all ranks can
        have it.
        """
        if not keep_bits:
            make_batch_dependent(self._loaded[0])
        self._group.join(path_of(meeting_fd), self.device)
        self.networks = []
        for network in self._loaded:
            assert isinstance(network, Decoder)
            self.networks.append(SharedDecoder(network, self._group))

    @torch.inference_mode()
    def copy_states(self, number: int, copies_np: np.ndarray) -> None:
        """Shape: [copies, 2]"""
        copies = [(source, target) for source, target in copies_np.tolist()]
        self.networks[number].copy_states(copies)

    @torch.inference_mode()
    def run(self, number: int, shape: Shape, integers_np: np.ndarray) -> None:
        self.networks[number].phase(integers_np, shape)

    def bind(self, numbers: list[int]) -> None:
        """Allocate slots and pages; `numbers` as `Followers.bind` sends them."""
        num_seqs, max_len, max_drafts, page_size, vocab_size, max_drawn, num_kept, *num_pages = (
            numbers
        )
        self.slots = Slots(
            num_seqs, max_len, max_drafts, page_size, self.device, vocab_size, max_drawn,
            len(num_pages), num_kept,
        )  # fmt: skip
        for network in self.networks:
            network.bind_slots(self.slots)
        for group in self._layers:
            group.free()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self._num_bytes = 0
        # Of rank 0's groups, those of a draft that it has alone come last.
        for i, (group, num) in enumerate(zip(self._layers, num_pages, strict=False)):
            group.bind(i, num, page_size)
            self._num_bytes += num * page_size * group.spec.bytes_per_token

    @cached_property
    def _layers(self) -> list[LayerGroup]:
        """As rank 0 groups them: slots may have room for less than the longest sequence."""
        return grouped(self.networks, self._max_model_len)

    def allocate_host(self, numbers: list[int]) -> None:
        """`numbers` as `Followers.share_host_pages` sends them."""
        page_size, state_bytes, *num_pages = numbers
        states = self.networks[0] if state_bytes else None
        self.host_pages = host_pages_of(self.device)(
            self._layers, num_pages, page_size, self.device, states, state_bytes
        )

    def save(self, group: int, pages_np: np.ndarray) -> None:
        """Shape: [2, pages], of the device and of the host."""
        self._copy(partial(self.host_pages.save, group, *pages_np.tolist()))

    def load(self, group: int, pages_np: np.ndarray) -> None:
        """Shape: [2, pages], of the host and of the device."""
        self._copy(partial(self.host_pages.load, group, *pages_np.tolist()))

    def loaded(self) -> list[int]:
        """Let further steps wait for what is loaded. Returns the bytes of why a copy has failed."""
        self._copy(self.host_pages.before_steps)
        if self._why_no_copy:
            self.host_pages.wait()  # what has begun must not reach pages of others
        return list(self._why_no_copy.encode())

    def _copy(self, copy: Callable[[], None]) -> None:
        """A copy that fails is no reason to end: rank 0 then finds nothing in host memory."""
        try:
            copy()
        except Exception as error:
            self._why_no_copy = f"{type(error).__name__}: {error}"

    def compile(self, num_rows: int) -> None:
        """Compile the kernels of all passes, which rank 0 has compiled just before."""
        num_seqs, rows_per_seq = self.slots.max_num_seqs, self.slots.max_drawn + 1
        short = short_batches(num_seqs, num_rows, rows_per_seq)
        with self._group.apart():
            compile_together(
                [
                    *(partial(each.rehearse, num_rows, 1) for each in self.networks),
                    *(partial(each.rehearse_short, *b) for each in self.networks for b in short),
                ],
                self.device,
            )

    def measure(self) -> None:
        begin_measuring(self.device)

    def measured(self) -> None:
        self._step_bytes = measured_bytes(self.device)

    def room(self) -> int:
        """Bytes that pages may take."""
        return left_bytes(
            self.device, self._utilization, step_bytes=self._step_bytes, freed_bytes=self._num_bytes
        )
