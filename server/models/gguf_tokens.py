"""The tokens of a GGUF file that mean something: those that end an answer, and those of a chat.

What transformers makes of the file is corrected here: it splits tokens that the file types as
ordinary text, and knows of one end only.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_PREFIX = "tokenizer.ggml."
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
# Tokens that end an answer wherever they are in a vocabulary; llama.cpp has these, too.
_ENDS = {
    "</s>", "<eos>", "[EOS]", "[EOT]", "<EOT>", "_<EOT>", "<|eot_id|>", "<|eom_id|>", "<|im_end|>",
    "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<|return|>", "<|call|>", "<|calls|>",
    "<|flush|>", "<end_of_turn>", "<turn|>", "<|tool_response>", "<end_of_utterance>",
}  # fmt: skip
# Where all of these are in a vocabulary, the last of them only ends a part of an answer.
_NO_ENDS = (
    ("<|return|>", "<|call|>", "<|end|>"),
    ("<|flush|>", "<|calls|>", "<|end|>"),
    ("<|tool_response>", "</s>"),
)
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # values of token_type
_MARKER = re.compile(r"<\|[^\s<>]+>|<[^\s<>]+\|>|<｜[^\s<>]+｜>")
# Of these a template's text says whether they are markers.
_MARKER_IN_TEMPLATE = re.compile(r"<[^\s<>]+>|\[/?[A-Z_]+\]")


def end_token_ids(metadata: Mapping[str, Any]) -> list[int]:
    """The ids of the tokens that end an answer."""
    tokens: Sequence[str] = metadata[f"{_PREFIX}tokens"]
    texts = _ENDS.intersection(tokens)
    for *others, no_end in _NO_ENDS:
        if texts.issuperset((*others, no_end)):
            texts -= {no_end}
    stated = {metadata.get(f"{_PREFIX}{key}") for key in _END_KEYS}
    ids = {i for i, token in enumerate(tokens) if i in stated or token in texts}
    return sorted(ids)


def mend_tokenizer(path: Path, metadata: Mapping[str, Any]) -> None:
    """Make each marker of the file one token, and drop tokens that the file does not have.

    transformers adds `<|endoftext|>` to every tokenizer like GPT-2's. If the file has no such
    token, its id lies beyond the embedding, and a text that contains these letters would use it.
    `path` is that of a tokenizer.json.
    """
    content = json.loads(path.read_text("utf-8"))
    tokens: Sequence[str] = metadata[f"{_PREFIX}tokens"]
    added = {token["id"]: token for token in content["added_tokens"] if token["id"] < len(tokens)}
    for i, is_special in _markers(metadata).items():
        if i in added:
            added[i]["special"] |= is_special
        else:
            _rename(content["model"], i, tokens[i])
            added[i] = {
                "id": i, "content": tokens[i], "special": is_special, "normalized": False,
                "single_word": False, "lstrip": False, "rstrip": False,
            }  # fmt: skip
    content["added_tokens"] = [added[i] for i in sorted(added)]
    path.write_text(json.dumps(content, ensure_ascii=False), "utf-8")


def _markers(metadata: Mapping[str, Any]) -> dict[int, bool]:
    """The ids of the tokens that must not be split, and whether they are hidden in answers."""
    tokens: Sequence[str] = metadata[f"{_PREFIX}tokens"]
    types = metadata.get(f"{_PREFIX}token_type") or [_NORMAL] * len(tokens)
    template = str(metadata.get("tokenizer.chat_template", ""))
    ends, found = {*end_token_ids(metadata)}, {}
    for i, (token, type_) in enumerate(zip(tokens, types, strict=False)):
        is_marker = i in ends or _MARKER.fullmatch(token) is not None
        is_in_template = _MARKER_IN_TEMPLATE.fullmatch(token) is not None and token in template
        if type_ in (_NORMAL, _CONTROL, _USER_DEFINED) and (is_marker or is_in_template):
            found[i] = i in ends or type_ == _CONTROL or (is_marker and type_ == _NORMAL)
    return found


def _rename(model: dict[str, Any], token_id: int, text: str) -> None:
    """Write a token as its text; byte-level vocabularies spell it in letters that are bytes."""
    vocab = model["vocab"]
    if isinstance(vocab, list):  # with a score each
        vocab[token_id][0] = text
    else:
        old = next((token for token, i in vocab.items() if i == token_id), text)
        vocab.pop(old, None)
        vocab[text] = token_id
