"""Custom logits processors of the kinds that operators write."""

from typing import Any

import torch
from torch import Tensor


class FavourParity:
    """Adds to the tokens whose parity is that of the number of tokens before."""

    def __init__(self, bias: float = 1.0) -> None:
        self._bias = bias

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        ids = torch.arange(scores.shape[1], device=scores.device)
        return scores + self._bias * (ids % 2 == input_ids.shape[1] % 2)


class Unban:
    """Tries to bring every token back."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.nan_to_num(neginf=100.0)


class FailOn:
    """Raises once a token is among those before."""

    def __init__(self, token_id: int) -> None:
        self._token_id = token_id

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self._token_id in input_ids[0].tolist():
            raise RuntimeError(f"met {self._token_id}")
        return scores


class WrongShape:
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores[:, 1:]


class AsArray:
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Any:
        return scores.cpu().numpy()


class RoundDown:
    """Returns integers."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.long()


class KeepTo:
    """Raises behind anything but the beginning of a text."""

    def __init__(self, token_ids: list[int]) -> None:
        self._token_ids = token_ids

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        given = input_ids[0].tolist()
        if given != self._token_ids[: len(given)]:
            raise RuntimeError("off the text")
        return scores
