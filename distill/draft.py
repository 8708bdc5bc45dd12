"""The untrained draft: an ordinary small Llama with the target's vocabulary and embedding."""

from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedConfig, PreTrainedModel

from outrider.engine.models.admission import max_positions
from outrider.engine.models.architectures import load_config
from outrider.engine.models.pretrained import load_pretrained

from .recipe import DistillError, Recipe, Size

_MLP_RATIO = 4  # few wide layers: with few rows, a layer's launches cost most
_WEIGHT_STD = 0.02


def draft_to_train(
    target: PreTrainedModel, recipe: Recipe, device: torch.device
) -> PreTrainedModel:
    """The draft that the recipe starts from, or a new one; float32."""
    if recipe.start is None:
        return new_draft(target, Size.parse(recipe.size), recipe.seed, device)
    return load_start(recipe.start, target.config, device)


def load_start(
    start: str, target_config: PreTrainedConfig, device: torch.device
) -> PreTrainedModel:
    """The draft to go on from; raises DistillError if it cannot be trained for the target."""
    try:
        draft = load_pretrained(Path(start), load_config(start), device, dtype=torch.float32)
    except (OSError, ValueError, KeyError) as error:
        raise DistillError(f"start: cannot load {start}: {error}") from error
    sizes = [config.get_text_config().vocab_size for config in (draft.config, target_config)]
    if sizes[0] != sizes[1]:
        raise DistillError(
            f"start: {start} has a vocabulary of {sizes[0]} tokens, the target one of "
            f"{sizes[1]}; go on from a draft with the target's tokenizer"
        )
    if not _head_is_a_product(draft):
        raise DistillError(
            f"start: {start} caps or scales its logits; go on from a model that does not"
        )
    return draft


@torch.no_grad()
def _head_is_a_product(draft: PreTrainedModel) -> bool:
    """Training multiplies states by the head itself, for answers alone."""
    token = torch.zeros(1, 1, dtype=torch.int64, device=draft.device)
    states = draft.get_decoder()(token).last_hidden_state
    return torch.allclose(draft.get_output_embeddings()(states), draft(token).logits)


def new_draft(
    target: PreTrainedModel, size: Size, seed: int, device: torch.device
) -> LlamaForCausalLM:
    """A float32 draft: random layers, with the target's embedding narrowed to its main axes."""
    text_config = target.config.get_text_config()
    num_heads = size.hidden_size // size.head_dim
    config = LlamaConfig(
        vocab_size=text_config.vocab_size,
        hidden_size=size.hidden_size,
        intermediate_size=_MLP_RATIO * size.hidden_size,
        num_hidden_layers=size.num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads,
        head_dim=size.head_dim,
        max_position_embeddings=max_positions(target.config),
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        initializer_range=_WEIGHT_STD,
        bos_token_id=text_config.bos_token_id,
        eos_token_id=text_config.eos_token_id,
        pad_token_id=text_config.pad_token_id,
        dtype=torch.float32,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        draft = LlamaForCausalLM(config)
    draft.to(device=device)  # type: ignore[call-arg]
    embedding = target.get_output_embeddings().get_parameter("weight")
    with torch.no_grad():
        draft.model.embed_tokens.weight.copy_(narrowed(embedding, size.hidden_size))
    return draft


@torch.no_grad()
def narrowed(embedding: Tensor, width: int) -> Tensor:
    """The embedding projected on its `width` strongest axes: [V, H] -> [V, width], float32.

    No other matrix of this rank preserves the inner products between rows better, and a tied head
    uses those.
    """
    rows = embedding.float()
    _, axes = torch.linalg.eigh(rows.T @ rows)  # ascending
    out = torch.zeros(len(rows), width, device=rows.device)
    kept = min(width, rows.shape[1])
    out[:, :kept] = rows @ axes[:, -kept:]
    return out
