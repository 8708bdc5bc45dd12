"""Finds out at load what a target's bits depend on, and makes them independent of the batch."""

from collections.abc import Callable
from functools import partial
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from outrider.kernels.compiling import compile_together
from outrider.kernels.model.batch_invariant_attention import rows_at_once, same_rows, sums_alike
from outrider.kernels.model.batch_invariant_linear import own_products
from outrider.kernels.model.packed_linear import has_products

from ..api import ignore_progress
from ..progress import ReportCounts, counter
from .decoder import Decoder
from .network import Network
from .one_prompt import PAGE, num_pages_of, one_prompt
from .proof import CHECKED_LENGTHS
from .weights import Dense, Layer, Unrounded, Weight

# Numbers of rows in which a prompt is computed, to compare with one pass over all of it: decodes,
# verifications and prompts. A CPU's products were compared when they were packed, and are slow. On
# a GPU, all tiles of our own products are used: the library gets only multiples of 8 rows.
_CPU_PASSES = (1, 3, 36)
_GPU_PASSES = (1, 5, 20, 41, 91, 301)


def make_batch_invariant(
    network: Network, *, at_any_cost: bool = False, report: ReportCounts = ignore_progress
) -> None:
    """Make the bits of a network's rows independent of the batch, and check that they are.

    `report` counts layers whose products are tried, and passes that are compared. Raises ValueError
    saying what makes it impossible or, unless it is wanted `at_any_cost`, much slower; the network
    is unchanged then.
    """
    ends = _ends(network)
    if isinstance(network, Decoder) and network.device.type == "cuda":
        # Experts and rounded inputs are summed in one order anyway.
        weights = [weight for weight in network.weights if not weight.batch_invariant]
        formats = ", ".join(sorted({weight.format for weight in weights} - {""}))
        if formats and not at_any_cost:
            raise ValueError(
                f"with weights in {formats} long prompts would take longer by half or more; set "
                "engine.batch_invariant if that is worth it"
            )
        blocks, output_layer = list(network.blocks), network.output_layer
        count = counter(len(network.linears) + len(ends), report)

        def changed(layer: Layer[Weight]) -> Layer[Weight]:
            layer = layer.as_batch_invariant()
            count()
            return layer

        try:
            compile_together(_own_products(network), network.device)
            network.change_linears(changed)
            _prove(network, ends, count)
        except Exception as reason:
            network.blocks, network.output_layer = blocks, output_layer
            if isinstance(reason, torch.OutOfMemoryError):
                raise ValueError("there is too little memory to find out how it sums") from None
            raise
    else:
        _prove(network, ends, counter(len(ends), report))
    network.batch_invariant = True


def make_batch_dependent(network: Network) -> None:
    """The opposite, for a rank whose others cannot have it so: what each computes by itself, such
    as a router's logits, must have the same bits on all.
    """
    if isinstance(network, Decoder):
        network.change_linears(lambda own: own._replace(weight=own.weight.as_batch_dependent()))
    network.batch_invariant = False


def _own_products(decoder: Decoder) -> list[Callable[[], Tensor]]:
    """Calls that launch our own products of all layers, to compile those of all at once."""
    found = {}  # by shape
    for weight, bias, _ in decoder.linears:
        if isinstance(weight, (Dense, Unrounded)):
            matrix = weight.dequantised()
            if matrix.element_size() == 2:
                found[matrix.shape, bias is None] = own_products(matrix, bias)
    return [call for calls in found.values() for call in calls]


def _ends(network: Network) -> list[int]:
    """Where the passes end that are compared with one pass over all their rows; the first at 0."""
    sizes = _CPU_PASSES if network.device.type == "cpu" else _GPU_PASSES
    return [0, *(end for end in accumulate(sizes) if end <= network.max_positions)]


@torch.inference_mode()
def _prove(network: Network, ends: list[int], count: Callable[[], None]) -> None:
    if not network.products_are_batch_invariant:
        raise ValueError(_why_products_vary(network))
    device, max_len = network.device, network.max_positions
    generator = torch.Generator().manual_seed(0)
    input_ids = torch.randint(0, network.vocab_size, (ends[-1],), generator=generator)
    input_ids = input_ids.to(device)

    def logits(first: int, end: int) -> Tensor:
        # Overflow is no difference, though NaN does not equal itself.
        ids = input_ids[first:end]
        part = one_prompt(ids, first, follows=True, max_len=max_len, batch_invariant=True)
        return network(part).logits.nan_to_num()

    try:
        network.bind_cache(num_pages_of(ends[-1]), PAGE)
        passes = [partial(logits, *rows) for rows in ((0, ends[-1]), *pairwise(ends))]
        compile_together([partial(_attend, network), *passes], device)
        if not network.attention_is_batch_invariant:
            _prove_attention(network)
        whole = logits(0, ends[-1])
        count()
        for first, end in pairwise(ends):
            if not torch.equal(logits(first, end), whole[first:end]):
                raise ValueError(
                    f"{end - first} rows differ in bits from the same rows among {ends[-1]}"
                )
            count()
    finally:
        network.free_cache()


def _attend(network: Network) -> None:
    """Launch all that `_prove_attention` may launch."""
    layers = {(layer.heads, network.dtype_of_pages(layer)) for layer in network.attentions}
    for heads, of_pages in layers:
        list(same_rows(heads, network.dtype, of_pages, network.device, network.max_positions))


def _prove_attention(network: Network) -> None:
    for attention in network.attentions:
        heads, dtype, device = attention.heads, network.dtype, network.device
        of_pages = network.dtype_of_pages(attention)
        if device.type == "cpu":
            attention.rows_at_once = rows_at_once(heads, dtype, of_pages)
        elif not sums_alike(heads, dtype, of_pages, device, network.max_positions):
            name = torch.cuda.get_device_name(device)
            raise ValueError(f"{name} sums attention of {heads} in several orders")


def _why_products_vary(network: Network) -> str:
    is_cpu, dtype = network.device.type == "cpu", network.dtype
    if is_cpu and has_products(torch.float32) and not has_products(dtype):
        name = str(dtype).removeprefix("torch.")
        return f"oneDNN multiplies no {name} on this processor, only float32 (target.dtype)"
    return "some of its products are the library's own choice"


@torch.inference_mode()
def alike_thread_counts(network: Network) -> tuple[int, ...]:
    """All threads, a half, a quarter and so on: those for which the logits have the same bits.

    Found by trying: a library may split its sums differently for another number of threads.
    """
    most = torch.get_num_threads()
    if most == 1:
        return (1,)
    counts, count = [most], most // 2
    truth = _logits(network)
    try:
        while count >= 1:
            torch.set_num_threads(count)
            if all(map(torch.equal, _logits(network), truth)):
                counts.append(count)
            count //= 2
    finally:
        torch.set_num_threads(most)
    return tuple(counts)


def _logits(network: Network) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for length in CHECKED_LENGTHS:
        network.bind_cache(num_pages_of(length), PAGE)
        ids = torch.randint(0, network.vocab_size, (length,), generator=generator)
        found.append(network(one_prompt(ids)).logits.clone())
    network.free_cache()
    return found
