"""Compares our decoder with transformers' own code at load, on the same tensors.

transformers' model has no weights of its own: each of its modules gets what was read under its
name, so nothing here knows the parts of any model. It runs a few tokens at near and far positions.
Each of our blocks is then given the hidden states that transformers' layer was given, so that every
layer is compared by itself and errors do not add up.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedConfig
from transformers.utils import logging as transformers_logging

from outrider.kernels.compiling import compile_together
from outrider.kernels.model.rms_norm import rms_norm

from ..progress import ReportCounts, counter
from .admission import failures_explained
from .attention import ForwardBatch, PagedAttention
from .blocks import Block
from .checkpoint import AnyCheckpoint, Lent
from .decoder import Decoder
from .model_classes import AutoModelForCausalLM
from .one_prompt import PAGE, num_pages_of, one_prompt
from .parts.base import Part

_NUM_NEARBY = 4  # inputs that show how a layer enlarges rounding
# Rows of a prompt, of a decode and of a verification: each runs other kernels.
CHECKED_LENGTHS = (40, 1, 5)


class Original:
    """transformers' own code for a model, without weights."""

    def __init__(
        self, config: PreTrainedConfig, dtype: torch.dtype, device: torch.device, last_norm: str
    ) -> None:
        """`last_norm`: the name of the norm behind the last layer.

        Raises UnsupportedModelError if transformers' code fails.
        """
        with failures_explained(), torch.device("meta"):
            self.model: Any = AutoModelForCausalLM.from_config(
                copy.deepcopy(config),  # which it changes
                dtype=dtype,
                attn_implementation="eager",
                experts_implementation="eager",
            )
        self.model.eval().requires_grad_(False)
        decoder, self._last_norm = self.model.get_decoder(), last_norm
        # RoPE's frequencies are no weights: on the meta device they have not been computed.
        if getattr(decoder, "rotary_emb", None) is not None:
            with failures_explained():
                decoder.rotary_emb = type(decoder.rotary_emb)(config).to(device)

    def fill(self, checkpoint: AnyCheckpoint) -> None:
        """Use what was read as weights. Raises ValueError if only one has some of them."""
        names = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        names |= {name for name, _ in self.model.named_buffers()}
        for name, tensor in checkpoint.tensors.items():
            self._assign(name, tensor)
        for lent in checkpoint.lent:
            self._lend(lent)
        parameters = list(self.model.named_parameters())
        held = (*parameters, *self.model.named_buffers())
        left = [name for name, tensor in held if tensor.is_meta]
        if left:
            raise ValueError(f"it has weights that the decoder lacks: {', '.join(left[:3])}")
        # Zeros change nothing: some quantisers give every layer such a bias.
        added = [name for name, tensor in parameters if name not in names and tensor.any()]
        if added:
            raise ValueError(f"transformers leaves out {', '.join(added[:3])}")

    def _module_of(self, name: str) -> tuple[nn.Module, str]:
        """The module that has a parameter, and the parameter's name there."""
        module, _, own = name.rpartition(".")
        try:
            return self.model.get_submodule(module), own
        except AttributeError:
            raise ValueError(f"transformers leaves out {name}") from None

    def _assign(self, name: str, tensor: Tensor) -> None:
        module, own = self._module_of(name)
        setattr(module, own, nn.Parameter(tensor, requires_grad=False))

    def _lend(self, lent: Lent) -> None:
        """Give modules their parameters, and their inputs as our weights take them.

        The first of them that runs has all their parameters made.
        """
        nothing = torch.empty(0)
        made: dict[int, Tensor] = {}  # for modules that have yet to run

        def take(i: int, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            if i not in made:
                made.update(enumerate(lent.make()))
            self._assign(lent.names[i], made.pop(i))
            if lent.inputs is None:
                return args
            taken = lent.inputs(args[0].flatten(0, -2), i)
            return taken.view_as(args[0]), *args[1:]

        def give_back(i: int, *_: object) -> None:
            self._assign(lent.names[i], nothing)

        for i, name in enumerate(lent.names):
            give_back(i)
            module, _ = self._module_of(name)
            module.register_forward_pre_hook(partial(take, i))
            module.register_forward_hook(partial(give_back, i))

    def run(
        self, batches: Sequence[ForwardBatch], choosers: Sequence[str], count: Callable[[], None]
    ) -> "list[OriginalPass]":
        """One pass over these prompts, for which each weight is dequantised once.

        Calls `count` in front of each layer, and behind the last one. Raises UnsupportedModelError
        if transformers' code fails.
        """
        # Padded at their ends, which no token before sees; padding has position 0.
        input_ids = pad_sequence([batch.input_ids for batch in batches], batch_first=True)
        positions = pad_sequence([batch.rows.positions for batch in batches], batch_first=True)
        states: list[Tensor] = []  # [prompts, longest, hidden] each
        choices: dict[str, tuple[Tensor, ...]] = {}
        decoder = self.model.get_decoder()

        def note_state(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            states.append(_hidden(args, kwargs))
            count()

        hooks = [
            module.register_forward_pre_hook(note_state, with_kwargs=True)
            for module in (*decoder.layers, self.model.get_submodule(self._last_norm))
        ]
        for name in choosers:
            note = partial(_note, choices, name)
            hooks.append(self.model.get_submodule(name).register_forward_hook(note))
        try:
            with failures_explained(), _without_advice():
                output = self.model(input_ids=input_ids, position_ids=positions, use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()

        def part(tensor: Tensor, i: int) -> Tensor:
            return tensor.reshape(*input_ids.shape, -1)[i, : len(batches[i].input_ids)]

        return [
            OriginalPass(
                [part(state, i) for state in states],
                {name: [part(tensor, i) for tensor in each] for name, each in choices.items()},
                part(output.logits, i),
            )
            for i in range(len(batches))
        ]


class OriginalPass(NamedTuple):
    """A prompt's part of a pass of transformers' model."""

    states: list[Tensor]  # [T, hidden] each: before each layer and after the last one
    choices: dict[str, list[Tensor]]  # [T, ..] the inputs and outputs of each chooser
    logits: Tensor  # [T, V]


@contextmanager
def _without_advice() -> Iterator[None]:
    """Let transformers name no packages that only its own code would be faster with."""
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)


def _note(
    choices: dict[str, tuple[Tensor, ...]], name: str, _: nn.Module, args: Any, output: Any
) -> None:
    choices[name] = args[0], *output


@torch.inference_mode()
def why_different(
    decoder: Decoder,
    original: Original,
    starts: Sequence[int],
    *,
    batch_invariant: bool,
    report: ReportCounts,
) -> str | None:
    """Names a part of the decoder that differs from transformers' model; None if all agree.

    Compares prompts of all lengths at the first of `starts`, and of the last length at the others:
    which kernels run depends on the length alone. `batch_invariant` selects the attention of a
    target whose rows must not depend on the batch. `report` counts layers, of transformers' passes
    and of the comparisons.
    """
    generator = torch.Generator().manual_seed(0)
    passes = [(starts[0], length) for length in CHECKED_LENGTHS]
    passes += [(first, CHECKED_LENGTHS[-1]) for first in starts[1:]]
    batches = []
    for first, length in passes:
        input_ids = torch.randint(0, len(decoder.embedding), (length,), generator=generator)
        batches.append(
            one_prompt(input_ids.to(decoder.device), first, batch_invariant=batch_invariant)
        )
    count = counter((2 + len(batches)) * (len(decoder.blocks) + 1), report)
    # The longest by itself: to pad the others to its length would take memory.
    parts = [part for block in decoder.blocks for part in block.parts]
    choosers = [part.chooser for part in parts if part.chooser]
    originals = original.run(batches[:1], choosers, count)
    originals += original.run(batches[1:], choosers, count)
    cases = list(zip(batches, originals, strict=True))
    of_length = {len(batch.input_ids): (batch, theirs) for batch, theirs in cases}
    # Binding tries the kernel for prompts, which must run for that: none does while all compile.
    _bind(parts, originals[0].states[0])
    launches = [partial(_launch, decoder, *case) for case in of_length.values()]
    compile_together(launches, decoder.device)
    return next((name for case in cases for name in _differences(decoder, *case, count)), None)


def _launch(decoder: Decoder, batch: ForwardBatch, theirs: OriginalPass) -> None:
    """Launch every kernel that `_differences` may launch."""
    # A copy of the batch: compiling computes none of what it keeps.
    states, choices, batch = theirs.states, theirs.choices, replace(batch)
    for block, state in zip(decoder.blocks, states[:-1], strict=True):
        _through(_choosing(block, choices), state, batch)
        _chooses(block, choices)
    _logits(decoder, states[-1])


def _differences(
    decoder: Decoder, batch: ForwardBatch, theirs: OriginalPass, count: Callable[[], None]
) -> Iterator[str]:
    """Names the parts that compute something else for one prompt; calls `count` after each."""
    states, choices, logits = theirs
    if not torch.equal(decoder.embedded(batch.input_ids), states[0]):
        yield "its embedding"
    for i, block in enumerate(decoder.blocks):
        if not _agrees(_choosing(block, choices), states[i], states[i + 1], batch):
            yield f"layer {i} at position {int(batch.rows.positions[0])}"
        if not _chooses(block, choices):
            yield f"the router of layer {i}"
        count()
    ours = _logits(decoder, states[-1])
    eps = max(torch.finfo(decoder.dtype).eps, decoder.output_layer.weight.input_eps)
    if (ours - logits.float()).norm() > 8 * eps * logits.float().norm():
        yield "its last norm or output layer"
    count()


def _logits(decoder: Decoder, state: Tensor) -> Tensor:
    """Shape: [T, hidden], in front of the last norm -> [T, V] float32"""
    return decoder.logits(rms_norm(state.clone(), decoder.norm)).float()


def _chooses(block: Block, choices: dict[str, list[Tensor]]) -> bool:
    """Whether a block's parts choose as transformers' modules do."""
    return all(part.chooses(*choices[part.chooser]) for part in block.parts if part.chooser)


def _choosing(block: Block, choices: dict[str, list[Tensor]]) -> Block:
    """The same block with the choices of transformers' modules."""
    chosen = (
        part.choosing(*choices[part.chooser]) if part.chooser else part for part in block.parts
    )
    return Block(*chosen)


def _agrees(block: Block, x: Tensor, expected: Tensor, batch: ForwardBatch) -> bool:
    got = _through(block, x, batch)
    # Both round: the residual stream once, to its dtype, and the layer's output several times.
    # Where inputs are rounded further, the least difference may turn one to the next code.
    eps = max(torch.finfo(x.dtype).eps, *(linear.weight.input_eps for linear in block.linears))
    before, expected = x.float(), expected.float()
    tolerance = 4 * eps * expected.norm() + 8 * eps * (expected - before).norm()
    difference = (got - expected).norm()
    if difference <= tolerance:
        return True
    # A layer may enlarge rounding, such as a norm of what a delta net found for a key that hardly
    # matches. Inputs that differ in their last bit show by how much, if there are a few of them.
    generator = torch.Generator(x.device).manual_seed(0)
    last_bit, enlarged = torch.finfo(x.dtype).eps, 0.0
    for _ in range(_NUM_NEARBY):
        signs = 2 * torch.ones_like(x).bernoulli_(0.5, generator=generator) - 1
        nearby = _through(block, x * (1 + last_bit * signs), batch)
        enlarged = max(enlarged, float((nearby - got).norm()))
    return bool(difference <= 4 * enlarged)


def _through(block: Block, x: Tensor, batch: ForwardBatch) -> Tensor:
    """The rows behind a block, over pages and states of their own. Shape: [T, hidden] float32."""
    states = [part.state for part in block.parts if part.state is not None]
    attentions = _bind(block.parts, x)
    for state in states:
        num_bytes = state.num_bytes(0, x.dtype)
        memory = torch.zeros(1, num_bytes, dtype=torch.uint8, device=x.device)
        state.bind(memory, 0, x.dtype, start=int(batch.rows.positions[0]))
    got = x.clone()
    block(got, None, None, batch)
    for attention in attentions:
        attention.pages = None
    for state in states:
        state.free()
    return got.float()


def _bind(parts: Iterable[Part], x: Tensor) -> list[PagedAttention]:
    """Bind pages for these rows to those parts that have attention, and return it."""
    attentions = [part.attention for part in parts if part.attention is not None]
    for attention in attentions:
        attention.bind_pages(num_pages_of(len(x)), PAGE, x.dtype, x.device, x.dtype)
    return attentions


def _hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    hidden_states: Tensor = args[0] if args else kwargs["hidden_states"]
    return hidden_states
