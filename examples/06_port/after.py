"""Train a small language model in cells: xffl exec --processes 4 --federated 2,2 after.py."""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

import xffl

VOCABULARY = 32
MICRO_BATCHES = 2
"""Forward and backward passes of an optimizer step."""


class LanguageModel(nn.Module):
    def __init__(self, width: int = 32, depth: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True) for _ in range(depth)
        )
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask, is_causal=True)
        return self.head(hidden)


def build_data() -> TensorDataset:
    """Return sequences in which each token is the one before plus the sequence's own step."""
    starts = torch.arange(512)[:, None]
    steps = 1 + starts % 5
    return TensorDataset((starts + steps * torch.arange(17)) % VOCABULARY)


def train(model, optimizer, loader, arguments, device, state):
    for epoch in range(arguments.epochs):
        loader.sampler.set_epoch(epoch)
        total = torch.zeros((), device=device)
        for index, (tokens,) in enumerate(loader):
            tokens = tokens.to(device)
            is_last = (index + 1) % MICRO_BATCHES == 0
            model.set_requires_gradient_sync(is_last)
            logits = model(tokens[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) / MICRO_BATCHES
            loss.backward()
            total += loss.detach()
            if not is_last:
                continue
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
            optimizer.step()
            optimizer.zero_grad()
            dist.all_reduce(total, group=state.federation)
            if state.cell_rank == 0:
                mean = total.item() / state.cell_size
                print(f"cell {state.cell}, epoch {epoch}: loss {mean:.6f}, norm {norm.item():.6f}")
            total.zero_()


def main(state):
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--every", type=int, default=4)
    parser.add_argument("--checkpoint", default="checkpoint")
    arguments = parser.parse_args()

    device = torch.device(state.current_device)
    torch.manual_seed(0)
    model = xffl.shard(LanguageModel(), state, wrap=(nn.TransformerEncoderLayer,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    data = build_data()
    data = Subset(data, range(state.cell, len(data), state.cells))
    sampler = DistributedSampler(data, state.cell_size, state.cell_rank, seed=0)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    with xffl.FederatedScaling(model, optimizer, state, every=arguments.every):
        train(model, optimizer, loader, arguments, device, state)

    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save(
        {"model": model_state, "optimizer": optimizer_state},
        checkpoint_id=f"{arguments.checkpoint}/cell_{state.cell}",
        process_group=state.federation,
    )


if __name__ == "__main__":
    with xffl.session() as state:
        main(state)
