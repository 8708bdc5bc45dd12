"""What a grammar does to speculation: acceptance with and without masked drafts, and what it costs.

    .venv/bin/python benchmarks/structured_output.py [--new-tokens 48]

The default target answers eight questions as JSON, all in one batch. Its draft is the one
that ships for it, or prompt lookup. Without masks the draft's proposals may leave the grammar, and
are rejected where they do.
"""

import argparse
import json
import statistics
import time
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoTokenizer

from outrider.engine.api import NewRequest, SamplingParams, ignore_progress
from outrider.engine.config import CacheConfig, EngineConfig, ModelConfig, SpeculationConfig
from outrider.engine.engine import Engine
from outrider.engine.grammars.grammar import compute_masks
from outrider.engine.grammars.grammar_compiler import GrammarCompiler
from outrider.engine.logit_edits import RequestRows
from outrider.engine.logit_edits.grammars import Grammars
from outrider.server.grammar.structured_outputs import lark_of_schema
from outrider.server.models.builtin import BUILTINS, obtain
from outrider.server.text.tokenizer import Tokenizer, TokenizerData

K = 4
_apply = Grammars.apply
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "year": {"type": "integer", "minimum": 0, "maximum": 2100},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 4},
        "kind": {"enum": ["person", "place", "thing"]},
    },
    "required": ["name", "year", "tags", "kind"],
    "additionalProperties": False,
}
SUBJECTS = [
    "the Eiffel Tower",
    "Ada Lovelace",
    "Mount Everest",
    "the printing press",
    "Marie Curie",
    "the Pacific Ocean",
    "the bicycle",
    "Johann Sebastian Bach",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    target = obtain(BUILTINS["smollm2-135m-instruct"], ignore_progress)
    tokenizer = Tokenizer(TokenizerData.of(AutoTokenizer.from_pretrained(target)))
    assert tokenizer.chat_template is not None
    prompts = [
        tokenizer.encode(
            tokenizer.chat_template.render(
                [
                    {
                        "role": "user",
                        "content": f"Describe {subject} as JSON of this schema: "
                        f"{json.dumps(SCHEMA['properties'])}",
                    }
                ],
                tools=[],
                add_generation_prompt=True,
                continue_final_message=False,
                variables={},
            ),
            add_special_tokens=False,
        )
        for subject in SUBJECTS
    ]
    table = Table("drafts", "temperature", "masked", "accepted", "tokens/step", "masks/step")
    draft = obtain(BUILTINS["smollm2-135m-instruct-draft"], ignore_progress)
    base = EngineConfig(
        target=ModelConfig(path=str(target), dtype=args.dtype),
        eos_token_ids=(tokenizer.backend.token_to_id("<|im_end|>"),),
        token_table=tokenizer.token_table(tokenizer.backend.get_vocab_size()),
        cache=CacheConfig(num_pages=1024, prefix_caching=True),
    )
    speculation = SpeculationConfig(num_speculative_tokens=K, adaptive=False)
    engines = {
        "draft": Engine(
            replace(
                base,
                draft=ModelConfig(path=str(draft), dtype=args.dtype),
                speculation=speculation,
            )
        ),
        "looked up": Engine(replace(base, speculation=replace(speculation, sources=("suffix",)))),
    }
    for name, engine in engines.items():
        for temperature in (0.0, 1.0):
            for masked in (True, False) if engine.info.proposer == "draft_model" else (True,):
                figures = run(engine, prompts, temperature, masked, args.new_tokens)
                table.add_row(name, str(temperature), str(masked), *figures)
    Console().print(table)
    report_masks(base, tokenizer)


def run(
    engine: Engine, prompts: list[list[int]], temperature: float, masked: bool, new_tokens: int
) -> list[str]:
    """Share of drafts accepted; tokens of a sequence a step; share of a step's time for masks."""
    mask_drafts(engine, masked)
    spent_s = timed_masks()
    params = SamplingParams(
        max_tokens=new_tokens,
        temperature=temperature,
        grammar=lark_of_schema(SCHEMA | {"x-guidance": {"whitespace_flexible": False}}).text,
    )
    before = engine.stats()
    engine.submit(
        [
            NewRequest(request_id=str(i), prompt_token_ids=prompt, params=replace(params, seed=i))
            for i, prompt in enumerate(prompts)
        ]
    )
    start_s = time.perf_counter()
    num_tokens = num_steps = 0
    while engine.has_work():
        for output in engine.step():
            num_tokens += len(output.token_ids)
            num_steps += bool(output.token_ids)
    elapsed_s = time.perf_counter() - start_s
    after = engine.stats()
    accepted = sum(after.accepted_per_position) - sum(before.accepted_per_position)
    drafted = sum(after.drafted_per_position) - sum(before.drafted_per_position)
    return [
        f"{accepted / max(drafted, 1):.3f}",
        f"{num_tokens / num_steps:.2f}",
        f"{spent_s[0] / elapsed_s:.2%}",
    ]


def timed_masks() -> list[float]:
    """Seconds that grammars take from now on, from drafts to edited logits."""
    spent_s = [0.0]

    def apply(edit: Grammars, logits: Tensor, rows: RequestRows) -> None:
        start_s = time.perf_counter()
        _apply(edit, logits, rows)
        spent_s[0] += time.perf_counter() - start_s

    Grammars.apply = apply  # type: ignore[method-assign]
    return spent_s


def mask_drafts(engine: Engine, masked: bool) -> None:
    """Let drafts leave the grammar, as if only the target knew it; or do not, as usual."""
    of_draws = vars(engine.worker.proposer.sources[-1].draws)
    of_draws.pop("_edited", None)
    if not masked:
        of_draws["_edited"] = lambda logits, slots_np, j: logits


def report_masks(config: EngineConfig, tokenizer: Tokenizer) -> None:
    """Time of compiling the schema, and of each mask along a text of it."""
    assert config.token_table is not None
    text = json.dumps(
        {"name": "Eiffel Tower", "year": 1889, "tags": ["iron", "tall"], "kind": "place"}
    )
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    compiler = GrammarCompiler(
        config.token_table, config.eos_token_ids, len(config.token_table.token_bytes)
    )
    start_s = time.perf_counter()
    grammar = compiler.start(lark_of_schema(SCHEMA).text)
    grammar.process.begun.result()
    compiled_s = time.perf_counter() - start_s
    times_s = []
    for token_id in token_ids:
        start_s = time.perf_counter()
        compute_masks([grammar])
        grammar.follow([token_id])
        times_s.append(time.perf_counter() - start_s)
    assert grammar.error is None
    print(
        f"compiled in {compiled_s * 1e3:.1f} ms; {len(times_s)} masks of "
        f"{len(config.token_table.token_bytes)} tokens, each and its token: median "
        f"{statistics.median(times_s) * 1e6:.0f} µs, longest {max(times_s) * 1e6:.0f} µs"
    )


if __name__ == "__main__":
    main()
