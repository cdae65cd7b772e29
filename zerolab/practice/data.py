"""The corpus: every sum of two numbers below 100, written out, made by arithmetic alone.

A line is ten characters, `07+35=240\\n`: two digits, two digits, and the sum (042) with its
last digit first, so that each digit follows from what already stands to its left. The 10,000
lines come in an order that a formula shuffles; the last 500 are kept for testing.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHARACTERS = "0123456789+=\n"
LINE = 10  # characters a line
LINES = 10_000
TRAIN_LINES = 9_500
_TOKEN = {character: token for token, character in enumerate(CHARACTERS)}


def line(index: int) -> str:
    """Line number `index` of the shuffled corpus, for any integer; it repeats after 10,000."""
    left, right = divmod((index * 7919 + 4321) % LINES, 100)  # 7919 is prime: a permutation
    return f"{left:02d}+{right:02d}={f'{left + right:03d}'[::-1]}\n"


def encode(text: str) -> list[int]:
    """Characters to tokens 0..12."""
    return [_TOKEN[character] for character in text]


def decode(tokens: list[int]) -> str:
    """Tokens to characters."""
    return "".join(CHARACTERS[token] for token in tokens)


def batch(
    step: int, rank: int, world_size: int, sequences: int = 4, lines: int = 4
) -> tuple[Tensor, Tensor]:
    """This rank's micro-batch of a step: tokens and targets, each (sequences, 10 * lines - 1).

    All ranks together read on through the training lines; no two ranks get the same ones.
    Targets are the tokens one place later.
    """
    return batch_from((step * world_size + rank) * sequences * lines, sequences, lines)


def batch_from(first: int, sequences: int, lines: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets of the training lines from number `first` on, `lines` in a sequence."""
    rows = [
        encode("".join(line((first + row * lines + i) % TRAIN_LINES) for i in range(lines)))
        for row in range(sequences)
    ]
    tokens = torch.tensor(rows, dtype=torch.long).view(sequences, LINE * lines)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
