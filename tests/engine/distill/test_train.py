"""One step of training, against what it should have seen."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.distill.divergence import mean_divergence
from outrider.distill.lessons import read
from outrider.distill.recipe import Recipe
from outrider.distill.train import Trainer


def model(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=1,
        num_key_value_heads=1,
    )
    return LlamaForCausalLM(config)


def test_conversations_of_one_row_do_not_see_each_other() -> None:
    conversations = [torch.randint(0, 50, (length,), dtype=torch.int32) for length in (7, 12)]
    lessons = read(model(0), conversations, batch_tokens=32)
    trainer = Trainer(Recipe(target="", out=""), model(1), torch.float32)
    loss = trainer.train_step(lessons, torch.arange(19)[None], progress=0.5)

    draft = model(1)
    alone = torch.cat([draft(c[None].long()).logits[0] for c in conversations])
    expected = mean_divergence("forward_kl", lessons.top_ids, lessons.top_log_probs, alone)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)


def test_the_last_steps_lower_another_divergence() -> None:
    lessons = read(model(0), [torch.arange(19, dtype=torch.int32)], batch_tokens=32)
    recipe = Recipe(target="", out="", last_divergence="reverse_kl", last_share=0.25)
    tokens = torch.arange(19)
    for progress, name in ((0.74, "forward_kl"), (0.75, "reverse_kl")):
        trainer = Trainer(recipe, model(1), torch.float32)
        loss = trainer.train_step(lessons, tokens[None], progress)
        logits = model(1)(tokens[None]).logits[0]
        expected = mean_divergence(name, lessons.top_ids, lessons.top_log_probs, logits)
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
