"""Train a small language model with FSDP2 over all ranks, without xffl: torchrun --nproc-per-node 4 before.py."""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

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


def train(model, optimizer, loader, arguments, device):
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
            dist.all_reduce(total)
            if dist.get_rank() == 0:
                print(f"epoch {epoch}: loss {total.item() / dist.get_world_size():.6f}, norm {norm.item():.6f}")
            total.zero_()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--checkpoint", default="checkpoint")
    arguments = parser.parse_args()

    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))

    torch.manual_seed(0)
    model = LanguageModel().to(device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    data = build_data()
    sampler = DistributedSampler(data, dist.get_world_size(), dist.get_rank(), seed=0)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    train(model, optimizer, loader, arguments, device)

    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=arguments.checkpoint)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
