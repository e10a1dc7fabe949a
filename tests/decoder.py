"""A small decoder-only transformer with the names of the Llama family, and batches of text for it."""

from __future__ import annotations

import pydoc_data.topics

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["Block", "Decoder", "loss_of", "text_batch"]

VOCABULARY = 256


class Decoder(nn.Module):
    """Token indices in, logits out; a stage of a pipeline lacks the embedding, some layers, or the head."""

    def __init__(self, width: int = 32, heads: int = 4, layers: int = 4, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.embed_tokens: nn.Module | None = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleDict({str(index): Block(width, heads) for index in range(layers)})
        self.norm: nn.Module | None = nn.RMSNorm(width)
        self.lm_head: nn.Module | None = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        """Map tokens (batch, sequence) to logits (batch, sequence, vocabulary)."""
        hidden = tokens if self.embed_tokens is None else self.embed_tokens(tokens)
        for layer in self.layers.values():
            hidden = layer(hidden, positions)
        if self.norm is not None:
            hidden = self.norm(hidden)
        return hidden if self.lm_head is None else self.lm_head(hidden)


class Block(nn.Module):
    """Attention and a gated MLP, each behind a norm and beside a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(width)
        self.self_attn = Attention(width, heads)
        self.post_attention_layernorm = nn.RMSNorm(width)
        self.mlp = Mlp(width)

    def forward(self, hidden: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), positions)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Attention(nn.Module):
    """Causal attention with rotary positions; the number of heads follows from what the projections give."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, width, bias=False)
        self.v_proj = nn.Linear(width, width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, hidden: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        q, k, v = (self._split(proj(hidden)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        if positions is None:
            positions = torch.arange(q.shape[2], device=q.device)
        q, k = rotate(q, positions), rotate(k, positions)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))

    def _split(self, values: torch.Tensor) -> torch.Tensor:
        return values.unflatten(-1, (-1, self.head_width)).transpose(1, 2)  # (batch, heads, sequence, head width)


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, 2 * width, bias=False)
        self.up_proj = nn.Linear(width, 2 * width, bias=False)
        self.down_proj = nn.Linear(2 * width, width, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


def rotate(values: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Turn pairs of features (batch, heads, sequence, width) by angles that grow with the position (sequence)."""
    half = values.shape[-1] // 2
    angles = positions[:, None] * 100.0 ** (-torch.arange(half, device=values.device) / half)
    sin, cos = angles.sin().to(values.dtype), angles.cos().to(values.dtype)
    first, second = values[..., :half], values[..., half:]
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy over all tokens."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def text_batch(step: int, batch: int = 8, sequence: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens and targets (batch, sequence) of a step of training on English text that comes with Python."""
    text = "".join(pydoc_data.topics.topics.values()).encode()
    size = sequence + 1
    rows = [text[place : place + size] for place in range(step * batch * size, (step + 1) * batch * size, size)]
    tokens = torch.tensor([list(row) for row in rows])
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
