"""One model of the pair over its own paged KV cache."""

from collections.abc import Callable

import torch
from torch import Tensor

from outrider.engine.attention import PagedContext, attention_context
from outrider.engine.batch import ForwardBatch
from outrider.engine.config import ModelConfig
from outrider.engine.cuda_graphs import GraphedForward
from outrider.engine.model_loader import load_model, max_positions, run_model


class PagedModel:
    """An unmodified Hugging Face causal LM whose layers read and write pages."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        self.model, self._layers = load_model(config, device)
        self._graphs: GraphedForward | None = None
        self.max_positions = max_positions(self.model.config)
        self.dtype: torch.dtype = self.model.dtype
        self.vocab_size = int(self.model.config.get_text_config().vocab_size)

    @property
    def bytes_per_token(self) -> int:
        """KV cache bytes that one token takes, over all layers."""
        values = sum(
            layer.num_kv_heads * (layer.head_dim + layer.value_dim) for layer in self._layers
        )
        return values * self.dtype.itemsize

    def bind_cache(self, num_pages: int, page_size: int) -> None:
        """Allocate the cache and hand each attention layer its part of it."""
        for layer in self._layers:
            for name, dim in (("k_cache", layer.head_dim), ("v_cache", layer.value_dim)):
                # Not zeroed: nothing past a sequence's length is ever read.
                cache = torch.empty(
                    num_pages,
                    page_size,
                    layer.num_kv_heads,
                    dim,
                    dtype=self.dtype,
                    device=self.model.device,
                )
                layer.module.register_buffer(name, cache, persistent=False)

    def capture_graphs(
        self,
        max_num_seqs: int,
        rows_per_seq: tuple[int, ...],
        block_table: Tensor,
        progress: Callable[[int, int], None],
    ) -> None:
        """Capture passes of `rows_per_seq` rows a sequence; call it once the cache is bound."""
        graphs = GraphedForward(self._run, max_num_seqs, rows_per_seq, block_table)
        graphs.capture(progress)
        self._graphs = graphs

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Compute the batch's rows, leaving their KV in the pages; returns [num_logits, V]."""
        logits = self._graphs.replay(batch) if self._graphs is not None else None
        return self._run(batch) if logits is None else logits

    def _run(self, batch: ForwardBatch) -> Tensor:
        with attention_context(PagedContext(batch)):
            return run_model(self.model, batch.input_ids, batch.positions, batch.logits_rows)
