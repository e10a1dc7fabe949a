"""A callback in a Trainer of Lightning: what it trains, killed and started again, is what a loop by hand trains."""

from __future__ import annotations

import os
import signal
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from pydoc_data import topics
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import xffl
from tests.ports import free_port
from tests.processes import await_cells
from tests.ranks.test_elastic_trainer import lighthouse, serving_lighthouse  # noqa: F401
from tests.ranks.test_federate import (
    Death,
    check_that_it_came_back,
    differ,
    is_at_end,
    kill_at,
    run_job,
    weights_of,
)
from tests.ranks.test_pages import scripts_of
from tests.worlds import be_launched, run_world
from xffl.distributed.startup.isolation import enter_isolation
from xffl.training.data.partition import iid

pytest.importorskip("lightning")

STEPS = 12
EVERY = 4
ROWS = 4
LENGTH = 16
SAMPLES = 400
SIZES = (2, 2)
CLIENT = {"name": "fedprox", "mu": 0.1}
"""Changes gradients, which Lightning makes in a closure that it gives to the optimizer's step."""


def make_data() -> TensorDataset:
    """Return windows of bytes of the Python manual, and the bytes that follow each."""
    text = "\n".join(topics.topics.values()).encode()[: SAMPLES * LENGTH + 1]
    values = torch.tensor(list(text))
    return TensorDataset(values[:-1].view(SAMPLES, LENGTH), values[1:].view(SAMPLES, LENGTH))


def make_layers(seed: int = 0, dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Embedding(256, 32), nn.Linear(32, 64), nn.Dropout(dropout), nn.Linear(64, 256))


def loss_of(layers: nn.Module, batch: Any) -> torch.Tensor:
    tokens, targets = batch
    return nn.functional.cross_entropy(layers(tokens).flatten(0, 1), targets.flatten())


def make_schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.CosineAnnealingLR:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)


def make_module(seed: int, *, is_sharded: bool = False, is_manual: bool = False, dropout: float = 0.0) -> Any:
    import lightning as L
    from torch.distributed.fsdp import fully_shard

    from xffl.training.data.loaders import CellLoader

    class Module(L.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layers = make_layers(seed, dropout)
            self.automatic_optimization = not is_manual

        def configure_model(self) -> None:
            if is_sharded:
                for layer in (self.layers[0], self.layers[1], self.layers[3]):
                    fully_shard(layer, mesh=self.device_mesh["data_parallel"])
                fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = loss_of(self.layers, batch)
            if is_manual:
                for optimizer in self.optimizers():
                    optimizer.zero_grad()
                self.manual_backward(loss)
                for optimizer in self.optimizers():
                    optimizer.step()
            return loss

        def train_dataloader(self) -> Any:
            return CellLoader(make_data(), xffl.adopt(), batch_size=ROWS)

        def on_train_end(self) -> None:
            self.wrapper = type(self.trainer.strategy.model).__name__

        def configure_optimizers(self) -> Any:
            if is_manual:
                return [torch.optim.SGD(self.layers[number].parameters(), lr=0.1) for number in (0, 1, 3)], []
            optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
            return [optimizer], [{"scheduler": make_schedule(optimizer), "interval": "step"}]

    return Module()


def make_trainer(folder: Path | str, *callbacks: Any, is_sharded: bool = False, **given: Any) -> Any:
    import lightning as L
    from lightning.pytorch.strategies import ModelParallelStrategy

    ranks = int(os.environ["WORLD_SIZE"])
    options: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": ranks,
        "strategy": ModelParallelStrategy(ranks, 1) if is_sharded else "ddp",
        "max_steps": STEPS,
        "accumulate_grad_batches": 2,
        "gradient_clip_val": 1.0,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": str(folder),
    }
    return L.Trainer(callbacks=list(callbacks), **{**options, **given})


