"""Cells as worlds of their own: the same bits as in one world, and what a script sees of its cell."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import xffl
from tests.golden.cases import KINDS, bits, by_size
from tests.golden.table import CASES
from tests.kept import Own
from tests.ports import free_port
from tests.rows import some_of
from tests.worlds import be_launched, run_world
from xffl.checkpoint import AsyncSaver, CheckpointManager, load_checkpoint, save_checkpoint
from xffl.checkpoint.format import read_record
from xffl.cli.execute import build_parser, run, split_command
from xffl.distributed.parameters import DeviceParameters
from xffl.distributed.several_worlds.cell_notes import open_notes
from xffl.training.preemption import PreemptedExit, Preemption

ROOT = Path(__file__).parents[2]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", "-m", "xffl", "exec"]

EQUAL = (
    *("rounds geometric_median, int8, 1+1+1+1", "rounds secure, privacy, 1+1+1+1"),
    *("rounds late, fragments, diloco, 2+2 by 1", "loop delay, uneven, int8, 3+1"),
    *("save scaffold, 2+2 by 1", "load scaffold, 2+2 by 1"),
)
"""Rows of the goldens: of each kind, in one world of four ranks"""
MORE_EQUAL = (
    *("rounds rails, two_hop, int8, 4+2 by 2", "rounds drop_cell, fedadam, 1+2+3", "loop divergence, 1+2+3"),
    *("rounds equal parts, 2+2 by 1", "rounds reject, int8, 2+2", "loop scaffold, fedavgm, 2+2"),
    *("rounds mixed, 4+2 by 2", "rounds int8, stochastic, 2+2", "rounds fragments, diloco, 3+1"),
    *("rounds fedadam, int8, 1+2+3", "rounds privacy, 1+2+3", "loop uneven, 4+2 by 2", "loop per_cell, 2+2"),
    *("loop streaming_diloco, 2+2 by 1", "loop secure_sum, 1+1+1+1"),
    *("save int8, fedadam, 3+1", "load int8, fedadam, 3+1", "save after a round", "load after a round, 1+1+1+1"),
)
"""With these, of each option at least one"""


SCRIPT = """
import json
import os
import sys
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DistributedSampler
import xffl

