"""A small decoder-only GPT: large enough to have every kind of parameter, small enough to read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class GPTConfig:
    """Sizes; the default has 104,333 parameters, a number that none of 2, 3, 4, 5, 7 and 8
    divides."""

    vocab: int = 13  # the characters of the corpus: ten digits, "+", "=", newline
    context: int = 40  # tokens that attention can look back on
    width: int = 64
    layers: int = 2
    heads: int = 4
    dropout: float = 0.0
    tied: bool = False  # the head's matrix is the token embedding's
    recompute: bool = False  # blocks keep their input alone, and run forward again in backward
    frozen: tuple[str, ...] = ()  # parameters whose names begin so are not trained


class Embedding(nn.Module):
    """Tokens (batch, time) -> (batch, time, width): what each is, plus where it stands."""

    def __init__(self, c: GPTConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(c.vocab, c.width)
        self.position = nn.Embedding(c.context, c.width)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.token(tokens) + self.position.weight[: tokens.shape[1]]


class Block(nn.Module):
    """Attention, then a two-layer perceptron, each behind a LayerNorm and added to its input."""

    def __init__(self, c: GPTConfig) -> None:
        super().__init__()
        self.heads, self.dropout = c.heads, nn.Dropout(c.dropout)
        self.norm1 = nn.LayerNorm(c.width)
        self.qkv = nn.Linear(c.width, 3 * c.width)
        self.out = nn.Linear(c.width, c.width)
        self.norm2 = nn.LayerNorm(c.width)
        self.up = nn.Linear(c.width, 4 * c.width)
        self.down = nn.Linear(4 * c.width, c.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each (batch, heads, time, head width)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, time, width))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class Head(nn.Module):
    """(batch, time, width) -> logits (batch, time, vocab)."""

    def __init__(self, c: GPTConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(c.width)
        self.out = nn.Linear(c.width, c.vocab)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(x))


class GPT(nn.Module):
    """Embedding, blocks, head. The same seed gives the same weights on every rank."""

    def __init__(self, config: GPTConfig | None = None, seed: int = 0) -> None:
        super().__init__()
        self.config = c = config or GPTConfig()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embedding = Embedding(c)
            self.blocks = nn.ModuleList(Block(c) for _ in range(c.layers))
            self.head = Head(c)
        if c.tied:
            self.head.out.weight = self.embedding.token.weight
        for name, param in self.named_parameters():
            param.requires_grad = not name.startswith(c.frozen)

    def units(self) -> list[nn.Module]:
        """The groups of parameters that are gathered and freed together, in forward order."""
        return [self.embedding, *self.blocks, self.head]

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.config.recompute else block(x)
        return self.head(x)

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in fp32 of the next token; tokens and targets are (batch, time)."""
        return F.cross_entropy(self(tokens).float().flatten(0, 1), targets.flatten())


def num_parameters(model: nn.Module) -> int:
    """Ψ: how many parameters the model has, each counted once."""
    return sum(p.numel() for p in model.parameters())
