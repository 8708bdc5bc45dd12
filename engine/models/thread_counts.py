"""The numbers of CPU threads with which a model computes the same bits."""

import torch

from .network import Network
from .one_prompt import PAGE, num_pages_of, one_prompt
from .proof import CHECKED_LENGTHS


@torch.inference_mode()
def alike_thread_counts(network: Network) -> tuple[int, ...]:
    """All threads, a half, a quarter and so on: those for which the logits have the same bits.

    Found by trying: a library may split its sums differently for another number of threads.
    """
    most = torch.get_num_threads()
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


def _logits(network: Network) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for length in CHECKED_LENGTHS:
        network.bind_cache(num_pages_of(length), PAGE)
        ids = torch.randint(0, network.vocab_size, (length,), generator=generator)
        found.append(network(one_prompt(ids)).logits)
    network.free_cache()
    return found
