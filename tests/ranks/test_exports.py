"""Rounds over files: exports of cells, and what `xffl aggregate` makes of them, against rounds over a network."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import xffl
from tests.ports import free_port
from tests.tasks import HELD_OUT, TaskConfig, TaskTrainer, digits
from tests.worlds import be_launched, run_world
from xffl.aggregation import offline as pieces
from xffl.aggregation.algorithms.registry import make
from xffl.aggregation.exports import RoundPlan, export_cell, load_global, read_told
from xffl.aggregation.offline import aggregate_exports
from xffl.checkpoint.format import OpenCheckpoint, check_data, read_index, read_record
from xffl.cli.main import main
from xffl.cluster.over_files import read_over_files
from xffl.errors import CheckpointError, ConfigError, StateError, XfflError
from xffl.naming import Writer
from xffl.parallel import DistributedConfig
from xffl.training import Callback, ExperimentConfig, FederationConfig, TrainingParameters
from xffl.training.callbacks import CheckpointCallback

WEIGHTS = (3.0, 1.0, 2.5, 0.5)


class Mixed(nn.Module):
    """Parameters and buffers of several kinds; the first layer is large enough to be combined in pieces."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first = nn.Linear(24, 36)
        self.norm = nn.BatchNorm1d(36)
        self.second = nn.Linear(36, 5).to(dtype)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("phase", torch.zeros(4, dtype=torch.complex64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.scale * self.second(self.norm(self.first(inputs)))  # type: ignore[no-any-return]


def fill(model: nn.Module, cell: int, place: int) -> None:
    """Give a cell's weights, and each rank's buffers, values of their own; those of weights are the same in a cell."""
    draws = torch.Generator().manual_seed(7 + cell)
    with torch.no_grad():
        for parameter in model.parameters():
            whole = torch.randn(parameter.shape, generator=draws).to(parameter.dtype)
            if hasattr(parameter, "to_local"):
                from torch.distributed.tensor import distribute_tensor

                parameter.to_local().copy_(
                    distribute_tensor(whole, parameter.device_mesh, parameter.placements).to_local()
                )
            else:
                parameter.copy_(whole)
        own = torch.Generator().manual_seed(1000 * cell + place)
        for buffer in model.buffers():
            if buffer.is_floating_point() or buffer.is_complex():
                buffer.copy_(torch.randn(buffer.shape, generator=own, dtype=buffer.dtype))
            else:
                buffer.fill_(10 + cell)


def whole(model: nn.Module) -> dict[str, str]:
    found = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        value = (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()
        data = torch.view_as_real(value) if value.is_complex() else value
        found[name.removeprefix("module.")] = hashlib.sha256(
            data.reshape(-1).view(torch.uint8).numpy().tobytes()
        ).hexdigest()
    return found


def networked(
    rank: int, world_size: int, port: int, cells: tuple[int, ...], hsdp: int | None, dtype: torch.dtype, combine: str
) -> dict[str, str]:
    be_launched(rank, world_size, port)
    with xffl.session(federated=cells, hsdp=hsdp) as state:
        model = xffl.shard(Mixed(dtype), state, wrap=[nn.Linear])
        cell = state.topology.cell_of(rank)
        fill(model, cell, rank - state.topology.offsets[cell])
        xffl.Aggregator(model, state, combine=combine).aggregate(weight=WEIGHTS[cell] / cells[cell])
        return whole(model)


def exported(
    rank: int, world_size: int, port: int, cell: int, cells: int, hsdp: int | None, dtype: torch.dtype, folder: str
) -> None:
    be_launched(rank, world_size, port)
    with xffl.session(hsdp=hsdp) as state:
        model = xffl.shard(Mixed(dtype), state, wrap=[nn.Linear])
        fill(model, cell, rank)
        export_cell(folder, model, state, cell=cell, cells=cells, weight=WEIGHTS[cell] / world_size, steps=4.0)


def loaded(
    rank: int, world_size: int, port: int, cell: int, hsdp: int | None, dtype: torch.dtype, folder: str, number: int = 1
) -> Any:
    be_launched(rank, world_size, port)
    with xffl.session(hsdp=hsdp) as state:
        model = xffl.shard(Mixed(dtype), state, wrap=[nn.Linear])
        fill(model, cell, rank)
        assert load_global(folder, model, state) == number
        return whole(model)


def export_all(tmp_path: Path, cells: tuple[int, ...], hsdp: int | None, dtype: torch.dtype) -> list[str]:
    folders = [str(tmp_path / f"cell_{cell}") for cell in range(len(cells))]
    for cell, size in enumerate(cells):
        run_world(size, exported, free_port(), cell, len(cells), hsdp, dtype, folders[cell], init=False)
    return folders


@pytest.mark.parametrize(
    ("cells", "hsdp", "dtype", "combine"),
    [
        ((4, 2), 2, torch.float32, "mean"),
        ((1, 2, 3), None, torch.float16, "mean"),
        pytest.param((1, 1), None, torch.float32, "mean", marks=pytest.mark.long),
        pytest.param((2, 2), None, torch.bfloat16, "mean", marks=pytest.mark.long),
        pytest.param((2, 2), 1, torch.float64, "mean", marks=pytest.mark.long),
        ((1, 2, 1, 1), None, torch.float32, "median"),
    ],
)
def test_a_round_over_files_has_the_bits_of_one_over_a_network(
    cells: tuple[int, ...], hsdp: int | None, dtype: torch.dtype, combine: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("xffl.aggregation.offline.PIECE_BYTES", 1000)
    found = run_world(sum(cells), networked, free_port(), cells, hsdp, dtype, combine, init=False)
    folders = export_all(tmp_path, cells, hsdp, dtype)
    made = aggregate_exports(folders[::-1], tmp_path / "global", combine=combine)
    assert made.cells == len(cells) and made.number == 1
    weights = WEIGHTS[: len(cells)] if combine == "mean" else (1.0,) * len(cells)
    assert made.shares == pytest.approx([weight / sum(weights) for weight in weights])
    last = len(cells) - 1
    call = (free_port(), last, hsdp, dtype, str(tmp_path / "global"))
    for rank, values in enumerate(run_world(cells[last], loaded, *call, init=False)):
        assert values == found[sum(cells[:last]) + rank]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = export_all(tmp_path, (1, 1), None, torch.float32)
    out = tmp_path / "global"
    assert main(["aggregate", *folders, "--out", str(out), "--dry-run"]) == 0
    told = capsys.readouterr().out
    assert "would be round 1 of cell 0 75.0%, cell 1 25.0%: 11 tensors" in told and not out.exists()
    assert main(["aggregate", *folders, "--out", str(out), "--weights", "1,3"]) == 0
    assert "round 1 of cell 0 25.0%, cell 1 75.0%" in capsys.readouterr().out
    first = json.loads((out / "checkpoint.json").read_text())
    assert first["values"]["global"]["shares"] == [0.25, 0.75]
    # A result is replaced by the next one; anything else is not.
    assert main(["aggregate", *folders, "--out", str(out)]) == 0
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    capsys.readouterr()
    for words, problem in (
        ([folders[0]], "the export of cell 1 of 2 is missing"),
        ([folders[0], folders[0]], "are both of cell 0; give one of each"),
        ([folders[0], str(out)], "is not the export of a cell; give what --export wrote"),
        ([*folders, "--weights", "1"], "1 weights are given for 2 cells"),
        ([*folders, "--weights", "1,x"], "--weights must be a number for each cell, such as 3,1, got 'x'"),
        ([*folders, "--weights", "0,0"], "must be finite, none negative and one positive"),
        ([*folders, "--combine", "krum:faulty=0"], "needs more than the exports hold"),
    ):
        assert main(["aggregate", *words, "--out", str(tmp_path / "new")]) == 2
        told = capsys.readouterr().err
        assert problem in told and told.count("\n") == 1, told
    for taken in (str(tmp_path / "other"), folders[1]):
        assert main(["aggregate", *folders, "--out", taken]) == 2
        assert "exists and is no result of xffl aggregate, which would be replaced" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_damaged_and_unlike_exports(tmp_path: Path) -> None:
    folders = [Path(folder) for folder in export_all(tmp_path, (1, 1), None, torch.float32)]
    damaged = tmp_path / "damaged"
    shutil.copytree(folders[1], damaged)
    (file,) = damaged.rglob("*.distcp")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"damaged/cell_0/__0_0.distcp is not as it was written"):
        aggregate_exports([folders[0], damaged], tmp_path / "new")
    other = tmp_path / "bf16"
    run_world(1, exported, free_port(), 1, 2, None, torch.bfloat16, str(other), init=False)
    with pytest.raises(CheckpointError, match=r"'second.bias' is \(5,\) torch.bfloat16, average in .*bf16 and \(5,\)"):
        aggregate_exports([folders[0], other], tmp_path / "new")
    third = tmp_path / "third"
    run_world(1, exported, free_port(), 1, 3, None, torch.float32, str(third), init=False)
    with pytest.raises(CheckpointError, match=r"third is of cells 3, .*cell_0 of 2; give exports of one round"):
        aggregate_exports([folders[0], third], tmp_path / "new")
    run_world(1, wrong, free_port(), str(tmp_path), init=False)
    assert not (tmp_path / "new").exists()


def one_wrong_weight(rank: int, world_size: int, port: int, folder: str) -> None:
    be_launched(rank, world_size, port)
    with xffl.session(cell=0, cells=2) as state:
        model = xffl.shard(nn.Linear(2, 2), state)
        weight = [1.0, -1.0][rank]
        with pytest.raises(ConfigError, match=r"weight must be a number >= 0, got -1.0.*rank 1 of 2"):
            export_cell(folder, model, state, cell=0, cells=2, weight=weight)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scaling = xffl.FederatedScaling(model, optimizer, state, every=2, weight=lambda: weight)
        model(torch.ones(1, 2)).sum().backward()
        with pytest.raises(ConfigError, match=r"weight must be a number >= 0, got -1.0.*rank 1 of 2"), scaling:
            optimizer.step()
        scaling = xffl.FederatedScaling(model, optimizer, state, every=2, weight=lambda: 1 / (1 - rank))
        with pytest.raises(xffl.RoundError, match=r"cannot be read: ZeroDivisionError.*rank 1 of 2"), scaling:
            optimizer.step()


def test_a_wrong_weight_of_one_rank_is_refused_on_all(tmp_path: Path) -> None:
    run_world(2, one_wrong_weight, free_port(), str(tmp_path / "export"), init=False)
    assert not (tmp_path / "export").exists()


def wrong(rank: int, world_size: int, port: int, folder: str) -> None:
    be_launched(rank, world_size, port)
    with xffl.session() as state:
        model = xffl.shard(Mixed(torch.float32), state)
        fill(model, 0, 0)
        for asked, told in (
            ({"cell": 2, "cells": 2}, "cell must be an integer from 0 to 1, got 2; count from 0"),
            ({"cell": 0, "cells": 0}, "cells must be a positive integer"),
            ({"cell": 0, "cells": 2, "weight": -1.0}, "weight"),
            ({"cell": 0, "cells": 2, "policies": {"nothing": "local"}}, "match no tensor"),
        ):
            with pytest.raises(ConfigError, match=told):
                export_cell(Path(folder, "no"), model, state, **asked)
        with pytest.raises(CheckpointError, match="is not the model of a round of exports"):
            load_global(Path(folder, "cell_0"), model, state)
        with torch.no_grad():
            model.first.bias[3] = torch.nan
        nan = Path(folder, "nan")
        export_cell(nan, model, state, cell=0, cells=1)
        with pytest.raises(CheckpointError, match=r"nan: tensor 'first.bias' of cell 0 has values that are not finite"):
            aggregate_exports([nan], Path(folder, "new"))
        # Nothing of another model is loaded.
        fill(model, 0, 0)
        export_cell(nan, model, state, cell=0, cells=1)
        aggregate_exports([nan], Path(folder, "one"))
        before = whole(model)
        narrow = xffl.shard(nn.Linear(4, 2), state)
        with pytest.raises(CheckpointError, match="tensor 'bias' is missing in .*one and "):
            load_global(Path(folder, "one"), narrow, state)
        assert load_global(Path(folder, "one"), model, state) == 1 and whole(model) == before


def killed(rank: int, world_size: int, folders: list[str], out: str, weights: list[float], after_s: float) -> None:
    """Make a round, until this process is killed some time after its beginning."""
    threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
    pieces.PIECE_BYTES = 16
    aggregate_exports(folders, out, weights=weights)
    time.sleep(after_s)


def test_a_kill_leaves_the_result_of_before_or_the_new_one(tmp_path: Path) -> None:
    folders = export_all(tmp_path, (1, 1), None, torch.float32)
    out = tmp_path / "global"
    begun_s = time.monotonic()
    aggregate_exports(folders, out)
    took_s = time.monotonic() - begun_s
    draws, found, longest_s = random.Random(3), [], 8 * took_s
    for life in range(12):
        weights = [1.0, life + 2.0]
        before = read_record(out).values["global"]["shares"]
        run_world(1, killed, folders, str(out), weights, draws.uniform(0.0, longest_s), init=False, mortal=(0,))
        with OpenCheckpoint(out) as source:
            record = source.read_record()
            check_data(read_index(source, record))
        new = [weight / sum(weights) for weight in weights]
        assert record.values["global"]["shares"] in (before, pytest.approx(new))
        found.append(record.values["global"]["shares"] != before)
        longest_s *= 0.7 if found[-1] else 1.4  # whatever the machine's speed, some kills come before the end
    assert {*found} == {False, True}, found
    aggregate_exports(folders, out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cell_0", "cell_1", "global"]


def fit(rank: int, world_size: int, port: int, folder: str, federation: dict[str, Any], steps: int, cells: Any) -> Any:
    """Train for some steps of all, with a checkpoint at the end, and return the weights."""
    be_launched(rank, world_size, port)
    config = TaskConfig(
        experiment=ExperimentConfig(name="test", output_dir=folder, seed=3),
        training=TrainingParameters(epochs=9, max_steps=steps, batch_size=7, validate_every_epochs=None),
        distributed=DistributedConfig(strategy="fsdp", federated=cells),
        federation=FederationConfig(**federation),
    )
    kept: dict[str, Any] = {}

    class Last(Callback):
        def post_fit(self, trainer: Any) -> None:
            kept.update(whole(trainer.model), samples=trainer.samples, step=trainer.global_step)

    LabelledTrainer(config, callbacks=[Last(), CheckpointCallback()]).fit()
    return kept


class LabelledTrainer(TaskTrainer):
    """Tells the labels, for the run's table of who has what."""

    def configure_dataloaders(self) -> tuple[Any, Any]:
        images, labels = (one[HELD_OUT : HELD_OUT + self.config.samples] for one in digits())
        return self.train_loader(TensorDataset(images, labels), labels=labels), None


@pytest.mark.parametrize(
    ("sizes", "algorithm"), [((1, 1), "diloco"), pytest.param((2, 1), None, marks=pytest.mark.long)]
)
def test_training_over_files_has_the_bits_of_training_over_a_network(
    sizes: tuple[int, ...], algorithm: str | None, tmp_path: Path
) -> None:
    """Three rounds of cells that are jobs of their own, each started anew for each round, with one configuration."""
    rounds = {"every": 5, "algorithm": algorithm}
    joined = run_world(
        sum(sizes), fit, free_port(), str(tmp_path / "joined"), rounds, 15, sizes, init=False, timeout_s=200
    )
    start: dict[str, str] = {}
    for number in range(1 if algorithm is None else 0, 4):
        exports = []
        for cell, size in enumerate(sizes):
            exports.append(str(tmp_path / f"cell_{cell}_round_{number}"))
            asked = {**rounds, "cell": f"{cell}/{','.join(map(str, sizes))}", "export_to": exports[-1], **start}
            asked["round"] = number
            call = (fit, free_port(), str(tmp_path / f"run_{cell}"), asked, 15, None)
            for kept in run_world(size, *call, init=False):
                assert kept["step"] == 5 * number  # and not to the end: that is another job's
            if number == 2:  # A job that is started again for a round that it has made exports the same.
                before = json.loads(Path(exports[-1], "checkpoint.json").read_text())["indexes"]
                run_world(size, *call, init=False)
                assert json.loads(Path(exports[-1], "checkpoint.json").read_text())["indexes"] == before
        made = aggregate_exports(
            exports, tmp_path / f"global_{number}", state=tmp_path / "s", start=tmp_path / "global_0"
        )
        assert made.number == number and made.shares == pytest.approx([size / sum(sizes) for size in sizes], abs=0.1)
        assert aggregate_exports(exports, tmp_path / f"global_{number}", state=tmp_path / "s").was_there
        start = {} if number == 0 else {"start_from": str(tmp_path / f"global_{number}")}
    (last,) = run_world(1, weights_of, free_port(), start["start_from"], init=False)
    for name, digest in last.items():
        assert all(rank[name] == digest for rank in joined), name


def weights_of(rank: int, world_size: int, port: int, path: str) -> dict[str, str]:
    be_launched(rank, world_size, port)
    with xffl.session() as state:
        trainer = TaskTrainer(TaskConfig())
        trainer.configure_models()
        load_global(path, trainer.model, state)
        return whole(trainer.model)


def test_what_a_lone_cell_cannot_be() -> None:
    for wrong, told in (
        ({"cell": "2/2"}, "federation.cell is '2/2'; give the cell's number, from 0"),
        ({"cell": "0"}, "federation.cell is '0'; give the cell's number"),
        (
            {"cell": "0/2", "every": "epochs:epochs=1,steps_per_epoch=5"},
            "rounds over files come after a number of steps; give that",
        ),
        ({"export_to": "x"}, "federation.export_to is for a cell that is a job of its own"),
        ({"cell": "0/2", "aggregator": {"codec": "int8"}}, "codec 'int8' is not supported in rounds over files"),
        ({"cell": "0/2", "every": 5, "delay": 1}, "federation.delay 1 is for rounds over a network"),
        ({"cell": "0/2", "algorithm": "scaffold", "every": 5}, "client 'scaffold' is not supported in rounds over"),
        ({"cell": "0/2", "aggregator": {"combine": "krum:faulty=0"}}, "combine Krum needs more than the exports hold"),
    ):
        with pytest.raises(ConfigError, match=told):
            FederationConfig(**wrong)  # type: ignore[arg-type]
    options = {"policies": {"*": "average"}, "rails": True, "server": "diloco", "nonfinite": "reject"}
    assert FederationConfig(cell="1/4,2", aggregator=options).plan.read()[1] == "diloco"
    with pytest.raises(ConfigError, match="exports hold options as JSON, which .* are not; give server and combine by"):
        RoundPlan(options={"combine": make("combine", "median", writer=Writer.USER)}).check()


def test_a_cell_that_has_lost_its_steps_or_is_in_another_round_is_told(tmp_path: Path) -> None:
    first = {"every": 5, "cell": "0/1", "export_to": str(tmp_path / "export"), "round": 1}
    run_world(1, fit, free_port(), str(tmp_path / "run"), first, 15, None, init=False)
    aggregate_exports([tmp_path / "export"], tmp_path / "global")
    run_world(1, fit_wrong, free_port(), str(tmp_path), init=False)


def fit_wrong(rank: int, world_size: int, port: int, folder: str) -> None:
    be_launched(rank, world_size, port)
    asked = {"every": 5, "cell": "0/1", "start_from": f"{folder}/global"}
    for run, changed, told in (
        ("lost", {}, r"is of round 1, before which a cell makes 5 steps, but the run in .*lost has made 0"),
        ("run", {"cell": "1/2"}, r"was saved with cell 0, but this one has 1"),
        ("run", {"round": 3}, r"federation.round is 3, but this run, after 5 steps and .*global, is in round 2"),
    ):
        with pytest.raises(XfflError, match=told):
            fit(rank, world_size, port, f"{folder}/{run}", {**asked, **changed}, 15, None)


def scripted(
    rank: int, world_size: int, port: int, cells: Any, steps: tuple[int, int], named: dict[str, str], algorithm: str
) -> tuple[dict[str, str], int]:
    """Run a script of a user's, which is the same in one job of all cells and in a job for each."""
    be_launched(rank, world_size, port)
    os.environ.update(named)
    with xffl.session(federated=cells) as state:
        torch.manual_seed(1)
        model = xffl.shard(Mixed(torch.float32), state, wrap=[nn.Linear])
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        place = state.data_place.rank
        kept = f"{named.get('XFFL_EXPORT', '')[:-1]}{rank}.pt"
        count = 100 * (state.cell + 1)
        with xffl.FederatedScaling(
            model, optimizer, state, every=2, weight=lambda: float(count), algorithm=algorithm
        ) as scaling:
            if named and Path(kept).exists():  # of the job before, whose steps are in the global model
                scaling.load_state_dict(torch.load(kept))
            for step in range(*steps):
                inputs = torch.randn(3, 24, generator=torch.Generator().manual_seed(100 * step + place))
                model(inputs).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            if named:
                torch.save(scaling.state_dict(), kept)
        return whole(model), place


@pytest.mark.parametrize("sizes", [pytest.param((1, 1), marks=pytest.mark.long), (2, 1)])
def test_a_script_over_files_has_the_bits_of_one_over_a_network(sizes: tuple[int, ...], tmp_path: Path) -> None:
    joined = run_world(sum(sizes), scripted, free_port(), sizes, (0, 4), {}, "median", init=False)
    start: dict[str, str] = {}
    for number in (1, 2):
        exports = []
        for cell, size in enumerate(sizes):
            exports.append(str(tmp_path / f"{cell}_{number}"))
            named = {"XFFL_CELL": f"{cell}/{','.join(map(str, sizes))}", "XFFL_EXPORT": exports[-1], **start}
            steps = (2 * number - 2, 2 * number)
            found = run_world(size, scripted, free_port(), None, steps, named, "median", init=False)
            told = read_told(Path(exports[-1]), "export")
            assert (told["steps"], told["weight"], told["round"]) == (2.0, size * 100.0 * (cell + 1), number)
            assert [place for _, place in found] == [sum(sizes[:cell]) + rank for rank in range(size)]
        assert aggregate_exports(exports, tmp_path / f"global_{number}").number == number
        start = {"XFFL_FROM": str(tmp_path / f"global_{number}")}
    (last,) = run_world(1, loaded, free_port(), 0, None, torch.float32, start["XFFL_FROM"], 2, init=False)
    for name, digest in last.items():
        if name != "frozen":
            assert all(weights[name] == digest for weights, _ in joined), name


def test_what_a_job_of_one_cell_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    for asked, told in (
        ({"cell": 0}, "cell is 0 and cells is None; give both"),
        ({"cell": 2, "cells": 2}, "cell is '2/2'; give the cell's number, from 0"),
        ({"cell": 0, "cells": (2, 1)}, "is to be cell 0, of 2 ranks, but it has 1 cells and 1 ranks"),
    ):
        with pytest.raises(ConfigError, match=told), xffl.session(**asked):
            pass
    with xffl.session(cell=1, cells=2) as state:
        assert state.lone_cell == (1, (1, 1)) and state.data_place.rank == 1
        assert (state.cell, state.cells, state.cell_rank, state.cell_size, state.federated_rank) == (1, 2, 0, 1, None)
        model = xffl.shard(nn.Linear(2, 2), state)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for asked, told in (
            ({"client": "fedprox"}, "one cell by itself, whose rounds go over files, but client is"),
            ({"aggregator": {"codec": "int8"}}, "codec 'int8' is not supported in rounds over files"),
        ):
            with pytest.raises(ConfigError, match=told):
                xffl.FederatedScaling(model, optimizer, state, every=2, **asked)
        with xffl.FederatedScaling(model, optimizer, state, every=2) as twice:
            pass
        with pytest.raises(StateError, match="its with block is entered once; start another job"), twice:
            pass
        scaling = xffl.FederatedScaling(model, None, state, every=2)
        with pytest.raises(StateError, match="no local step was counted"), scaling, torch.no_grad():
            model.weight.add_(1.0)
    monkeypatch.setenv("XFFL_FROM", "global")
    with pytest.raises(ConfigError, match="--from global is for a cell that is a job of its own; give --cell"):
        read_over_files()


SERVERS = ["fedadam:lr=0.03", "diloco", {"name": "SGD", "lr": 0.9, "momentum": 0.5, "schedule": "StepLR:step_size=2"}]


def stray(model: nn.Module, cell: int, number: int, place: int) -> None:
    """What local steps do: change a cell's weights, all ranks' shards alike, and each rank's buffers."""
    before = {name: _plain(parameter).clone() for name, parameter in model.named_parameters()}
    fill(model, 10 * number + cell, place)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _plain(parameter).mul_(0.01).add_(before[name])


def _plain(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def three_rounds(
    rank: int, world_size: int, port: int, cells: tuple[int, ...], dtype: torch.dtype, server: object
) -> dict[str, str]:
    be_launched(rank, world_size, port)
    with xffl.session(federated=cells) as state:
        model = xffl.shard(Mixed(dtype), state, wrap=[nn.Linear])
        fill(model, 0, 0)
        cell = state.topology.cell_of(rank)
        aggregator = xffl.Aggregator(model, state, server=server)
        for number in range(1, 4):
            stray(model, cell, number, rank - state.topology.offsets[cell])
            aggregator.aggregate(weight=WEIGHTS[cell] / cells[cell])
        return whole(model)


def one_round(
    rank: int, world_size: int, port: int, cell: int, cells: int, dtype: torch.dtype, number: int, start: str, to: str
) -> dict[str, str]:
    be_launched(rank, world_size, port)
    with xffl.session() as state:
        model = xffl.shard(Mixed(dtype), state, wrap=[nn.Linear])
        fill(model, 0, 0)
        if number > 0:
            assert load_global(start, model, state) == number - 1
            stray(model, cell, number, rank)
        export_cell(to, model, state, cell=cell, cells=cells, weight=WEIGHTS[cell] / world_size, round=number)
        return whole(model)


@pytest.mark.parametrize(("server", "sizes", "dtype"), [
    (SERVERS[0], (2, 1), torch.float32), (SERVERS[1], (1, 1), torch.bfloat16), (SERVERS[2], (1, 1), torch.float64),
])  # fmt: skip
def test_a_server_optimizer_goes_on_from_round_to_round(
    server: object, sizes: tuple[int, ...], dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("xffl.aggregation.offline.PIECE_BYTES", 1000)
    expected = run_world(sum(sizes), three_rounds, free_port(), sizes, dtype, server, init=False)
    state = tmp_path / "server"
    for number in range(4):
        exports = [str(tmp_path / f"{cell}_{number}") for cell in range(len(sizes))]
        for cell, size in enumerate(sizes):
            call = (cell, len(sizes), dtype, number, str(tmp_path / f"global_{number - 1}"), exports[cell])
            run_world(size, one_round, free_port(), *call, init=False)
        out = tmp_path / f"global_{number}"
        if number == 0:
            aggregate_exports(exports, out)
            continue
        if number == 1:
            with pytest.raises(CheckpointError, match="has no state of round 0, so the model from which the cells"):
                aggregate_exports(exports, out, server=server, state=state)
            assert not out.exists()
        aggregate_exports(exports, out, server=server, state=state, start=tmp_path / "global_0")
        if number == 2:  # To make a round again gives the same.
            before = (out / "cell_0" / "index.json").read_bytes()
            aggregate_exports(exports, out, server=server, state=state)
            assert (out / "cell_0" / "index.json").read_bytes() == before
            with pytest.raises(
                CheckpointError,
                match="of a server optimizer with .*; resume with the same .* as --state, .* as --start",
            ):
                aggregate_exports(exports, out, server="fedadam:lr=0.5", state=state)
    (found,) = run_world(1, loaded, free_port(), 0, None, dtype, str(tmp_path / "global_3"), 3, init=False)
    for name, digest in found.items():
        if name != "frozen":
            assert all(rank[name] == digest for rank in expected), name


def length_of_step(rank: int, world_size: int, port: int, before: str, after: str) -> float:
    be_launched(rank, world_size, port)
    with xffl.session() as state:
        models = [xffl.shard(Mixed(torch.float32), state, wrap=[nn.Linear]) for _ in range(2)]
        for model, path in zip(models, (before, after), strict=True):
            fill(model, 0, 0)
            load_global(path, model, state)
        pairs = zip(*(model.parameters() for model in models), strict=True)
        steps = [(_plain(new) - _plain(old)).detach() for old, new in pairs if old.requires_grad]
        return float(torch.sqrt(sum((step.abs() ** 2).sum() for step in steps)))  # type: ignore[arg-type]


def test_a_server_clips_the_pseudo_gradient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xffl.aggregation.offline.PIECE_BYTES", 1000)
    globals_ = [tmp_path / f"global_{number}" for number in range(2)]
    for number in range(2):
        exports = [str(tmp_path / f"{cell}_{number}") for cell in range(2)]
        for cell in range(2):
            run_world(
                1, one_round, free_port(), cell, 2, torch.float32, number, str(globals_[0]), exports[cell], init=False
            )
        if number == 0:
            aggregate_exports(exports, globals_[0])
    found = []
    for place, clip in enumerate((",clip=0.004", "", ",clip=9e9")):
        out = tmp_path / f"clipped_{place}"
        aggregate_exports(
            exports, out, server=f"sgd:lr=1.0{clip}", state=tmp_path / f"state_{place}", start=globals_[0]
        )
        found += run_world(1, length_of_step, free_port(), str(globals_[0]), str(out), init=False)
    assert found[0] == pytest.approx(0.004, rel=1e-3)
    assert found[1] == found[2] > 0.01, found


def large(rank: int, world_size: int, port: int, path: str) -> int:
    be_launched(rank, world_size, port)
    with xffl.session() as state:
        model = xffl.shard(nn.Linear(4096, 8192), state)
        export_cell(path, model, state, cell=int(path[-1]), cells=2)
        return sum(one.numel() * one.itemsize for one in model.parameters())


MEASURED = """
import sys, threading, time
import torch, torch.distributed.checkpoint
from xffl.aggregation.offline import aggregate_exports

def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon"))

def watch():
    while True:
        seen.append(anonymous())
        time.sleep(0.002)

before, seen = anonymous(), []
threading.Thread(target=watch, daemon=True).start()
aggregate_exports(sys.argv[1:3], sys.argv[3])
print((max(seen) - before) / 1024)
"""


def test_what_an_export_weighs_and_what_a_round_of_them_takes(tmp_path: Path) -> None:
    """A tensor of 128 MiB: files hardly larger than it, and much less memory."""
    paths = [str(tmp_path / f"cell_{cell}") for cell in range(2)]
    for path in paths:
        (size,) = run_world(1, large, free_port(), path, init=False)
        there = sum(file.stat().st_size for file in Path(path).rglob("*") if file.is_file())
        assert size == 4 * 8192 * 4097 and size < there <= 1.02 * size
    command = [sys.executable, "-c", MEASURED, *paths, str(tmp_path / "global")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    assert 0 < float(ran.stdout) < 150, ran.stdout
