"""Time what the trainer adds to a step: against a bare loop with the same model, data and optimizer, in one run.

    xffl exec --processes 1 benchmarks/trainer.py digits [--pairs 200] [--steps 20]
    xffl exec --processes 2 benchmarks/trainer.py language_model --progress

The bare loop is what one writes without xffl: torch's ``DataLoader``, its optimizer, and FSDP2 where there are several
processes. The trainer does what a user of it gets: loaders that resume, a mean loss every 10 steps in JSON lines and
CSV, and with ``--progress`` the live display (on a terminal; else its lines). Both live in the same processes and work
in turn, a block of ``--steps`` steps at a time; two blocks next to each other are a pair, and a block counts for the
rank that took longest. Setting up is not counted.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from pairs import summary, write_record
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

import xffl
from xffl.parallel import DistributedConfig
from xffl.training import BaseTrainer, Callback, ExperimentConfig, TrainingParameters
from xffl.training.callbacks import ProgressCallback

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
TASKS = {"digits": ("02_cnn", "CNN", 16), "language_model": ("03_language_model", "LM", 4)}


WARM_UP = 20
"""Steps before the clock starts: with the first ones connections are made, and gradients and optimizer states"""


class Turns(Callback):
    """Lets a trainer and a loop by hand work in turn, and times what each does in its turns.

    Each makes its first steps, which do not count, and then blocks of steps in the order A B, B A, A B, ...: what
    disturbs a machine for longer than a block disturbs both of a pair. All is one thread: the other's turns take place
    in a callback of the trainer, where nothing of its step is open.

    :param by_hand: Makes a step whenever it is asked for the next one.
    :param steps: Steps of a block.
    :param pairs: Blocks of each.
    """

    def __init__(self, by_hand: Iterator[None], steps: int, pairs: int) -> None:
        self.by_hand, self.steps, self.pairs = by_hand, steps, pairs
        self.own: list[tuple[float, float]] = []
        """Seconds, and seconds of processor time, of the trainer's blocks"""
        self.other: list[tuple[float, float]] = []
        self.other_s = 0.0

    def post_optimizer_step(self, trainer: Any) -> None:
        block, more = divmod(trainer.global_step - WARM_UP, self.steps)
        if more or block < 0:
            return
        if block > 0:
            self.own.append(self.spent())
        begun = time.perf_counter()
        if block == 0:
            next(itertools.islice(self.by_hand, WARM_UP - 1, None))
        elif block % 2 == 1:
            for _ in range(min(2, self.pairs - len(self.other))):
                self.begin()
                next(itertools.islice(self.by_hand, self.steps - 1, None))
                self.other.append(self.spent())
        self.other_s += time.perf_counter() - begun
        self.begin()

    def begin(self) -> None:
        dist.barrier()
        self.begun = time.perf_counter(), time.process_time()

    def spent(self) -> tuple[float, float]:
        dist.barrier()
        return time.perf_counter() - self.begun[0], time.process_time() - self.begun[1]


class Progress(ProgressCallback):
    """Does not count the other's turns, in which nothing is drawn."""

    def __init__(self, turns: Turns) -> None:
        self.turns = turns
        super().__init__()

    def make_clock(self) -> Callable[[], float]:
        return lambda: time.monotonic() - self.turns.other_s


