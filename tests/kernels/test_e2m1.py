"""Numbers of 4 bits: how they are kept, and the instructions that convert them."""

import pytest
import torch

from outrider.kernels.model import e2m1
from outrider.kernels.triton_or_none import tl

WORD = (1 << 32) - 1


def random_words(count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    words = torch.randint(-(2**31), 2**31, (count,), dtype=torch.int64, generator=generator)
    return words.to(torch.int32)


def test_unpacking_gives_back_what_was_packed() -> None:
    words = random_words(10_000)
    assert torch.equal(e2m1.unpack(e2m1.pack(words)), words)
    assert not torch.equal(e2m1.pack(words), words)


@pytest.mark.skipif(not hasattr(tl, "constexpr"), reason="needs Triton")
@pytest.mark.parametrize("half", ["LOW", "HIGH"])
@pytest.mark.parametrize(
    ("name", "dtype", "power"), [("BFLOAT16", torch.bfloat16, 126), ("FLOAT16", torch.float16, 14)]
)
def test_instructions_give_the_numbers_of_a_word(
    name: str, dtype: torch.dtype, power: int, half: str
) -> None:
    """All but the last, which multiplies by a power of two."""
    code = getattr(e2m1, f"_{name}_{half}").value
    for words in random_words(200).split(1):
        pairs = converted(code, int(e2m1.pack(words)) & WORD)
        bits = torch.tensor(pairs, dtype=torch.int64).to(torch.int32).view(dtype)
        codes = words.view(torch.uint8).int()
        numbers = torch.tensor(e2m1.VALUES)[codes >> 4 if half == "HIGH" else codes & 15]
        assert torch.equal(bits.double(), torch.ldexp(numbers.double(), torch.tensor(-power)))


def converted(code: str, word: int) -> list[int]:
    """The pairs of numbers, each before its fma."""
    registers: dict[str, int] = {"$4": word}
    pairs = []

    def value(operand: str) -> int:
        return registers[operand] if operand in registers else int(operand, 0)

    for line in code.strip("{}").split(";"):
        name, _, rest = line.strip().partition(" ")
        operands = [each.strip() for each in rest.split(",")]
        if name.startswith("fma"):
            pairs.append(registers[operands[1]])
        elif name not in ("", ".reg") and "{" not in rest:
            target, *values = operands[0], *map(value, operands[1:])
            registers[target] = INSTRUCTIONS[name](*values) & WORD
    return pairs


INSTRUCTIONS = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "shl.b32": lambda a, b: a << b,
    "shr.b32": lambda a, b: a >> b,
    "shf.r.wrap.b32": lambda a, b, c: (b << 32 | a) >> c,
}
