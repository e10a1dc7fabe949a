"""Time what the trainer adds to a step: against a bare loop with the same model, data and optimizer, in one run.

    xffl exec --processes 1 benchmarks/trainer.py digits [--pairs 15] [--steps 200]
    xffl exec --processes 2 benchmarks/trainer.py language_model --progress

The bare loop is what one writes without xffl: torch's ``DataLoader``, its optimizer, and FSDP2 where there are several
processes. The trainer does what a user of it gets: loaders that resume, a mean loss every 10 steps in JSON lines and
CSV, and with ``--progress`` the live display (on a terminal; else its lines). Pairs are interleaved and their order
alternates; a pair counts for the rank that took longest. Setting up is not counted.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import shutil
import tempfile
import time
from collections.abc import Callable
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


class Clock(Callback):
    """Times the steps of a run after the first few, without what comes before and after."""

    def post_optimizer_step(self, trainer: Any) -> None:
        if trainer.global_step == WARM_UP:
            dist.barrier()
            self.start, self.start_cpu = time.perf_counter(), time.process_time()

    def post_train(self, trainer: Any) -> None:
        dist.barrier()
        self.seconds, self.cpu = time.perf_counter() - self.start, time.process_time() - self.start_cpu


def load_example(name: str) -> tuple[type[BaseTrainer], Any, int]:
    folder, prefix, batch_size = TASKS[name]
    spec = importlib.util.spec_from_file_location(f"example_{folder}", EXAMPLES / folder / "train.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, f"{prefix}Trainer"), getattr(module, f"{prefix}Config"), batch_size


def by_trainer(options: argparse.Namespace, state: xffl.DistributedState, folder: Path) -> tuple[float, float]:
    """Train with the trainer; return seconds, and seconds of processor time, of its steps."""
    kind, config_kind, batch_size = load_example(options.what)
    clock = Clock()
    config = config_kind(
        experiment=ExperimentConfig(name="overhead", output_dir=str(folder), resume=False),
        distributed=DistributedConfig(strategy="fsdp" if state.world_size > 1 else "single"),
        training=TrainingParameters(
            epochs=10**6, max_steps=WARM_UP + options.steps, batch_size=batch_size, validate_every_epochs=None
        ),
        callbacks=[clock, *([ProgressCallback()] if options.progress else [])],
    )
    kind(config).fit(state)
    return clock.seconds, clock.cpu


def by_hand(options: argparse.Namespace, state: xffl.DistributedState, folder: Path) -> tuple[float, float]:
    """Train with a bare loop; the model, data and optimizer are those of the example."""
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
    step, epoch = 0, 0
    model.train()
    while step < WARM_UP + options.steps:
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            loss_of(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step == WARM_UP:
                dist.barrier()
                start, start_cpu = time.perf_counter(), time.process_time()
            if step == WARM_UP + options.steps:
                break
        epoch += 1
    dist.barrier()
    return time.perf_counter() - start, time.process_time() - start_cpu


def _token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def compare(options: argparse.Namespace) -> dict[str, Any] | None:
    """Time interleaved pairs; rank 0 returns what was found."""
    contenders: dict[str, Callable[..., tuple[float, float]]] = {"by hand": by_hand, "trainer": by_trainer}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    with xffl.session() as state:
        for pair in range(options.pairs + 1):  # the first warms up
            for name in sorted(contenders, reverse=pair % 2 == 0):
                folder = [tempfile.mkdtemp() if state.rank == 0 else None]
                dist.broadcast_object_list(folder)
                gc.collect()
                spent = torch.tensor(contenders[name](options, _fresh(state), Path(folder[0]) / "run"))
                dist.all_reduce(spent, op=dist.ReduceOp.MAX)
                times[name].append(tuple(spent.tolist()))
                if state.rank == 0:
                    shutil.rmtree(folder[0])
        if state.rank != 0:
            return None
    (hand, hand_cpu), (own, own_cpu) = (zip(*times[name][1:], strict=True) for name in ("by hand", "trainer"))
    found = summary(hand, own, hand_cpu, own_cpu, options.steps)
    print(
        f"{options.what}{', progress' if options.progress else ''}: by hand / trainer {found['ratio']:.3f}, at least "
        f"{found['ratio_lower_95']:.3f} (95 %), {found['step_ms']:.2f} ms a step, "
        f"{found['cpu_added_us_per_step']:+.0f} us of processor time added"
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
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--progress", action="store_true", help="with the progress callback")
    parser.add_argument("--out", type=Path, help="write JSON there")
    options = parser.parse_args()
    write_record("trainer", options, compare(options))


if __name__ == "__main__":
    main()
