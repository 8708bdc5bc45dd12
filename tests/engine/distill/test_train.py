"""One step of training, against what it should have seen."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.distill.divergence import agreement, mean_divergence
from outrider.distill.lessons import read
from outrider.distill.recipe import Recipe
from outrider.distill.text import Conversation
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


def test_conversations_of_one_row_do_not_see_each_other_and_answers_count() -> None:
    ids = [torch.randint(0, 50, (length,), dtype=torch.int32) for length in (7, 12)]
    conversations = [Conversation(ids[0], 3), Conversation(ids[1], 1)]
    lessons = read(model(0), conversations, batch_tokens=32)
    trainer = Trainer(Recipe(target="", out=""), model(1), torch.float32)
    loss = trainer.train_step(lessons, torch.arange(19)[None], progress=0.5)

    # What each token of an answer was drafted from: the token before it.
    answered = torch.tensor([2, 3, 4, 5, *range(7, 18)])
    draft = model(1)
    alone = torch.cat([draft(c[None].long()).logits[0] for c in ids])
    top_ids, top_log_probs = lessons.top_ids[answered], lessons.top_log_probs[answered]
    expected = mean_divergence("forward_kl", top_ids, top_log_probs, alone[answered])
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)

    held_out = Trainer(Recipe(target="", out=""), model(1), torch.float32).evaluate(lessons)
    same, overlap = agreement(top_ids, top_log_probs, alone[answered])
    assert held_out.num_tokens == len(answered)
    assert held_out.greedy_agreement == same.item() / len(answered)
    assert held_out.sampled_acceptance == pytest.approx(overlap.item() / len(answered), rel=1e-5)


def test_the_last_steps_lower_another_divergence() -> None:
    conversation = Conversation(torch.arange(19, dtype=torch.int32), 1)
    lessons = read(model(0), [conversation], batch_tokens=32)
    recipe = Recipe(target="", out="", last_share=0.25)
    tokens = torch.arange(19)
    for progress, name in ((0.74, "forward_kl"), (0.75, "total_variation")):
        trainer = Trainer(recipe, model(1), torch.float32)
        loss = trainer.train_step(lessons, tokens[None], progress)
        logits = model(1)(tokens[None]).logits[0]
        expected = mean_divergence(
            name, lessons.top_ids[:-1], lessons.top_log_probs[:-1], logits[:-1]
        )
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