dist.init_process_group("gloo")
state = xffl.adopt()
torch.manual_seed(state.cell)
model = nn.parallel.DistributedDataParallel(nn.Linear(3, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
xffl.Aggregator(model, state).aggregate(weight=float(state.cell == 0))
with xffl.FederatedScaling(model, optimizer, state, every=2, algorithm="diloco") as scaling:
    for step in range(4):
        model(torch.full((1, 3), state.data_place.rank + 1.0)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
# Sharded by FSDP2, with a sampler and a checkpoint of torch's own, over the default group as frameworks use it.
samples = list(DistributedSampler(range(2 * dist.get_world_size()), shuffle=False))
sharded = fully_shard(nn.Linear(4, 2), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
nn.init.constant_(sharded.weight, 1.0 + state.cell)
xffl.Aggregator(sharded, state).aggregate()
saved = get_model_state_dict(sharded)
dcp.save(saved, checkpoint_id=f"cell_{state.cell}")
nn.init.zeros_(sharded.weight)
dcp.load(saved, checkpoint_id=f"cell_{state.cell}")
whole = sharded.weight.full_tensor().tolist()
told = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
told |= {"words": sys.argv[1:], "cell": [state.cell, state.cells, state.cell_rank, state.cell_size]}
told |= {"ranks": dist.get_world_size(), "rounds": scaling.aggregator.rounds}
told["is_torchrun"] = dist.is_torchelastic_launched()
told |= {"samples": samples, "whole": whole}
told["sum"] = float(model.module.weight.detach().sum())
with open(f"told_{state.data_place.rank}.json", "w") as file:
    json.dump(told, file)
dist.destroy_process_group()
"""
"""What a framework does: it makes the process group, and wraps the model over it."""


def be_rank(rank: int, world_size: int, port: int, names: list[str], folder: str) -> dict[str, list[Any]]:
    """Do what the rows say in one world, and then with isolated cells."""
    be_launched(rank, world_size, port)
    told: dict[str, list[Any]] = {}
    for name in names:
        case = CASES[name]
        told[name] = []
        for isolate in (False, True):
            with xffl.session(federated=case.sizes, hsdp=case.hsdp, isolate=isolate, timeout_s=120) as state:
                assert (state.isolated is not None) == isolate
                try:
                    told[name].append(KINDS[case.kind](state, Path(folder), **case.options))
                except xffl.ConfigError as refused:
                    told[name].append(f"refused: {refused}")
    return told


def compare(names: tuple[str, ...], folder: Path) -> dict[str, str]:
    """Return whether all ranks have told the same of each row in one world and with isolated cells, or a refusal."""
    equal: dict[str, str] = {}
    for size in sorted({sum(CASES[name].sizes) for name in names}):
        alike = [name for name in names if sum(CASES[name].sizes) == size]
        told = run_world(size, be_rank, free_port(), alike, str(folder), init=False, timeout_s=600)
        for name in alike:
            isolated = told[0][name][1]
            is_equal = all(json.dumps(rank[name][0]) == json.dumps(rank[name][1]) for rank in told)
            equal[name] = isolated if isinstance(isolated, str) else "equal" if is_equal else "DIFFERENT"
    return equal


@pytest.mark.parametrize("rows", [EQUAL, pytest.param(MORE_EQUAL, marks=pytest.mark.long)], ids=["some", "more"])
def test_isolated_cells_have_the_bits_of_one_world(rows: tuple[str, ...], tmp_path: Path) -> None:
    assert compare(rows, tmp_path) == dict.fromkeys(rows, "equal")


def keep(rank: int, world_size: int, port: int, folder: str) -> list[Any]:
    """Save as one world and with isolated cells, by each way, and load what the other one has saved."""
    be_launched(rank, world_size, port)
    told: list[Any] = []
    for saved in ("world", "isolated"):
        with xffl.session(federated=(2, 1), isolate=saved == "isolated", timeout_s=120) as state:
            torch.manual_seed(0)
            model = xffl.shard(nn.Linear(4, 2), state)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(state.cell)
            save_checkpoint(Path(folder, saved), {"model": model}, state, values={"step": 3}, own={"mine": Own(rank)})
            manager = CheckpointManager(Path(folder, f"{saved} run"), keep_last=1, state=state)
            with AsyncSaver(state) as saver:
                for step in (1, 2):
                    manager.save(saver, step, parts={"model": model})
            told.append(bits(model))
    for loaded in ("isolated", "world"):
        with xffl.session(federated=(2, 1), isolate=loaded == "world", timeout_s=120) as state:
            model = xffl.shard(nn.Linear(4, 2), state)
            mine = Own(-1)
            values = load_checkpoint(Path(folder, loaded), {"model": model}, state, own={"mine": mine})
            told.append(bits(model))
            assert (values, mine.value) == ({"step": 3}, rank)
            with pytest.raises(xffl.ConfigError, match="values are the same on all ranks"):
                save_checkpoint(Path(folder, "unlike"), {"model": model}, state, values={"step": state.cell})
    return told


def test_isolated_cells_save_the_checkpoint_of_one_world(tmp_path: Path) -> None:
    for rank in run_world(3, keep, free_port(), str(tmp_path), init=False, timeout_s=240):
        assert len(set(rank)) == 1
    records = [read_record(tmp_path / name) for name in ("world", "isolated")]
    world, isolated = (replace(record, saved_at="", save_number=0) for record in records)
    assert world == isolated, "all that is told of the files, with their checksums"
    for name in ("world run", "isolated run"):
        folder = tmp_path / name / "checkpoints"
        assert sorted(entry.name for entry in folder.iterdir()) == ["latest", "step_2"]
    assert not (tmp_path / "unlike").exists()


def be_unlike(rank: int, world_size: int, port: int) -> list[str]:
    """Ask for other rounds in each cell, in several ways, and for levels; and raise what each cell raises."""
    be_launched(rank, world_size, port)
    errors: list[str] = []
    with xffl.session(federated=(1, 1), isolate=True, timeout_s=120) as state:
        unlike: list[dict[str, Any]] = [
            {"every": 2 + rank},
            {"every": 2, "aggregator": {"server": ("sgd", "adam")[rank]}},
            {"every": 2, "aggregator": {"codec": ("none", "int8")[rank]}},
            {"every": 2, "aggregator": {"levels": [{}, {"every": 2, "groups": (2,)}]}},
            {"every": 2},
        ]
        for options in unlike:
            model = nn.Linear(3, 2 + rank * (len(options) == 1 and options["every"] == 2))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            try:
                with xffl.FederatedScaling(model, optimizer, state, **options):
                    raise AssertionError("it was not refused")
            except xffl.ConfigError as refused:
                errors.append(str(refused))
        with pytest.raises(xffl.ConfigError) as refused_world:
            xffl.DistributedWorld(DeviceParameters.FSDP(), federated=(1, 1)).setup(state)
        errors.append(str(refused_world.value))
    return errors


def test_unlike_rounds_and_levels_are_refused_on_all_ranks() -> None:
    told = run_world(2, be_unlike, free_port(), init=False, timeout_s=240)
    assert told[0] == told[1]
    shown = [["every=2", "every=3"], ["sgd", "adam"], ["int8"], ["leave levels out"], ["(2,)", "(3,)"]]
    shown.append(["federated=(1, 1)", "leave federated out"])
    for error, words in zip(told[0], shown, strict=True):
        assert all(word in error.lower() for word in words), error


def stop_early(rank: int, world_size: int, port: int, folder: str) -> tuple[list[int], list[str]]:
    """Train with rounds, be asked to stop in cell 1, save, and go on; and train in one go."""
    be_launched(rank, world_size, port)
    done: list[int] = []
    told: list[str] = []
    for asked_at in (3, -1, -2):
        with xffl.session(federated=(1, 1), isolate=True, timeout_s=120) as state, suppress(PreemptedExit):
            model = nn.Linear(4, 2)
            nn.init.constant_(model.weight, 0.5)
            nn.init.zeros_(model.bias)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            rounds = xffl.FederatedScaling(model, optimizer, state, every=2)
            progress = Own(0)
            parts: dict[str, Any] = {"model": model, "optimizer": optimizer}
            own: dict[str, Any] = {"rounds": rounds, "progress": progress}
            with Preemption(state, ["USR2"]) as preemption, rounds:
                if asked_at == -1:
                    load_checkpoint(folder, parts, state, own=own)
                save = partial(save_checkpoint, folder, parts, state, own=own)
                preemption.follow(rounds, save)
                while progress.value < 30:
                    if progress.value == asked_at and rank == 1:
                        os.kill(os.getpid(), signal.SIGUSR2)
                    model(torch.full((1, 4), state.cell + 1.0)).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    progress.value += 1
                    if asked_at > 0:
                        time.sleep(0.1)
                    if preemption.is_due(progress.value):
                        save()
                        preemption.leave()
            told.append(bits(model))
        done.append(progress.value)
    return done, told


def test_isolated_cells_stop_after_the_same_round(tmp_path: Path) -> None:
    told = run_world(2, stop_early, free_port(), str(tmp_path / "run"), init=False, timeout_s=240)
    for (left_at, *ends), (resumed, whole) in told:
        assert left_at < 30 and ends == [30, 30]
        assert resumed == whole


def run_isolated(launcher: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the script of a folder with a cell of one rank and one of two."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("XFFL_", "TORCHELASTIC"))}
    environ = {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [*launcher, "--isolate", "--federated", "1,2", "train.py", "--every", "2"]
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.parametrize("launcher", some_of((["-m", "xffl", "exec", "--processes", "3"], TORCHRUN), TORCHRUN))
def test_a_framework_sees_its_cell_alone(launcher: list[str], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    ran = run_isolated([sys.executable, *launcher], tmp_path)
    assert ran.returncode == 0, ran.stderr
    told = [json.loads((tmp_path / f"told_{rank}.json").read_text()) for rank in range(3)]
    assert [one["cell"] for one in told] == [[0, 2, 0, 1], [1, 2, 0, 2], [1, 2, 1, 2]]
    for one in told:
        cell_rank, cell_size = one["cell"][2:]
        assert one["words"] == ["--every", "2"]
        assert [int(one[name]) for name in ("RANK", "LOCAL_RANK")] == [cell_rank] * 2
        assert [int(one[name]) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")] == [cell_size] * 2
        assert (one["ranks"], one["rounds"]) == (cell_size, 2)
        assert one["is_torchrun"], "Lightning would ask MPI for the ranks of the job"
        assert one["sum"] == told[0]["sum"]
        assert one["samples"] == list(range(cell_rank, 2 * cell_size, cell_size))
        assert one["whole"] == [[1.5] * 4] * 2


def test_the_rank_of_a_cell_that_fails_is_told_by_its_number_in_the_job(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import os\nif os.environ['RANK'] == '1':\n    raise KeyError('mine')\n")
    ran = run_isolated([sys.executable, "-m", "xffl", "exec", "--processes", "3"], tmp_path)
    assert ran.returncode == 1
    first, second, *_ = lines = ran.stderr.splitlines()
    assert first == "Traceback (most recent call last):"
    assert second == f'  File "{tmp_path / "train.py"}", line 3, in <module>', "none of what has started the script"
    assert lines[-1] == "xffl: rank 2 (cell 1) failed with KeyError: 'mine'; all other ranks were stopped"


def be_mistaken(rank: int, world_size: int, ports: list[int]) -> list[str]:
    """Return what is raised where one rank has a wrong argument, and where CUDA is in use on both."""
    told = []
    wrong: list[dict[int, dict[str, Any]]] = [{1: {"link_backend": "nccl"}}, {0: {"timeout_s": -1.0}}, {}]
    for port, options in zip(ports, wrong, strict=True):
        be_launched(rank, world_size, port)
        given = {"timeout_s": 200.0} | options.get(rank, {})
        with (
            mock.patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": "0,1"}),
            mock.patch("torch.cuda.is_initialized", return_value=not options),
            pytest.raises(xffl.ConfigError) as refused,
            xffl.session(federated=(1, 1), isolate=True, **given),
        ):
            pass
        told.append(str(refused.value))
    return told


def test_a_mistake_of_one_rank_ends_all_before_cells_are_isolated() -> None:
    ports = [free_port() for _ in range(3)]
    first, second = run_world(2, be_mistaken, ports, init=False, timeout_s=100)
    assert first == second
    for error, part in zip(first, ("link_backend 'nccl'", "timeout_s", "CUDA is initialized already"), strict=True):
        assert part in error


def be_left(rank: int, world_size: int, ports: list[int]) -> list[Any]:
    """Wait for the other cells while the script of rank 1 comes to an end, and while it fails."""
    heard: list[Any] = []
    for port, end in zip(ports, (SystemExit(0), KeyError("mine")), strict=True):
        is_failure = isinstance(end, KeyError)
        be_launched(rank, world_size, port)
        with (
            suppress(SystemExit, KeyError, xffl.LaunchError),
            xffl.session(federated=(1, 1, 1), isolate=True, timeout_s=200) as state,
        ):
            notes = open_notes(state, "end")
            if rank == 2:
                time.sleep(0.5)  # rank 0 waits for this one, and rank 1 has ended
            if rank == 1 and is_failure:
                raise end
            notes.write("word", str(rank))
            if rank == 1:
                notes.end()
                raise end
            try:
                if rank == 2 and is_failure:
                    xffl.Aggregator(nn.Linear(3, 2), state)
                heard.append(notes.gather("word"))
                notes.end()
            except xffl.LaunchError as lost:
                heard.append(str(lost))
    return heard


def test_who_waits_for_a_cell_hears_that_it_has_failed_and_not_that_its_script_is_over() -> None:
    ports = [free_port() for _ in range(2)]
    for rank, heard in enumerate(run_world(3, be_left, ports, init=False, timeout_s=150)):
        if rank != 1:
            words, lost = heard
            assert words == ("0", "1", "2")
            assert "another rank of the job has ended" in lost


def wrap_later(rank: int, world_size: int, port: int) -> list[str]:
    """Let somebody wrap the model over all ranks when the rounds are set up, as trainers of frameworks do."""
    be_launched(rank, world_size, port)
    errors: list[str] = []
    with xffl.session(federated=(1, 1)) as state:
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        wrapped = nn.parallel.DistributedDataParallel(model)
        for trained in (model, wrapped):
            try:
                with xffl.FederatedScaling(model, optimizer, state, every=3):
                    for _ in range(2):
                        trained(torch.ones(1, 3)).sum().backward()
                        optimizer.step()
                errors.append("")
            except xffl.ConfigError as refused:
                errors.append(str(refused))
    return errors


def test_a_wrapper_over_all_cells_is_refused_where_it_trains_the_model() -> None:
    for unused, error in run_world(2, wrap_later, free_port(), init=False):
        assert unused == ""
        assert error.startswith("DistributedDataParallel over ranks 0-1 trains this model, beyond the ranks of")
        assert "start with xffl exec --isolate" in error


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--elastic --federated 1,1 train.py", "leave --isolate out"),
        ("--cell 0/2 train.py", "leave --isolate out"),
        ("--processes 2 train.py", "give --federated"),
        ("--processes 2 run.yaml", "--isolate is for scripts"),
    ],
)
def test_what_does_not_go_with_isolated_cells_is_refused(
    words: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("train.py", "run.yaml"):
        (tmp_path / name).write_text("pass")
    options, command = split_command(["exec", "--isolate", *words.split()])
    with pytest.raises(xffl.ConfigError, match=told):
        run(build_parser().parse_args(options[1:]), command)


COMPARED = ("rounds", "loop", "moved")
"""Kinds of rows; the others set up their cells in one world by themselves, or make no rounds"""
ROWS = 10
"""That one world does, where all of the goldens are compared"""


def compare_in_parts(names: list[str], folder: Path) -> int:
    """Compare rows of the goldens, some at a time, and print what came out; the number of those that are unlike.

    What saves comes first: other layouts load it.
    """
    saves = [name for name in names if name.startswith("save")]
    others = [name for name in names if not name.startswith("save")]
    sizes = [alike for some in (saves, others) for alike in by_size(some).values()]
    parts = [alike[start : start + ROWS] for alike in sizes for start in range(0, len(alike), ROWS)]
    found: dict[str, str] = {}
    for part in parts:
        try:
            told = compare(tuple(part), folder)
        except AssertionError:  # one row has ended the world of all of them
            told = {}
            for name in part:
                try:
                    told |= compare((name,), folder)
                except AssertionError as failed_alone:
                    told[name] = f"FAILED: {str(failed_alone).strip().splitlines()[-1]}"
        for row, how in told.items():
            print(f"{row}: {how}", flush=True)
        found |= told
    kinds = Counter(how.partition(":")[0] for how in found.values())
    print(", ".join(f"{count} {kind}" for kind, count in kinds.items()), flush=True)
    return kinds["DIFFERENT"] + kinds["FAILED"]


if __name__ == "__main__":
    # python -m tests.ranks.test_isolated '.*' FOLDER
    rows = [name for name, case in CASES.items() if case.kind in COMPARED and re.match(sys.argv[1], name)]
    sys.exit(bool(compare_in_parts(rows, Path(sys.argv[2]))))
