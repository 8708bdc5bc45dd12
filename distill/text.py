"""The target writes conversations with our own engine, which decodes many at once, plainly."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from outrider.engine.api import NewRequest, SamplingParams
from outrider.engine.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from outrider.engine.engine import Engine

from .prompts import (
    OPENINGS,
    RAW_OPENINGS,
    TASKS,
    ChatFrame,
    encode,
    frame,
    load_tokenizer,
    user_turns,
    words,
)
from .recipe import Recipe, damage_named
from .whole_file import whole_file

_MAX_BATCHED_TOKENS = 16384
_GREEDY_SHARE = 0.5
_COOLEST, _COOLEST_USER, _WARMEST = 0.6, 0.7, 1.0
_USER_MIN_P = 0.05  # cuts off the tail of the distribution: noise that no user would type
_ABOUT_TEXT_SHARE = 0.3  # share of the conversations that are about an earlier one's text
_SHORTEST_TEXT = 24  # tokens
_TASK_FIRST_SHARE = 0.5  # share that asks before the text; the others ask after it
_WHOLE_SHARE = 0.5  # share of the given user turns that are taken whole; the others begin one


@dataclass(frozen=True, slots=True)
class Conversation:
    """A prompt and what the target answered."""

    token_ids: torch.Tensor  # [length] int32
    num_prompt_tokens: int


def longest_conversation(recipe: Recipe, frame: ChatFrame) -> int:
    """In tokens."""
    framing = len(frame.before) + len(frame.after or [])
    return framing + recipe.max_prompt_tokens + recipe.max_answer_tokens


class Writer:
    """Writes shards of conversations; shard i is the same whichever process writes it, and when."""

    def __init__(self, recipe: Recipe, device: str, share_of_memory: float = 0.5) -> None:
        self._recipe = recipe
        self._tokenizer = load_tokenizer(recipe.target)
        self._frame: ChatFrame = frame(self._tokenizer, recipe.target)
        self._turns = (tuple(user_turns(recipe.prompts)),) if recipe.prompts else None
        self._words = words(self._tokenizer)
        num_seqs = recipe.conversations_per_shard
        self._engine = Engine(
            EngineConfig(
                target=ModelConfig(path=recipe.target),
                device=device,
                batch_invariant=False,  # text need not come out the same in another batch
                num_threads=None if device == "cpu" else 1,
                eos_token_ids=self._frame.eos_token_ids,
                gpu_memory_utilization=share_of_memory,
                max_model_len=longest_conversation(recipe, self._frame),
                speculation=SpeculationConfig(sources=()),
                cache=CacheConfig(prefix_caching=False, memory_fraction=share_of_memory),
                scheduler=SchedulerConfig(
                    max_num_seqs=num_seqs,
                    max_num_batched_tokens=max(_MAX_BATCHED_TOKENS, num_seqs),
                    max_queue_len=num_seqs,
                ),
            )
        )

    def write(self, shard: int, path: Path) -> int:
        """Write one shard to `path`, completely or not at all; returns its number of tokens."""
        rng = np.random.default_rng([self._recipe.seed, shard])
        num_seqs = self._recipe.conversations_per_shard
        has_template = self._frame.after is not None
        num_raw = int(num_seqs * self._recipe.raw_share) if has_template else 0
        num_about = int((num_seqs - num_raw) * _ABOUT_TEXT_SHARE) if has_template else 0
        prompts = self._ask(num_seqs - num_raw - num_about, rng) + self._begin(num_raw, rng)
        conversations = self._answer(prompts, rng)
        if num_about:
            answers = [c[len(p) :] for c, p in zip(conversations, prompts, strict=True)]
            about = self._ask_about(answers, num_about, rng)
            prompts += about
            conversations += self._answer(about, rng)
        save_shard(conversations, prompts, path)
        return sum(map(len, conversations))

    def _ask(self, num_seqs: int, rng: np.random.Generator) -> list[list[int]]:
        """Prompts: user turns inside the template.

        The target continues a few words of ours, or some of the given turns' first tokens; other
        given turns are taken whole.
        """
        recipe = self._recipe
        kinds = self._turns or OPENINGS
        chosen = [
            kinds[i][rng.integers(len(kinds[i]))] for i in rng.integers(len(kinds), size=num_seqs)
        ]
        turns = [encode(self._tokenizer, text)[: recipe.max_prompt_tokens] for text in chosen]
        after = self._frame.after
        if after is None:
            return [self._frame.before + turn for turn in turns]
        whole: list[list[int]] = []
        if self._turns is not None:
            num_whole = int(num_seqs * _WHOLE_SHARE)
            whole = [self._frame.before + turn for turn in turns[:num_whole]]
            turns = [turn[: rng.integers(max(1, len(turn)))] for turn in turns[num_whole:]]
        begun = self._complete(
            [self._frame.before + turn for turn in turns],
            [max(1, recipe.max_prompt_tokens - len(turn)) for turn in turns],
            rng.uniform(_COOLEST_USER, _WARMEST, len(turns)),
            rng,
            min_p=_USER_MIN_P,
        )
        eos = self._frame.eos_token_ids
        begun = [turn[:-1] if turn[-1] in eos else turn for turn in begun]
        return [turn + after for turn in whole + begun]

    def _begin(self, num_seqs: int, rng: np.random.Generator) -> list[list[int]]:
        """Prompts without the template: beginnings of texts, most of them short.

        The target continues a few words of ours; what it would have ended is cut before its end.
        """
        openings = []
        for i in rng.integers(len(RAW_OPENINGS), size=num_seqs):
            opening = RAW_OPENINGS[i][rng.integers(len(RAW_OPENINGS[i]))]
            word = self._words[rng.integers(len(self._words))]
            opening = opening.format(word.capitalize() if opening.startswith("{}") else word)
            # With the special tokens that a server puts before a text.
            openings.append(self._tokenizer.encode(opening)[: self._recipe.max_prompt_tokens])
        room = self._recipe.max_prompt_tokens * rng.random(num_seqs) ** 3
        begun = self._complete(
            openings,
            [
                max(1, int(most) - len(opening))
                for most, opening in zip(room, openings, strict=True)
            ],
            rng.uniform(_COOLEST_USER, _WARMEST, num_seqs),
            rng,
            min_p=_USER_MIN_P,
        )
        eos = self._frame.eos_token_ids
        return [
            text[: rng.integers(len(opening), len(text))] if text[-1] in eos else text
            for text, opening in zip(begun, openings, strict=True)
        ]

    def _ask_about(
        self, answers: list[list[int]], num_seqs: int, rng: np.random.Generator
    ) -> list[list[int]]:
        """Prompts about texts that the target wrote before, pasted as users paste them."""
        texts = [answer for answer in answers if len(answer) >= _SHORTEST_TEXT] or answers
        prompts = []
        for _ in range(num_seqs):
            task = TASKS[rng.integers(len(TASKS))]
            room = max(0, self._recipe.max_prompt_tokens - len(encode(self._tokenizer, task)) - 2)
            shown: Any = self._tokenizer.decode(
                texts[rng.integers(len(texts))][:room], skip_special_tokens=True
            )
            parts = [task, shown.strip()]
            if rng.random() >= _TASK_FIRST_SHARE:
                parts.reverse()
            turn = encode(self._tokenizer, "\n\n".join(parts))[: self._recipe.max_prompt_tokens]
            prompts.append(self._frame.before + turn + (self._frame.after or []))
        return prompts

    def _answer(self, prompts: list[list[int]], rng: np.random.Generator) -> list[list[int]]:
        temperatures = np.where(
            rng.random(len(prompts)) < _GREEDY_SHARE,
            0.0,
            rng.uniform(_COOLEST, _WARMEST, len(prompts)),
        )
        max_tokens = [self._recipe.max_answer_tokens] * len(prompts)
        return self._complete(prompts, max_tokens, temperatures, rng)

    def _complete(
        self,
        prompts: list[list[int]],
        max_tokens: list[int],
        temperatures: np.ndarray,
        rng: np.random.Generator,
        min_p: float = 0.0,
    ) -> list[list[int]]:
        """Each prompt, with the target's continuation of so many tokens at most."""
        completed = [list(prompt) for prompt in prompts]
        seeds = rng.integers(2**63, size=len(prompts)).tolist()
        settings = zip(max_tokens, temperatures.tolist(), seeds, strict=True)
        params = [
            SamplingParams(max_tokens=most, temperature=temperature, min_p=min_p, seed=seed)
            for most, temperature, seed in settings
        ]
        self._engine.submit(
            [
                NewRequest(request_id=str(i), prompt_token_ids=prompt, params=p)
                for i, (prompt, p) in enumerate(zip(prompts, params, strict=True))
            ]
        )
        while self._engine.has_work():
            for output in self._engine.step():
                completed[int(output.request_id)] += output.token_ids
        return completed


