"""The LM head of captured passes: logits of every shape begin at one place."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.kernels._dispatch import uses_triton
from outrider.kernels.product import is_ahead, product


class BufferedHead:
    """Stands in for `forward` of a head without a bias, and keeps its output in one buffer.

    What was captured to read logits there needs no copy of them, and the graphs of many shapes keep
    one buffer instead of one each. Logits are valid until the next call.
    """

    def __init__(self, weight: Tensor, max_rows: int) -> None:
        """Shape: weight [V, hidden]. Calls of more than `max_rows` rows get memory of their own."""
        self._weight = weight
        self.buffer = weight.new_empty(max_rows, len(weight))

    def __call__(self, hidden_states: Tensor) -> Tensor:
        """Shape: [..., hidden] -> [..., V]."""
        rows = hidden_states.flatten(0, -2)
        if len(rows) > len(self.buffer):
            return F.linear(hidden_states, self._weight)
        logits = self.buffer[: len(rows)]
        if uses_triton(rows) and is_ahead(rows, self._weight):
            product(rows, self._weight, out=logits)
        else:
            torch.mm(rows, self._weight.t(), out=logits)
        return logits.view(*hidden_states.shape[:-1], -1)


def buffer_head(head: nn.Module, max_rows: int) -> None:
    """Let a head that allows it keep up to `max_rows` rows of logits in one buffer."""
    if type(head) is not nn.Linear or head.bias is not None:  # a subclass may do something else
        return
    before = head.__dict__.get("forward")
    if not isinstance(before, BufferedHead) or len(before.buffer) < max_rows:
        head.forward = BufferedHead(head.weight, max_rows)
