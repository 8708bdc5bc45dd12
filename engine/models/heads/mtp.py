"""MTP heads: one more layer of the target's own kind, which was trained together with it.

Row t pairs the target's last states h_t, as its last norm leaves them, with the next token x_{t+1},
and predicts x_{t+2}:

    e = embedding_norm(E[x_{t+1}])                  in MiMo's, zeros for E[x_1]
    z = projection([e; h]),  h = hidden_norm(h_t)   in MiMo's, [h; e]
    s = norm(layer(z))
    logits = lm_head(s)

A draft's row reads s of the row before in place of h_t, so one layer drafts any number of tokens. E
and lm_head are the target's; a hybrid's head may have an E of its own.

Of GLM's, vLLM's glm4_moe_mtp.py takes the layer's output in front of `norm` in place of h_t, and
SGLang's glm4_moe_nextn.py takes s. We take s: `hidden_norm` was trained on states behind a norm,
and vLLM takes s too for later GLMs, where the other way cost acceptance (its pull request 47448).
"""

from typing import Any

from torch import Tensor

from outrider.kernels.model.rms_norm import Norm, rms_norm
from outrider.kernels.model.row_codes import plain

from ..attention import ForwardBatch, KeptRows
from .config import MtpNames
from .head import AutoregressiveHead


class MtpHead(AutoregressiveHead):
    """A head that is a layer of its target's checkpoint."""

    kind = "mtp"

    def __init__(
        self, *, names: MtpNames, embedding_norm: Norm, hidden_norm: Norm, **layers: Any
    ) -> None:
        """`layers` as in Head; `fc` is the projection, of which `names` says what it reads."""
        super().__init__(**layers)
        self._names = names
        self.embedding_norm = embedding_norm
        self.hidden_norm = hidden_norm

    def fused(self, taps: Tensor) -> Tensor:
        return taps.flatten(1)

    def __call__(
        self, f: Tensor, next_ids: Tensor, batch: ForwardBatch, kept: KeptRows | None = None
    ) -> Tensor:
        both = f.new_empty(len(f), 2 * self.hidden_size)
        halves = both.chunk(2, -1)
        e, h = halves if self._names.embedding_first else halves[::-1]
        rms_norm(self.embedding, self.embedding_norm, next_ids, out=e)
        if self._names.leaves_out_first:
            e *= (batch.rows.positions > 0)[:, None]
        rms_norm(f, self.hidden_norm, out=h)
        x = self.fc(both)
        if kept is not None:
            return rms_norm(self.of_rows(kept, x, None, batch), self.norm)
        y = self.through_blocks(x, None, batch, self.norm)
        return rms_norm(x, self.norm) if y is None else plain(y)

    def recycled(self, y: Tensor) -> Tensor:
        return y

    def logits(self, y: Tensor) -> Tensor:
        return self.output_layer(y)