def save_shard(conversations: list[list[int]], prompts: list[list[int]], path: Path) -> None:
    """Conversations as one row of tokens, with their lengths and their prompts', in a file."""
    tokens = [token_id for conversation in conversations for token_id in conversation]
    with whole_file(path) as scratch:
        save_file(
            {
                "tokens": torch.tensor(tokens, dtype=torch.int32),
                "lengths": torch.tensor([len(c) for c in conversations], dtype=torch.int32),
                "prompt_lengths": torch.tensor([len(p) for p in prompts], dtype=torch.int32),
            },
            scratch,
        )


def load_shards(paths: list[Path]) -> list[Conversation]:
    """All conversations of these shards, in order."""
    conversations: list[Conversation] = []
    for path in paths:
        with damage_named(path):
            shard = load_file(path)
            token_ids = shard["tokens"].split(shard["lengths"].tolist())
            conversations += map(Conversation, token_ids, shard["prompt_lengths"].tolist())
    return conversations


def text_folder(recipe: Recipe, work: Path) -> Path:
    """Where the text is kept: with the rest of the work, unless other recipes use it too."""
    return Path(recipe.text).absolute() if recipe.text else work


def shard_path(folder: Path, shard: int) -> Path:
    return folder / f"conversations-{shard:05}.safetensors"


def num_tokens_of(path: Path) -> int:
    with damage_named(path), safe_open(path, "pt") as shard:
        return int(shard.get_slice("tokens").get_shape()[0])
