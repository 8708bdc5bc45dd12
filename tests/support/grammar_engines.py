"""Engines that know what their tokens stand for."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from engines import engine_config
from tokenizers_for_tests import byte_level_tokenizer

from outrider.engine.config import EngineConfig

TOKENIZER = byte_level_tokenizer()
VOCAB = TOKENIZER.backend.get_vocab_size()
EOS = 0
PROMPT = TOKENIZER.encode("The quick brown fox jumps", add_special_tokens=False)
OBJECT = 'start: "{" (/"k[0-9]{1,3}":/ /[a-z]{2,9}/ ",")* /"end":[0-9]{1,4}/ "}"'


def config(
    tiny_model: Callable[..., Path],
    proposer: str | tuple[str, ...] = "draft_model",
    k: int = 3,
    **settings: int,
) -> EngineConfig:
    target = tiny_model("llama", seed=0, vocab_size=VOCAB)
    draft = tiny_model("llama", seed=1, vocab_size=VOCAB)
    return replace(
        engine_config(
            target, draft if proposer == "draft_model" else None, proposer=proposer, k=k, **settings
        ),
        token_table=TOKENIZER.token_table(VOCAB),
        eos_token_ids=(EOS,),
    )
