"""Train a small GPT on the bytes of a text: ``torchrun --nproc-per-node 2 train.py --max_iters=400``."""

import ast
import math
import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

# Configuration: --name=value on the command line replaces a value.
dataset = str(Path(__file__).resolve().parents[2] / "CHANGELOG.md")
out_dir = "out"
init_from = "scratch"  # or "resume"
eval_interval = 50
eval_iters = 8
log_interval = 10
batch_size = 8  # sequences of a micro-batch, on each rank
gradient_accumulation_steps = 2
block_size = 64
n_layer = 2
n_head = 4
n_embd = 64
learning_rate = 3e-3
min_lr = 3e-4
warmup_iters = 20
lr_decay_iters = 200
max_iters = 200
weight_decay = 0.1
grad_clip = 1.0
seed = 1337
for word in sys.argv[1:]:
    name, _, value = word.removeprefix("--").partition("=")
    kind = type(globals()[name])
    globals()[name] = value if kind is str else kind(ast.literal_eval(value))

rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
ddp = world_size > 1
device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cuda":
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
if ddp:
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")

data = np.memmap(dataset, dtype=np.uint8, mode="r")
splits = {"train": data[: len(data) * 9 // 10], "val": data[len(data) * 9 // 10 :]}


def get_batch(split, number):
    """Return a batch of random places in the text; the same number is the same batch of this rank."""
    text = splits[split]
    starts = np.random.default_rng((seed, rank, number)).integers(len(text) - block_size, size=batch_size)
    rows = torch.from_numpy(np.stack([text[start : start + block_size + 1] for start in starts])).long().to(device)
    return rows[:, :-1], rows[:, 1:]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.attention = nn.Linear(n_embd, 3 * n_embd)
        self.projection = nn.Linear(n_embd, n_embd)
        self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd))

    def forward(self, x):
        heads = self.attention(self.ln_1(x)).unflatten(-1, (3, n_head, -1)).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, n_embd), nn.Embedding(block_size, n_embd)
        self.blocks = nn.Sequential(*(Block() for _ in range(n_layer)))
        self.ln = nn.LayerNorm(n_embd)
        self.head = nn.Linear(n_embd, 256, bias=False)

    def forward(self, tokens, targets):
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        logits = self.head(self.ln(self.blocks(x)))
        return cross_entropy(logits.flatten(0, 1), targets.flatten())


@torch.no_grad()
def estimate_loss(model):
    model.eval()
    means = {}
    for split in splits:
        batches = (get_batch(split, 1_000_000 + number) for number in range(eval_iters))
        means[split] = torch.stack([model(*batch) for batch in batches]).mean().item()
    model.train()
    return means


def get_lr(iter_num):
    if iter_num < warmup_iters:
        return learning_rate * (iter_num + 1) / (warmup_iters + 1)
    done = min((iter_num - warmup_iters) / (lr_decay_iters - warmup_iters), 1.0)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * done)) * (learning_rate - min_lr)


def configure_optimizer(model):
    decayed = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.99))


def train(model, optimizer):
    raw_model = model.module if ddp else model
    iter_num = 0
    if init_from == "resume":
        checkpoint = torch.load(f"{out_dir}/ckpt.pt", map_location=device)
        raw_model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        iter_num = checkpoint["iter_num"]
    began = time.monotonic()
    while True:
        if iter_num % eval_interval == 0 or iter_num == max_iters:
            losses = estimate_loss(raw_model)
            if rank == 0:
                print(f"step {iter_num}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}", flush=True)
                os.makedirs(out_dir, exist_ok=True)
                checkpoint = {"model": raw_model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(checkpoint | {"iter_num": iter_num}, f"{out_dir}/ckpt.pt")
        if iter_num == max_iters:
            return
        for group in optimizer.param_groups:
            group["lr"] = get_lr(iter_num)
        for micro_step in range(gradient_accumulation_steps):
            is_last = micro_step == gradient_accumulation_steps - 1
            with model.no_sync() if ddp and not is_last else nullcontext():
                loss = model(*get_batch("train", iter_num * gradient_accumulation_steps + micro_step))
                (loss / gradient_accumulation_steps).backward()
        nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        iter_num += 1
        if iter_num % log_interval == 0 and rank == 0:
            seconds = (time.monotonic() - began) / log_interval
            print(f"iter {iter_num}: loss {loss.item():.4f}, {1000 * seconds:.0f} ms", flush=True)
            began = time.monotonic()


torch.manual_seed(seed)
model = GPT().to(device)
if ddp:
    model = DistributedDataParallel(model)
optimizer = configure_optimizer(model)
train(model, optimizer)
if ddp:
    dist.destroy_process_group()
