"""A recipe of a distillation that takes seconds."""

from outrider.distill.recipe import Recipe

TINY = Recipe(
    target="",
    out="",
    conversations_per_shard=8,
    max_prompt_tokens=16,
    max_answer_tokens=24,
    row_tokens=64,
    batch_tokens=128,
    micro_batch_rows=2,
)
