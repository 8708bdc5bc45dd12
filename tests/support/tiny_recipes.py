"""A recipe of a distillation that takes seconds, a target to learn, and what was learnt."""

from pathlib import Path

import torch
from engines import GREEDY, engine_config, generate, run, tokens
from safetensors.torch import load_file, save_file

from outrider.distill.recipe import Recipe
from outrider.distill.text import load_shards
from outrider.engine.engine import Engine

TINY = Recipe(
    target="",
    out="",
    raw_share=0.0,  # a tiny target is learnt from few texts, which are to be alike
    conversations_per_shard=8,
    max_prompt_tokens=16,
    max_answer_tokens=24,
    row_tokens=64,
    batch_tokens=128,
    micro_batch_rows=2,
)
_ENDS_OF_PARTS = ("o_proj.weight", "out_proj.weight", "down_proj.weight")


def follow_from_the_last(target: Path, norm: float = 1.0) -> None:
    """Change a model so that it is easily learnt: a token follows from the one before. `norm` is
    what its last norm stores to change nothing.
    """
    tensors = load_file(target / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    shape = tensors["model.embed_tokens.weight"].shape
    embedding = torch.nn.functional.normalize(torch.randn(shape, generator=generator))
    for name, tensor in tensors.items():
        if name.startswith("model.") and name.endswith(_ENDS_OF_PARTS):
            tensor.zero_()
    tensors["model.norm.weight"].fill_(norm)
    tensors["model.embed_tokens.weight"] = embedding
    tensors["lm_head.weight"][torch.randperm(shape[0], generator=generator)] = 2 * embedding
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


def check_gain(target: Path, before: Path, after: Path, text: Path) -> None:
    """Both heads must draft for exact answers, and the second one better. They answer prompts of
    the text, which must be the target's own.
    """
    conversations = load_shards(sorted(text.glob("*.safetensors")))[-3:]
    asked = [each.token_ids[: each.num_prompt_tokens].tolist() for each in conversations]
    answers = [generate(target, prompt, GREEDY.max_tokens) for prompt in asked]
    accepted = []
    for head in (before, after):
        engine = Engine(engine_config(target, head, k=3))
        assert [tokens(output) for output in run(engine, asked, GREEDY)] == answers
        accepted.append(sum(engine.stats().accepted_per_position))
    assert accepted[1] > accepted[0] + 20
