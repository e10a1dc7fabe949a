"""Loaders on real ranks: sharded models validate on fewer samples than ranks, and training resumes to the bit."""

from __future__ import annotations

import contextlib
import copy
import io
import multiprocessing
import os
import pydoc_data.topics
import re
import runpy
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import xffl
from tests.decoder import VOCABULARY, Block, Decoder, loss_of, text_batch
from tests.ports import free_port
from tests.ranks.test_round import make_state
from tests.ranks.test_session import be_rank
from tests.worlds import run_world
from xffl.distributed import DistributedState
from xffl.training.data.loaders import CellLoader, validation_loader
from xffl.training.data.tokens import TokenDataset, open_tokens, write_tokens

ROOT = Path(__file__).resolve().parents[2]
SIZES = (3, 1)
LENGTH = 16


def build() -> Decoder:
    torch.manual_seed(0)
    return Decoder(width=16, heads=2, layers=1)


def dataset(path: Path, windows: int) -> TokenDataset:
    return TokenDataset(open_tokens(path)[: windows * LENGTH + 1], sequence_length=LENGTH)


def summed(*values: float, group: Any) -> list[float]:
    totals = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(totals, group=group)
    return totals.tolist()


def mean_loss(path: Path, windows: int) -> float:
    """What one process finds on all samples at once."""
    data = dataset(path, windows)
    tokens, targets = (torch.stack(rows) for rows in zip(*(data[index] for index in range(len(data))), strict=True))
    with torch.no_grad():
        return float(loss_of(build()(tokens), targets))


def validates(rank: int, world_size: int, path: Path) -> None:
    state = make_state(rank, SIZES, None)
    model = xffl.shard(build(), state, wrap=(Block,))
    for windows in (1, 2, 5, 16):
        expected = mean_loss(path, windows)
        for over, group in (("cell", state.federation), ("federation", None)):
            loader = validation_loader(dataset(path, windows), state, batch_size=2, over=over)  # type: ignore[arg-type]
            total = 0.0
            with torch.no_grad():
                for tokens, targets in loader:
                    loss = loss_of(model(tokens), targets)  # collective in the cell of three
                    total += float(loss) * loader.batch_samples
                    assert loader.batch_samples in (0, len(tokens))
            counts = [loader.batch_samples for _ in loader]
            loss_sum, count = summed(total, sum(counts), group=group)
            assert count == windows
            assert abs(loss_sum / count - expected) < 1e-6


def train(model: nn.Module, optimizer: Any, loader: CellLoader, epochs: int) -> Iterator[float]:
    while loader.epoch < epochs:
        for tokens, targets in loader:
            dropped = torch.rand(tokens.shape) < 0.1  # the model's own draws
            loss = loss_of(model(tokens.masked_fill(dropped, 0)), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield float(loss.detach())


def sharded(state: DistributedState) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = xffl.shard(build(), state, wrap=(Block,))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def weights_of(model: nn.Module) -> list[torch.Tensor]:
    return [getattr(p, "full_tensor", p.detach)().detach().clone() for p in model.parameters()]


def resumes(rank: int, world_size: int, path: Path) -> int:
    state = make_state(rank, SIZES, None)

    def loader() -> CellLoader:
        data = dataset(path, 41)
        return CellLoader(data, state, batch_size=4, seed=7)

    # Never stopped.
    torch.manual_seed(rank)
    model, optimizer = sharded(state)
    steps = loader()
    torch.manual_seed(rank)
    whole = list(train(model, optimizer, steps, 3))
    assert steps.samples_seen == 3 * steps.samples
    expected = weights_of(model)
    # Stopped in the middle of the second epoch.
    model, optimizer = sharded(state)
    stopped = loader()
    torch.manual_seed(rank)
    loop = train(model, optimizer, stopped, 3)
    before = [next(loop) for _ in range(len(stopped) + 2)]
    saved = copy.deepcopy((stopped.state_dict(), model.state_dict(), optimizer.state_dict(), torch.get_rng_state()))
    loop.close()
    resumed = loader()
    resumed.load_state_dict(saved[0])
    model, optimizer = sharded(state)
    model.load_state_dict(saved[1])
    optimizer.load_state_dict(saved[2])
    torch.set_rng_state(saved[3])
    assert before + list(train(model, optimizer, resumed, 3)) == whole
    assert all(torch.equal(x, y) for x, y in zip(weights_of(model), expected, strict=True))
    return len(whole)


def written(folder: Path) -> Path:
    tokens, _ = text_batch(0, batch=64, sequence=LENGTH)
    write_tokens(folder / "tokens.npy", tokens, vocabulary_size=VOCABULARY)
    return folder / "tokens.npy"


def validate_and_resume(rank: int, world_size: int, path: Path) -> int:
    validates(rank, world_size, path)
    return resumes(rank, world_size, path)


def test_validation_on_few_samples_is_exact_and_training_resumes_to_the_bit(tmp_path: Path) -> None:
    # 41 windows, in cells of three ranks and one, which make as many steps.
    assert run_world(4, validate_and_resume, written(tmp_path)) == [9, 9, 9, 9]


def run_script(rank: int, world_size: int, port: int, folder: Path) -> str:
    """Be a process of ``xffl exec --processes 3 text.py book.txt``."""
    be_rank(rank, world_size, port)
    # Beside gloo's threads each rank has workers, which Python denies to the daemons that ranks of a test are.
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    os.chdir(folder)
    sys.argv = ["text.py", "book.txt"]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_path("text.py", run_name="__main__")
    return out.getvalue()


def test_the_script_of_the_page_runs(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "data.rst").read_text()
    shown = re.search(r":caption: text\.py\n\n((?:   .*\n|\n)+)", page)
    assert shown is not None
    (tmp_path / "text.py").write_text(textwrap.dedent(shown[1]))
    (tmp_path / "book.txt").write_text("".join(list(pydoc_data.topics.topics.values())[:20]), encoding="utf-8")
    told, *others = run_world(3, run_script, free_port(), tmp_path, init=False)
    found = re.search(r"loss (\d\.\d\d) over (\d+) windows", told)
    assert found is not None and not any(others), told
    # Knowing nothing gives 5.55 (of 256 bytes), how often each letter comes about 3.2.
    assert float(found[1]) < 3.5
    size = len((tmp_path / "book.txt").read_bytes())
    assert int(found[2]) == (size - round(size * 0.9) - 1) // 64