def train(folder: str, *, is_sharded: bool = False, **options: Any) -> dict[str, Any]:
    """Be a rank of a script with a Trainer, and with one callback more."""
    from xffl.integrations.lightning import FederatedRounds, cell_split

    rounds = FederatedRounds(every=EVERY, client=CLIENT, **options)
    trainer = make_trainer(folder, rounds, is_sharded=is_sharded)
    module = make_module(int(os.environ["XFFL_ISOLATED"].split()[0]) // SIZES[0], is_sharded=is_sharded)
    trainer.fit(module, DataLoader(cell_split(make_data()), batch_size=ROWS))
    return {
        "weights": weights_of(module.layers),
        "counts": [report.weights for report in rounds.reports],
        "bytes": [report.bytes_across for report in rounds.reports],
        "logged": {name: float(value) for name, value in trainer.logged_metrics.items()},
        "wrapper": module.wrapper,
    }


def train_by_hand() -> dict[str, Any]:
    """Do with xffl alone what the Trainer does."""
    reports: list[xffl.RoundReport] = []
    counted: list[int] = []

    def take() -> float:
        samples = sum(counted)
        counted.clear()
        return float(samples)

    with xffl.session(federated=SIZES) as state:
        data = make_data()
        part = iid(SAMPLES, 2).parts[state.cell].tolist()
        sampler: DistributedSampler[int] = DistributedSampler(part, num_replicas=SIZES[0], rank=state.cell_rank)
        drawn = [part[index] for index in sampler]
        layers = make_layers()
        model = xffl.shard(layers, state, wrap=(nn.Linear, nn.Embedding))
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        schedule = make_schedule(optimizer)
        rounds: dict[str, Any] = {"every": EVERY, "client": CLIENT, "weight": take, "on_round": reports.append}
        with xffl.FederatedScaling(model, optimizer, state, **rounds):
            for step in range(STEPS):
                for turn in (2 * step, 2 * step + 1):
                    loss = loss_of(model, data[drawn[turn * ROWS : (turn + 1) * ROWS]]) / 2
                    loss.backward()  # type: ignore[no-untyped-call]
                    counted.append(ROWS)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        return {"weights": weights_of(model), "counts": [report.weights for report in reports]}


def train_by_fabric() -> dict[str, Any]:
    """Do with Fabric, in a loop of one's own, what the Trainer does."""
    import lightning as L

    from xffl.integrations.lightning import cell_split

    reports: list[xffl.RoundReport] = []
    fabric = L.Fabric(accelerator="cpu", devices=SIZES[0], strategy="ddp")
    fabric.launch()
    layers = make_layers()
    optimizer = torch.optim.AdamW(layers.parameters(), lr=3e-3)
    schedule = make_schedule(optimizer)
    model, fabric_optimizer = fabric.setup(layers, optimizer)
    loader = fabric.setup_dataloaders(DataLoader(cell_split(make_data()), batch_size=ROWS, shuffle=True))
    state = xffl.adopt()
    rounds: dict[str, Any] = {"every": EVERY, "client": CLIENT, "on_round": reports.append}
    with xffl.FederatedScaling(model, optimizer, state, **rounds):
        for number, batch in zip(range(2 * STEPS), loader, strict=False):
            with fabric.no_backward_sync(model, enabled=number % 2 == 0):
                fabric.backward(loss_of(model, batch) / 2)
            if number % 2:
                fabric.clip_gradients(model, fabric_optimizer, max_norm=1.0)
                fabric_optimizer.step()
                schedule.step()
                fabric_optimizer.zero_grad()
    return {"weights": weights_of(layers), "rounds": len(reports)}


def be_fabric(rank: int, world_size: int, port: int) -> dict[str, Any]:
    be_launched(rank, world_size, port)
    with enter_isolation(SIZES):
        return train_by_fabric()


def be_by_hand(rank: int, world_size: int, port: int) -> dict[str, Any]:
    be_launched(rank, world_size, port)
    return train_by_hand()


def be_cell(rank: int, world_size: int, port: int, options: dict[str, Any]) -> dict[str, Any]:
    be_launched(rank, world_size, port)
    with enter_isolation(SIZES):
        return train(**options)


CASES: dict[str, dict[str, Any]] = {"ddp": {}, "fsdp": {"is_sharded": True}}


def train_both_ways(rank: int, world_size: int, folder: str) -> tuple[list[Any], dict[str, list[Any]], list[Any]]:
    import_module("xffl.integrations.lightning")
    ranks = {name: run_job(4, be_cell, {"folder": f"{folder}/{name}", **options}) for name, options in CASES.items()}
    return run_job(4, be_by_hand), ranks, run_job(4, be_fabric)


def test_a_trainer_trains_what_a_loop_by_hand_trains(tmp_path: Path) -> None:
    [(by_hand, ranks, by_fabric)] = run_world(1, train_both_ways, str(tmp_path), init=False, timeout_s=280)
    expected = by_hand[0]
    for name, options in CASES.items():
        for trained in ranks[name]:
            assert differ(trained["weights"], ranks[name][0]["weights"]) == 0.0
            assert differ(trained["weights"], expected["weights"]) < 1e-6, name
            assert trained["counts"] == expected["counts"]
            assert trained["logged"]["xffl/round"] == 3
            assert trained["logged"]["xffl/cells"] == 2
            assert trained["logged"]["xffl/bytes"] == trained["bytes"][-1]
            assert trained["wrapper"] == ("Module" if options.get("is_sharded") else "DistributedDataParallel")
        values = sum(value.numel() for value in expected["weights"].values())
        assert sum(sum(trained["bytes"]) for trained in ranks[name]) == 3 * 2 * 4 * values  # fp32, once from each cell
    for trained in by_fabric:
        assert differ(trained["weights"], by_fabric[0]["weights"]) == 0.0
        assert differ(trained["weights"], expected["weights"]) < 1e-6
        assert trained["rounds"] == 3


OPTIONS: dict[str, dict[str, Any]] = {
    "delay": {"delay": 1, "alpha": 0.5},
    "codec": {"algorithm": "diloco", "aggregator": {"codec": "int8"}},
    "client": {"client": "scaffold"},
}
"""Of rounds: one of each kind"""


def train_alone(way: str, rounds: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Train a cell of one rank by a Trainer, in a loop with Fabric, or in one of one's own."""
    import lightning as L

    from xffl.integrations.lightning import FederatedRounds, cell_split

    loader = DataLoader(cell_split(make_data()), batch_size=ROWS)
    if way == "trainer":
        module = make_module(0)
        module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        given = {"strategy": "auto", "accumulate_grad_batches": 1, "gradient_clip_val": None}
        make_trainer(".", FederatedRounds(every=EVERY, **rounds), **given).fit(module, loader)
        return weights_of(module.layers)
    model = layers = make_layers()
    optimizer = stepped = torch.optim.SGD(layers.parameters(), lr=0.1, momentum=0.9)
    backward: Any = torch.Tensor.backward
    if way == "fabric":
        fabric = L.Fabric(accelerator="cpu", devices=1)
        model, stepped = fabric.setup(layers, optimizer)
        loader = fabric.setup_dataloaders(loader)
        backward = fabric.backward
    with xffl.FederatedScaling(model, optimizer, xffl.adopt(), every=EVERY, **rounds):
        for _, batch in zip(range(STEPS), loader, strict=False):
            backward(loss_of(model, batch))
            stepped.step()
            stepped.zero_grad()
    return weights_of(layers)


def be_with_options(rank: int, world_size: int, port: int) -> dict[str, list[dict[str, torch.Tensor]]]:
    be_launched(rank, world_size, port)
    with enter_isolation((1, 1)):
        return {
            name: [train_alone(way, rounds) for way in ("by hand", "trainer", "fabric")]
            for name, rounds in ({"plain": {}} | OPTIONS).items()
        }


def be_elastic_fabric(
    rank: int, world_size: int, port: int, url: str, other_port: int, folder: str
) -> dict[str, torch.Tensor]:
    """Be a cell of one rank, and a job of its own, of two that begin together."""
    be_launched(0, 1, (port, other_port)[rank])
    os.environ |= {"XFFL_LIGHTHOUSE": url, "XFFL_CELL": f"{rank}/2", "XFFL_JOURNAL": f"{folder}/journal"}
    await_cells(2, folder)
    return train_alone("fabric", {})


def train_with_options(rank: int, world_size: int, url: str | None, folder: str) -> tuple[list[Any], list[Any]]:
    import_module("xffl.integrations.lightning")
    isolated = run_job(2, be_with_options)
    return isolated, [] if url is None else run_job(2, be_elastic_fabric, url, free_port(), folder)


def test_a_trainer_and_fabric_take_all_kinds_of_options(tmp_path: Path) -> None:
    """Also Fabric in elastic cells: nothing fails, so these are the rounds of isolated ones."""
    with serving_lighthouse() if find_spec("torchft") else nullcontext() as url:
        [(ranks, elastic)] = run_world(1, train_with_options, url, str(tmp_path), init=False, timeout_s=180)
    for trained in ranks:
        plain = trained["plain"][0]
        for name, ways in trained.items():
            assert [differ(weights, ways[0]) for weights in ways] == [0.0, 0.0, 0.0], name
            assert differ(ways[0], ranks[0][name][0]) == 0.0
            assert name == "plain" or differ(ways[0], plain) > 1e-6, f"{name} changes nothing"
    for weights in elastic:
        assert differ(weights, ranks[0]["plain"][0]) == 0.0


def be_mortal(
    rank: int, world_size: int, port: int, folder: str, death: Death, is_sharded: bool, every: Any = 3
) -> Any:
    """Train with checkpoints, until death; behind rounds where the cells make unlike numbers of steps between them."""
    from lightning.pytorch.callbacks import Callback, ModelCheckpoint

    from xffl.integrations.lightning import FederatedRounds, RoundCheckpoint

    dies = death.rank == rank

    class Mortality(Callback):  # type: ignore[misc]
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if dies and death.moment == "step" and trainer.global_step == death.number:
                os.kill(os.getpid(), signal.SIGKILL)

        def on_train_end(self, trainer: Any, module: Any) -> None:
            if dies and death.moment == "end":
                os.kill(os.getpid(), signal.SIGKILL)

    be_launched(rank, world_size, port)
    with enter_isolation((world_size // 2, world_size // 2)) as isolated:
        rounds = FederatedRounds(every=every, algorithm="diloco")
        saves = ModelCheckpoint(every_n_train_steps=2) if every == 3 else RoundCheckpoint(every_n_rounds=2)
        options: dict[str, Any] = {"enable_checkpointing": True, "accumulate_grad_batches": 1}
        if not is_sharded:
            options["strategy"] = "auto"
        trainer = make_trainer(folder, Mortality(), rounds, saves, is_sharded=is_sharded, **options)
        module = make_module(isolated.cell, is_sharded=is_sharded, dropout=0.1)
        if dies and death.moment == "file":
            kill_at(death.number, folder, mark=".ckpt")
        trainer.fit(module)
        steps = 0 if rounds.resumed is None else rounds.resumed.step
        kept = sorted(path.name for path in Path(saves.dirpath).iterdir())
        return weights_of(module.layers), steps, kept


UNEVEN = "per_cell:counts=[2,4]"
"""A schedule by which cell 0 makes six rounds of its own, and cell 1 three"""
DEATHS = {Death(0, "step", 5): 2, Death(0, "file", 16): 2, Death(1, "end"): 12}
"""And the step from which the run goes on then, at least: between rounds, in the second save, behind the last step."""


def kill_and_start_again(rank: int, world_size: int, folder: str) -> list[list[Any]]:
    """Return what an uninterrupted run has, then what each run has that was killed and started again."""
    import_module("xffl.integrations.lightning")
    runs = [run_job(2, be_mortal, f"{folder}/whole", Death(), False)]
    for number, death in enumerate(DEATHS):
        assert None in run_job(2, be_mortal, f"{folder}/{number}", death, False), death
        runs.append(run_job(2, be_mortal, f"{folder}/{number}", Death(), False))
    for name, death in (("uneven", Death(0, "step", 9)), ("uneven", Death()), ("uneven-whole", Death())):
        runs.append(run_job(2, be_mortal, f"{folder}/{name}", death, False, UNEVEN))
    return runs


def test_a_run_that_was_killed_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    told = run_world(1, kill_and_start_again, str(tmp_path), init=False, timeout_s=280)
    [(whole, *resumed, uneven_killed, uneven, uneven_whole)] = told
    assert None in uneven_killed
    assert [steps for _, steps, _ in uneven] == [4, 8]  # behind two rounds
    for weights, _, kept in (*uneven, *uneven_whole):
        assert differ(weights, uneven_whole[0][0]) == 0.0
        assert "epoch=0-step=8.ckpt.xffl" in kept
    for run, step in zip(resumed, DEATHS.values(), strict=True):
        for weights, from_step, kept in run:
            assert from_step >= step
            assert differ(weights, whole[0][0]) == 0.0
            assert "epoch=0-step=12.ckpt.xffl" in kept


def make_own_steps(seed: int) -> Any:
    """Return a module that calls ``loss.backward`` itself, and torch's own optimizers with every other batch."""
    module = make_module(seed, is_manual=True)

    def step_with_every_other(batch: Any, batch_idx: int) -> None:
        loss_of(module.layers, batch).backward()  # type: ignore[no-untyped-call]
        for optimizer in module.optimizers(use_pl_optimizer=False) if batch_idx % 2 else ():
            optimizer.step()
            optimizer.zero_grad()

    module.training_step = step_with_every_other
    return module


def be_manual(rank: int, world_size: int, port: int, folder: str) -> dict[str, Any]:
    """Be a rank of a script that steps three optimizers itself, and saves while a round is under way."""
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger

    from xffl.integrations.lightning import FederatedRounds, cell_folder

    be_launched(rank, world_size, port)
    with enter_isolation((1, 1)) as isolated:
        options: dict[str, Any] = {
            "strategy": "auto",
            "max_steps": 3 * STEPS,  # Lightning counts those of all optimizers
            "enable_checkpointing": True,
            "accumulate_grad_batches": 1,
            "gradient_clip_val": None,
            "log_every_n_steps": 1,
        }
        rounds = FederatedRounds(every=EVERY, delay=2, aggregator={"overlap": True})
        saves = ModelCheckpoint(every_n_train_steps=3 * (EVERY + 1), save_top_k=-1, save_last=True)
        logger = CSVLogger(cell_folder(folder), name="log", version="all")
        trainer = make_trainer(folder, rounds, saves, logger=logger, **options)
        module = make_module(isolated.cell, is_manual=True)
        module.on_train_batch_start = lambda batch, index: -1 if index == STEPS - 1 else None  # skips the batch
        trainer.fit(module)
        with pytest.raises(xffl.StateError, match="one trainer.fit"):
            trainer.fit(module)
        given = make_trainer(folder, FederatedRounds(every=EVERY), **options)
        with pytest.raises(xffl.ConfigError, match=r"fit\(ckpt_path='elsewhere'\)"):
            given.fit(make_module(isolated.cell, is_manual=True), ckpt_path="elsewhere")
        together = make_trainer(folder, FederatedRounds(every=EVERY), logger=CSVLogger(folder, version=0), **options)
        with pytest.raises((xffl.ConfigError, xffl.LaunchError)) as refused:
            together.fit(make_module(isolated.cell, is_manual=True))
        own = FederatedRounds(every=2)
        options |= {"enable_checkpointing": False, "max_steps": -1, "limit_train_batches": 8, "max_epochs": 1}
        make_trainer(folder, own, **options).fit(make_own_steps(isolated.cell))
        lines = Path(logger.log_dir, "metrics.csv").read_text().splitlines()
        column = lines[0].split(",").index("xffl/round")
        return {
            "weights": weights_of(module.layers),
            "counts": [report.weights for report in rounds.reports],
            "accumulated": [report.weights for report in own.reports],
            "rounds": [line.split(",")[column] for line in lines[1:]],
            "kept": sorted(path.name for path in Path(saves.dirpath).glob("*.xffl")),
            "refused": str(refused.value),
        }


def be_page(rank: int, world_size: int, port: int, folder: str) -> float:
    """Be a rank of the script on the page."""
    be_launched(rank, world_size, port)
    os.chdir(folder)
    [script] = scripts_of("frameworks")
    with enter_isolation(SIZES):
        names: dict[str, Any] = {"__name__": "__main__"}
        exec(compile(script.text, script.name, "exec"), names)
        return float(sum(value.double().sum() for value in names["module"].parameters()))


def run_scripts(rank: int, world_size: int, folder: str) -> tuple[list[Any], list[float]]:
    import_module("xffl.integrations.lightning")
    return run_job(2, be_manual, folder), run_job(4, be_page, folder)


def test_several_optimizers_logs_and_the_script_of_the_page(tmp_path: Path) -> None:
    [(manual, sums)] = run_world(1, run_scripts, str(tmp_path), init=False, timeout_s=280)
    for trained in manual:
        assert differ(trained["weights"], manual[0]["weights"]) == 0.0
        assert trained["counts"] == [(EVERY * ROWS, EVERY * ROWS)] * 3
        assert trained["accumulated"] == [(4 * ROWS, 4 * ROWS)] * 2
        assert trained["rounds"][-1] == "3.0" and "1.0" in trained["rounds"]
        assert trained["kept"] == ["epoch=0-step=15.ckpt.xffl", "epoch=0-step=30.ckpt.xffl", "last.ckpt.xffl"]
    assert "loggers of several cells write into" in manual[0]["refused"]
    assert sums == [sums[0]] * 4


def be_elastic(cell: int, port: int, url: str, folder: str, *, is_back: bool) -> tuple[Any, float, list[int], bool]:
    """Be a cell of one rank, and a job of its own; cell 1 dies in its first life, SLURM wants to requeue cell 0."""
    from lightning.pytorch.callbacks import Callback, ModelCheckpoint

    from xffl.integrations.lightning import FederatedRounds

    rounds = FederatedRounds(every=3)

    def count_cells() -> list[int]:
        return [sum(weight > 0 for weight in report.weights) for report in rounds.reports]

    class Course(Callback):  # type: ignore[misc]
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if cell == 1 and not is_back and trainer.global_step == 7:
                os.kill(os.getpid(), signal.SIGKILL)
            if cell == 0 and trainer.global_step == 4:
                os.environ["SLURM_JOB_ID"] = "17"
                trainer._signal_connector._slurm_sigusr_handler_fn(signal.SIGUSR1, None)

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if is_at_end(count_cells(), folder, is_back=is_back):
                trainer.should_stop = True

    be_launched(0, 1, port)
    os.environ |= {
        "XFFL_LIGHTHOUSE": url,
        "XFFL_CELL": f"{cell}/2",
        "XFFL_RESTARTS": str(int(is_back)),
        "PATH": f"{folder}:{os.environ['PATH']}",
    }
    options: dict[str, Any] = {"enable_checkpointing": True, "accumulate_grad_batches": 1, "strategy": "auto"}
    saves = ModelCheckpoint(every_n_train_steps=3)
    trainer = make_trainer(f"{folder}/runs_{cell}", rounds, Course(), saves, max_steps=10**4, **options)
    module = make_module(cell)
    if is_back:
        Path(folder, "came_back").touch()
    trainer.fit(module)
    return weights_of(module.layers), rounds.total_weight, count_cells(), rounds.resumed is not None


@pytest.mark.skipif(find_spec("torchft") is None, reason="needs the extra elastic")
def test_a_lost_cell_of_an_elastic_run_comes_back_and_contributes(lighthouse: str, tmp_path: Path) -> None:  # noqa: F811
    """SLURM's auto-requeue of Lightning, which saves in the handler of a signal, saves nothing here."""
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/requeued\n')
    scontrol.chmod(0o755)
    check_that_it_came_back(lighthouse, tmp_path, partial(import_module, "xffl.integrations.lightning"), be_elastic)
    assert (tmp_path / "requeued").read_text() == "requeue 17\n"
    assert not list(tmp_path.rglob("hpc_ckpt*"))
