"""The model card: what the draft is, how it was made, how often it agrees with its target."""

import json
from dataclasses import asdict
from itertools import accumulate
from operator import mul
from pathlib import Path

from outrider.engine.models.heads.config import head_kind

from .recipe import Extent, Recipe
from .train import HeldOut

_CARD = """\
---
library_name: transformers
pipeline_tag: text-generation
tags: [speculative-decoding, draft]
---

# A draft for {target}

A small model with the tokenizer of {target}, for speculative decoding: it proposes, the target
verifies. Made by `outrider distill`; it is not meant to be used alone. The target's licence and
notices, where it came with any, lie beside this file and hold for the draft.

| in held-out answers of the target | |
|---|---|
| the draft's first choice is the target's | {greedy:.3f} |
| a draft drawn at temperature 1 is accepted | {sampled:.3f} |

Measured over {num_tokens} tokens, each given the target's own text before it.

## Data

{data} Half of the target's answers are greedy, the others drawn at temperatures from 0.6 to 1.
No other text was used.

## Training

{start}
Loss: {divergence} to the target's distribution at every token of its answers, in the last
{last_share:.0%} of the steps {last_divergence}; Muon for matrices, AdamW for the rest; one linear
rise and half a cosine, {num_steps} steps over {num_shards} shards of text. The recipe, whole:

```json
{recipe}
```
"""


_HEAD_CARD = """\
---
tags: [speculative-decoding, {kind}]
---

# {name} head for {target}

It reads the hidden states of {target} and proposes what the target then verifies. Made by
`outrider distill --kind {kind}`; without its target it is of no use. The target's licence and
notices, where it came with any, lie beside this file and hold for the head.

| in held-out answers | first choice is the target's | drawn at temperature 1, accepted |
|---|---|---|
{drafts}

Measured over {num_tokens} tokens, each draft behind the target's own text. If drafts are accepted
as often one behind the other, a step of {k} greedy drafts gives {tokens:.2f} tokens.

## Data

{data} Half of the target's answers are greedy, the others drawn at temperatures from 0.6 to 1.
No other text was used.

## Training

{drafting} Loss: {divergence} to the target's distribution over
the drafted tokens, in the last {last_share:.0%} of the steps {last_divergence}; {num_steps} steps
over {num_shards} shards of text. {start} The recipe, whole:

```json
{recipe}
```
"""


def write_card(recipe: Recipe, extent: Extent, held_out: HeldOut, folder: Path) -> None:
    data = (
        f"User turns from `{recipe.prompts}`, half of them whole, half of them finished by the "
        "target, or about a text that it wrote before, and its answers."
        if recipe.prompts
        else "Conversations that the target wrote by itself: the user's turn, from nothing, from a "
        "few words or about a text that it wrote before, and the answer."
    )
    if recipe.raw_share:
        data += (
            f" {recipe.raw_share:.0%} of the texts are no chats: from a few words on, the target "
            "continued them without its chat template."
        )
    start = (
        f"Went on from `{Path(recipe.start).name}`."
        if recipe.start
        else f"New, {recipe.size} (layers x width): a Llama, its embedding (tied to the head) the\n"
        "target's along its strongest axes, its layers from random."
    )
    names = {
        "eagle3": "An EAGLE-3",
        "mtphead": "An MTP",
        "dflash": "A DFlash",
        "dspark": "A DSpark",
        "dflash2": "A DFlash2",
    }
    each = [(held_out.greedy_agreement, held_out.sampled_acceptance), *held_out.later]
    drafting = f"A training-time test of {len(each)} drafts in a row."
    if recipe.kind == "eagle3":
        start = (
            "It drafts the most frequent\ntokens of the text. The embedding is the target's, and "
            "output layer and last norm begin as the\ntarget's."
        )
    if recipe.kind in ("mtp", "dflash"):
        start = (
            f"It began as the head in\n`{Path(recipe.start or recipe.target).name}`; embedding and "
            "output layer are not trained."
        )
    if recipe.kind == "dflash":
        drafting = f"Blocks of {len(each)} drafts, spread over the target's text."
    (folder / "README.md").write_text(
        (_CARD if recipe.kind == "draft" else _HEAD_CARD).format(
            kind=recipe.kind,
            name=names.get(head_kind(folder) or recipe.kind, ""),
            drafting=drafting,
            target=Path(recipe.target).name,
            greedy=held_out.greedy_agreement,
            sampled=held_out.sampled_acceptance,
            drafts="\n".join(
                f"| draft {i} | {g:.3f} | {s:.3f} |" for i, (g, s) in enumerate(each, 1)
            ),
            num_tokens=held_out.num_tokens,
            k=len(each),
            tokens=1 + sum(accumulate((greedy for greedy, _ in each), mul)),
            data=data,
            start=start,
            divergence=recipe.divergence.replace("_", " "),
            last_divergence=recipe.last_divergence.replace("_", " "),
            last_share=recipe.last_share,
            num_steps=extent.num_steps,
            num_shards=extent.num_shards,
            recipe=_whole(recipe),
        )
    )


def _whole(recipe: Recipe) -> str:
    """The recipe as JSON, its folders by their names alone."""
    settings = asdict(recipe)
    for folder in ("target", "out", "start", "text"):
        settings[folder] = settings[folder] and Path(settings[folder]).name
    return json.dumps(settings, indent=2)