def load_example(name: str) -> tuple[type[BaseTrainer], Any, int]:
    folder, prefix, batch_size = TASKS[name]
    spec = importlib.util.spec_from_file_location(f"example_{folder}", EXAMPLES / folder / "train.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, f"{prefix}Trainer"), getattr(module, f"{prefix}Config"), batch_size


def by_trainer(options: argparse.Namespace, state: xffl.DistributedState, folder: Path, turns: Turns) -> None:
    """Train with the trainer, and let the other take its turns."""
    kind, config_kind, batch_size = load_example(options.what)
    config = config_kind(
        experiment=ExperimentConfig(name="overhead", output_dir=str(folder), resume=False),
        distributed=DistributedConfig(strategy="fsdp" if state.world_size > 1 else "single"),
        training=TrainingParameters(
            epochs=10**6,
            max_steps=WARM_UP + options.pairs * options.steps,
            batch_size=batch_size,
            validate_every_epochs=None,
        ),
        callbacks=[turns, *([Progress(turns)] if options.progress else [])],
    )
    kind(config).fit(state)


def by_hand(options: argparse.Namespace, state: xffl.DistributedState, folder: Path) -> Iterator[None]:
    """Train with a bare loop, a step at a time; the model, data and optimizer are those of the example."""
    kind, config_kind, batch_size = load_example(options.what)
    config = config_kind(experiment=ExperimentConfig(output_dir=str(folder)))
    config.training = replace(config.training, batch_size=batch_size)
    borrowed = kind(config)  # for what the example says of its model and data, nothing else
    borrowed.train_loader = lambda dataset, **_: dataset
    borrowed.validation_loader = lambda dataset, **_: dataset
    dataset, _ = borrowed.configure_dataloaders()
    torch.manual_seed(0)
    borrowed.configure_models()
    model = borrowed.model
    if state.world_size > 1:
        fully_shard(model, mesh=state.fsdp_mesh)
    borrowed.configure_optimizers()
    optimizer = borrowed.optimizer
    sampler = DistributedSampler(dataset, state.world_size, state.rank)
    loader = DataLoader(dataset, batch_size=batch_size, sampler=sampler)
    loss_of = F.cross_entropy if options.what == "digits" else _token_loss
    model.train()
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            loss_of(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            yield


def _token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def compare(options: argparse.Namespace) -> dict[str, Any] | None:
    """Time interleaved pairs; rank 0 returns what was found."""
    with xffl.session() as state:
        folder = [tempfile.mkdtemp() if state.rank == 0 else None]
        dist.broadcast_object_list(folder)
        steps = by_hand(options, _fresh(state), Path(folder[0]) / "hand")
        turns = Turns(steps, options.steps, options.pairs)
        by_trainer(options, _fresh(state), Path(folder[0]) / "run", turns)
        spent = [torch.tensor(blocks, dtype=torch.float64) for blocks in (turns.other, turns.own)]
        for blocks in spent:
            dist.all_reduce(blocks, op=dist.ReduceOp.MAX)
        if state.rank != 0:
            return None
        shutil.rmtree(folder[0])
    (hand_s, hand_cpu), (own_s, own_cpu) = (blocks.T.tolist() for blocks in spent)
    found = summary(hand_s, own_s, hand_cpu, own_cpu, options.steps) | {"ratio_of_sums": sum(hand_s) / sum(own_s)}
    print(
        f"{options.what}{', progress' if options.progress else ''}: by hand / trainer {found['ratio']:.3f}, at least "
        f"{found['ratio_lower_95']:.3f} (95 %), {found['ratio_of_sums']:.3f} by the sums, {found['step_ms']:.2f} ms a "
        f"step, {found['cpu_added_us_per_step']:+.0f} us of processor time added"
    )
    return found


def _fresh(state: xffl.DistributedState) -> xffl.DistributedState:
    """Return a state of the same world that nobody has laid out yet."""
    fresh = xffl.DistributedState()
    fresh.set_global(
        state.backend, state.device_type, state.master_addr, state.master_port, state.rank, state.world_size
    )
    fresh.set_node(state.node_local_rank, state.node_local_size, state.node_rank, state.node_world_size)
    return fresh


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=tuple(TASKS))
    parser.add_argument("--pairs", type=int, default=200, help="pairs of blocks")
    parser.add_argument("--steps", type=int, default=20, help="steps of a block")
    parser.add_argument("--progress", action="store_true", help="with the progress callback")
    parser.add_argument("--out", type=Path, help="write JSON there")
    options = parser.parse_args()
    write_record("trainer", options, compare(options))


if __name__ == "__main__":
    main()
