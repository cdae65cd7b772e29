"""GPT-3 and Llama in their true shapes, for runs on tensors without memory (`dry_run`).

Only what the bytes depend on is here: every parameter, and every activation that backward needs.
The shapes are those of the papers' tables and of the released checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zerolab.practice.gpt import Block, Embedding, GPTConfig


@dataclass(frozen=True)
class Architecture:
    """Sizes of a decoder. `gated` is Llama's style: RMS norms, rotary positions, no biases.

    `ffn` and `kv_heads` are Llama's alone; GPT's perceptron is four widths wide. With `tied` the
    head's matrix is the token embedding's.
    """

    name: str
    layers: int
    width: int
    heads: int
    vocab: int
    context: int
    tied: bool = False
    gated: bool = False
    ffn: int = 0
    kv_heads: int = 0


_GPT2, _LLAMA2, _LLAMA3 = (50257, 1024, True), (32000, 4096, False, True), (128256, 8192)
ARCHITECTURES = {
    a.name: a
    for a in (  # layers, width, heads, vocabulary, context, tied, gated, ffn, heads of keys
        Architecture("gpt2", 12, 768, 12, *_GPT2),
        Architecture("gpt2-medium", 24, 1024, 16, *_GPT2),
        Architecture("gpt2-large", 36, 1280, 20, *_GPT2),
        Architecture("gpt2-xl", 48, 1600, 25, *_GPT2),
        Architecture("gpt3-175b", 96, 12288, 96, 50257, 2048, True),
        Architecture("llama2-7b", 32, 4096, 32, *_LLAMA2, 11008, 32),
        Architecture("llama2-13b", 40, 5120, 40, *_LLAMA2, 13824, 40),
        Architecture("llama2-70b", 80, 8192, 64, *_LLAMA2, 28672, 8),
        Architecture("llama3.2-1b", 16, 2048, 32, 128256, 131072, True, True, 8192, 8),
        Architecture("llama3-8b", 32, 4096, 32, *_LLAMA3, False, True, 14336, 8),
        Architecture("llama3-70b", 80, 8192, 64, *_LLAMA3, False, True, 28672, 8),
        Architecture("llama3-405b", 126, 16384, 128, *_LLAMA3, False, True, 53248, 8),
    )
}


def architecture(name: str) -> Architecture:
    """The architecture of that name, hyphens aside; ValueError with the nearest names."""
    plain = {known.replace("-", ""): known for known in ARCHITECTURES}
    wanted = str(name).lower().replace("-", "")
    if wanted in plain:
        return ARCHITECTURES[plain[wanted]]
    near = [plain[match] for match in get_close_matches(wanted, plain, n=3, cutoff=0.3)]
    raise ValueError(f"The model {name!r} cannot be built; the nearest are {', '.join(near)}."
                     if near else f"The model {name!r} cannot be built; there are "
                     f"{', '.join(ARCHITECTURES)}.")  # fmt: skip


class LlamaBlock(nn.Module):
    """Grouped-query attention and a gated perceptron, each behind an RMS norm."""

    def __init__(self, a: Architecture) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head = a.heads, a.kv_heads, a.width // a.heads

        def linear(n: int, m: int) -> nn.Linear:
            return nn.Linear(n, m, bias=False)

        kv = self.kv_heads * self.head
        self.norm1, self.norm2 = nn.RMSNorm(a.width, eps=1e-5), nn.RMSNorm(a.width, eps=1e-5)
        self.query, self.out = linear(a.width, a.width), linear(a.width, a.width)
        self.key, self.value = linear(a.width, kv), linear(a.width, kv)
        self.gate, self.up = linear(a.width, a.ffn), linear(a.width, a.ffn)
        self.down = linear(a.ffn, a.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, _ = x.shape
        y = self.norm1(x)
        query = _rotated(self.query(y).view(batch, time, self.heads, self.head).transpose(1, 2))
        key = _rotated(self.key(y).view(batch, time, self.kv_heads, self.head).transpose(1, 2))
        value = self.value(y).view(batch, time, self.kv_heads, self.head).transpose(1, 2)
        grouped = self.kv_heads < self.heads
        attended = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=grouped
        )
        x = x + self.out(attended.transpose(1, 2).reshape(batch, time, -1))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def _rotated(x: Tensor) -> Tensor:
    """Rotary positions of (batch, heads, time, head): each pair turned by an angle of its own."""
    time, half = x.shape[-2], x.shape[-1] // 2
    rates = 10_000.0 ** (-torch.arange(half, device=x.device) / half)
    angles = torch.arange(time, device=x.device)[:, None] * rates
    cosine, sine = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    left, right = x[..., :half], x[..., half:]
    return torch.cat([left * cosine - right * sine, left * sine + right * cosine], dim=-1)


class Head(nn.Module):
    """(batch, time, width) -> logits (batch, time, vocab), without a bias."""

    def __init__(self, a: Architecture) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(a.width, eps=1e-5) if a.gated else nn.LayerNorm(a.width)
        self.out = nn.Linear(a.width, a.vocab, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(x))


class Decoder(nn.Module):
    """A model of an architecture, with the units that the stages and fully_shard want."""

    def __init__(self, a: Architecture, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        config = GPTConfig(vocab=a.vocab, context=a.context, width=a.width, heads=a.heads)
        embedding = nn.Embedding(a.vocab, a.width) if a.gated else Embedding(config)
        self.embedding: nn.Module = embedding
        blocks = (LlamaBlock(a) if a.gated else Block(config) for _ in range(a.layers))
        self.blocks = nn.ModuleList(blocks)
        self.head = Head(a)
        if a.tied:
            tokens = embedding if isinstance(embedding, nn.Embedding) else embedding.token
            self.head.out.weight = tokens.weight

    def units(self) -> list[nn.Module]:
        """The groups of parameters that are gathered and freed together, in forward order."""
        return [self.embedding, *self.blocks, self.head]

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(x)

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in fp32 of the next token; tokens and targets are (batch, time)."""
        return F.cross_entropy(self(tokens).float().flatten(0, 1), targets.flatten())
