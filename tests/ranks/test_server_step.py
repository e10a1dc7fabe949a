"""Who takes the server's step: every rank of all that it holds, or the owner of each part, who hands it out."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import xffl
from tests.ports import free_port
from tests.ranks.test_algorithms import vector
from tests.ranks.test_protected import Net, build, moved, same_bits
from tests.ranks.test_round import make_state
from tests.worlds import run_world
from xffl.aggregation import aggregator as aggregator_module
from xffl.aggregation import mean as mean_module
from xffl.aggregation.algorithms.server import Adaptive, ServerOptimizer
from xffl.aggregation.engine.global_model import GlobalModel
from xffl.aggregation.hierarchical import Level, Levels
from xffl.checkpoint import load_checkpoint, save_checkpoint

LAYOUTS = [((1, 1), None), ((2, 2), None), ((4, 2), 2), ((1, 1, 1), None), ((2, 2, 2), None), ((3, 1, 2), None)]

WAYS: dict[str, dict[str, Any]] = {
    "diloco": {"server": "diloco"},
    "fedadam": {"server": "fedadam:lr=0.05", "bucket_bytes": 24},
    "a schedule": {"server": {"name": "fedyogi", "schedule": "ExponentialLR:gamma=0.5"}, "bucket_bytes": 40},
    "any optimizer": {"server": "torch.optim.AdamW:lr=0.01"},
    "fednova": {"combine": "fednova"},
    "clipping": {"combine": "norm_clipping:clip=0.3", "bucket_bytes": 24},
    "clipping and server": {"combine": "norm_clipping:clip=0.3", "server": "fedavgm"},
    "norms": {"server": "diloco", "norms": True},
    "rails": {"server": "diloco", "rails": True, "bucket_bytes": 24},
    "median": {"combine": "median", "form": "two_hop", "server": "diloco"},
}


def weighted(state: xffl.DistributedState, aggregator: xffl.Aggregator) -> xffl.RoundReport:
    """A round in which cells count unlike and have made unlike numbers of steps."""
    cell = state.topology.cell_of(state.rank)
    return aggregator.aggregate((1.0 + cell) / state.topology.sizes[cell], steps=2.0 + cell)


def rounds(state: xffl.DistributedState, count: int, **options: Any) -> tuple[nn.Module, xffl.Aggregator, Any]:
    model, report = build(state), None
    aggregator = xffl.Aggregator(model, state, **options)
    for number in range(count):
        moved(model, state, number)
        report = weighted(state, aggregator)
    return model, aggregator, report


# Results --------------------------------------------------------------------------------------------------------------


def agreeing(rank: int, world_size: int, sizes: tuple[int, ...], hsdp: int | None) -> dict[str, bool]:
    state = make_state(rank, sizes, hsdp)
    found = {}
    for name, way in WAYS.items():
        owned, _, told = rounds(state, 4, server_step="owner", **way)
        usual, _, wanted = rounds(state, 4, server_step="everywhere", **way)
        assert same_bits(owned, world_size), name
        assert (told.scale, told.shares, told.update_norms) == (wanted.scale, wanted.shares, wanted.update_norms)
        np.testing.assert_allclose(vector(owned), vector(usual), rtol=1e-6, atol=1e-7)
        found[name] = bool(np.array_equal(vector(owned), vector(usual)))
    return found


@pytest.mark.parametrize("sizes, hsdp", LAYOUTS, ids=str)
def test_owners_step_to_where_all_would(sizes: tuple[int, ...], hsdp: int | None) -> None:
    for found in run_world(sum(sizes), agreeing, sizes, hsdp):
        assert found == dict.fromkeys(WAYS, True)


def with_more(rank: int, world_size: int) -> None:
    """What goes with it: codecs, fragments, delays, private noise, narrow types, a server elsewhere, weight 0."""
    state = make_state(rank, (2, 1, 1), None)
    exact, _, _ = rounds(state, 6, server="diloco")
    for codec in ("int8:block=16", "bf16"):
        lossy, aggregator, report = rounds(state, 6, server="diloco", codec=codec, server_step="owner")
        assert same_bits(lossy, world_size) and report.codec_error is not None
        assert 0.0 < np.linalg.norm(vector(lossy) - vector(exact)) / np.linalg.norm(vector(exact)) < 0.01
    for options in ({"fragments": 2}, {"server": {"name": "diloco", "device": "cpu"}}):
        ends = []
        for step in ("owner", "everywhere"):
            model, _, _ = rounds(state, 4, **({"server": "diloco", "server_step": step} | options))
            ends.append(vector(model))
        assert np.array_equal(*ends), options
    private = {"name": "dp_fedavg", "clip": 0.5, "noise": 0.1, "seed": 7}
    model = build(state)
    aggregator = xffl.Aggregator(model, state, server="diloco", privacy=private, server_step="owner")
    for number in range(3):
        moved(model, state, number)
        aggregator.aggregate()
        assert same_bits(model, world_size)
    for alpha in (None, 0.25):
        ends = []
        for step in ("owner", "everywhere"):
            model = build(state)
            aggregator = xffl.Aggregator(model, state, server="diloco", overlap=True, server_step=step)
            for number in range(4):
                moved(model, state, number)
                pending = aggregator.aggregate_async(alpha=alpha)
                moved(model, state, 10 + number, 0.01)
                pending.merge()
            ends.append(vector(model))
        assert np.array_equal(*ends)
    for step in ("owner", "everywhere"):
        torch.manual_seed(0)
        model = xffl.shard(Net().bfloat16(), state, wrap=[nn.Linear])
        aggregator = xffl.Aggregator(model, state, server="sgd:lr=0.01", norms=True, server_step=step)
        for number in range(5):
            moved(model, state, number)
            report = aggregator.aggregate(0.0 if state.topology.cell_of(rank) == 1 else 1.0)
        assert same_bits(model, world_size)
        ends.append((vector(model), report.update_norms))
    assert np.array_equal(ends[-1][0], ends[-2][0]) and ends[-1][1] == ends[-2][1]


def test_owners_go_with_codecs_fragments_delays_noise_and_narrow_types() -> None:
    run_world(4, with_more)


# Ranks that compute unlike --------------------------------------------------------------------------------------------


class Wobbly(Adaptive):
    """A server optimizer whose steps are a little different on every rank."""

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step, and then a little further."""
        loss = super().step(closure)
        for tensor in self.param_groups[0]["params"]:
            tensor.data.add_(1e-6 * (1 + dist.get_rank()))
        return loss


def unlike(rank: int, world_size: int, sizes: tuple[int, ...], hsdp: int | None) -> list[list[bool]]:
    """Whether all ranks have the same bits after each round, stepped by owners, by choice, and by each rank."""
    state = make_state(rank, sizes, hsdp)
    found = []
    for step, arithmetic in (("owner", 7.0), ("auto", float(rank)), ("everywhere", 7.0)):
        model = build(state)
        with mock.patch.object(aggregator_module, "arithmetic_of", return_value=arithmetic):
            aggregator = xffl.Aggregator(model, state, server=Wobbly, server_step=step, bucket_bytes=24)
        same = []
        for number in range(3):
            moved(model, state, number)
            weighted(state, aggregator)
            same.append(same_bits(model, world_size))
        found.append(same)
    return found


@pytest.mark.parametrize("sizes, hsdp", [((1, 1), None), ((2, 2), 1), ((2, 1, 1), None)], ids=str)
def test_ranks_that_compute_unlike_hold_the_same_bits(sizes: tuple[int, ...], hsdp: int | None) -> None:
    for found in run_world(sum(sizes), unlike, sizes, hsdp):
        assert found == [[True] * 3, [True] * 3, [False] * 3]


def unlike_servers(rank: int, world_size: int) -> list[bool]:
    """Ranks that are alike where they communicate, and not where the server works."""
    state = make_state(rank, (1, 1), None)
    model = build(state)

    def kind(device: torch.device) -> str:
        return "x" if device.index is None else f"x{rank}"

    with mock.patch.object(mean_module, "processor_of", kind):
        aggregator = xffl.Aggregator(model, state, server=ServerOptimizer(Wobbly, device="cpu:0"))
    found = []
    for number in range(2):
        moved(model, state, number)
        weighted(state, aggregator)
        found.append(same_bits(model, world_size))
    return found


def test_what_the_server_computes_with_counts_too() -> None:
    assert run_world(2, unlike_servers) == [[True, True]] * 2


UNLIKE_VECTORS = """
import hashlib
import torch
import xffl
from torch import nn
from xffl.aggregation import aggregator

with xffl.session(federated=(1, 1), device="cpu") as state:
    def run(step):
        model = nn.Linear(300, 100)
        nn.init.constant_(model.weight, 0.3), nn.init.zeros_(model.bias)  # random ones would be others
        rounds = xffl.Aggregator(model, state, server="fedadam:lr=0.05", server_step=step)
        torch.manual_seed(state.rank)
        for _ in range(4):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn(parameter.shape), alpha=0.1)
            rounds.aggregate(1.0 + state.rank)
        return model
    def digest(model):
        bits = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
        return hashlib.sha256(bits).hexdigest()
    print(torch.backends.cpu.get_cpu_capability(), digest(run("auto")))
    try:
        run("everywhere")
    except xffl.RoundError as error:
        print(error)
    aggregator.arithmetic_of = lambda device: 1.0
    print(digest(run("everywhere")))
"""


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="needs vector units that can be left out"
)
def test_processors_with_and_without_fused_steps_hold_the_same_bits() -> None:
    """Two processes of their own, of which one computes as a processor without vector units does."""
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = []
    for rank, capability in enumerate(("avx2", "default")):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "ATEN_CPU_CAPABILITY": capability}
        environ = {**os.environ, **place, **own, "PYTHONPATH": os.pathsep.join(sys.path)}
        words = [sys.executable, "-c", UNLIKE_VECTORS]
        ranks.append(subprocess.Popen(words, env=environ, stdout=subprocess.PIPE, text=True))
    first, second = (rank.communicate(timeout=100)[0].splitlines() for rank in ranks)
    assert first[0].split()[0] == "AVX2" and second[0].split()[0] == "DEFAULT"
    assert first[0].split()[1] == second[0].split()[1]
    assert first[1] == second[1] and "server_step='owner'" in first[1]
    assert first[2] != second[2], "what the refusal saves from"


def refused(rank: int, world_size: int) -> None:
    """What does not go together is refused in one line."""
    state = make_state(rank, (1, 1, 1), None)
    for options, reason in (
        ({"secure": True}, "does not go with secure=True"),
        ({"form": "all_gather", "server": "diloco"}, "does not go with form='all_gather'"),
        ({"combine": "median", "server": "diloco"}, r"does not go with CoordinateMedian\(\) without form='two_hop'"),
        ({"combine": "geometric_median"}, "does not go with GeometricMedian"),
    ):
        with pytest.raises(xffl.ConfigError, match=f"^server_step='owner' {reason}[^\n]*$"):
            xffl.Aggregator(build(state), state, server_step="owner", **options)
    with pytest.raises(xffl.ConfigError, match="server_step must be one of"):
        xffl.Aggregator(build(state), state, server_step="nobody")
    with pytest.raises(xffl.ConfigError, match="^levels take no server_step; [^\n]*$"):
        Levels(build(state), state, [Level()], server_step="owner")
    for options in ({"server_step": "everywhere"}, {"form": "all_gather"}, {"secure": True}):
        model = build(state)
        with mock.patch.object(aggregator_module, "arithmetic_of", return_value=float(rank)):
            aggregator = xffl.Aggregator(model, state, server="diloco", **options)
        start = vector(model)
        with pytest.raises(xffl.RoundError, match=r"^ranks \[\[0\], \[1\], \[2\]\] compute [^\n]*server_step[^\n]*$"):
            aggregator.aggregate()
        assert np.array_equal(vector(model), start)
    # The plain mean is no step: nothing changes.
    plain = xffl.Aggregator(build(state), state, server_step="owner")
    assert plain.aggregate().bytes_across == xffl.Aggregator(build(state), state).aggregate().bytes_across


def test_what_owners_cannot_do_is_refused_in_one_line() -> None:
    run_world(3, refused)


# Bytes and memory -----------------------------------------------------------------------------------------------------


def sizes_of(rank: int, world_size: int, sizes: tuple[int, ...]) -> dict[str, tuple[int, int]]:
    """Bytes across in a round, and bytes of state, by who steps."""
    state = make_state(rank, sizes, None)
    found = {}
    for name, options in (
        ("owner", {"server_step": "owner"}),
        ("two hops", {"server_step": "everywhere", "form": "two_hop"}),
    ):
        model = xffl.shard(nn.Linear(600, 100, bias=False), state)
        aggregator = xffl.Aggregator(model, state, server="fedadam", bucket_bytes=4000, **options)
        with torch.no_grad():
            model.weight.mul_(1.0 + rank)
        report = aggregator.aggregate()
        state_bytes = 0
        agreed = aggregator.state_dict()["agreed"]
        for table in (agreed["model"], *agreed["optimizers"][0]["elements"].values()):
            state_bytes += sum(values.nbytes for values in table.values())
        found[name] = report.bytes_across, state_bytes
    return found


@pytest.mark.parametrize("sizes", [(1, 1), (2, 2), (1, 1, 1), (2, 2, 2)], ids=str)
def test_bytes_are_those_of_two_hops_and_state_is_shared_out(sizes: tuple[int, ...]) -> None:
    cells, nbytes = len(sizes), 600 * 100 * 4 // sizes[0]
    for found in run_world(sum(sizes), sizes_of, sizes):
        across, state_bytes = found["owner"]
        assert across == found["two hops"][0]
        assert across == pytest.approx(2 * (cells - 1) / cells * nbytes, rel=0.02)
        assert found["two hops"][1] == 3 * nbytes
        assert state_bytes == pytest.approx(3 * nbytes / cells, rel=0.02)


# States ---------------------------------------------------------------------------------------------------------------


def resumed(rank: int, world_size: int, sizes: tuple[int, ...], hsdp: int | None) -> None:
    """A state of one form goes on in each of them, over other buckets and senders, as if nothing had stopped."""
    state = make_state(rank, sizes, hsdp)
    for options in (
        {"server": {"name": "fedadam", "schedule": "ExponentialLR:gamma=0.5"}},
        {"server": "diloco", "fragments": 2, "norms": True},
    ):
        for first in ("owner", "everywhere"):
            model, aggregator, _ = rounds(state, 3, server_step=first, bucket_bytes=24, **options)
            saved, weights = aggregator.state_dict(), {n: p.detach().clone() for n, p in model.named_parameters()}
            ends, norms = [], []
            for second in (first, "owner", "everywhere"):
                other = build(state)
                again = xffl.Aggregator(
                    other, state, server_step=second, bucket_bytes=40, rails=second == "owner", **options
                )
                with torch.no_grad():
                    for name, parameter in other.named_parameters():
                        parameter.copy_(weights[name])
                again.load_state_dict(saved)
                for number in range(3, 6):
                    moved(other, state, number)
                    norms.append(weighted(state, again).update_norms)
                assert same_bits(other, world_size) or "fragments" in options
                ends.append(vector(other))
            for number in range(3, 6):
                moved(model, state, number)
                weighted(state, aggregator)
            assert all(np.array_equal(end, vector(model)) for end in ends), (options, first)
            if "norms" in options:
                np.testing.assert_allclose(norms[:3] * 2, norms[3:], rtol=1e-12)


@pytest.mark.parametrize("sizes, hsdp", [((1, 1), None), ((4, 2), 2), ((3, 1, 2), None)], ids=str)
def test_a_state_of_either_form_goes_on_in_either(sizes: tuple[int, ...], hsdp: int | None) -> None:
    run_world(sum(sizes), resumed, sizes, hsdp)


def through_files(rank: int, world_size: int, folder: str) -> None:
    """What a checkpoint has of each rank's part is put together."""
    state = make_state(rank, (2, 1), None)
    options: dict[str, Any] = {"server": "fedadam", "combine": "norm_clipping:clip=0.3"}
    for first, second in (("owner", "everywhere"), ("everywhere", "owner"), ("owner", "owner")):
        model, aggregator, _ = rounds(state, 2, server_step=first, **options)
        other = build(state)
        again = xffl.Aggregator(other, state, server_step=second, **options)
        path = f"{folder}/{first}_{second}"
        save_checkpoint(path, {"model": model}, state, own={"rounds": aggregator})
        load_checkpoint(path, {"model": other}, state, own={"rounds": again})
        for one, runs in ((model, aggregator), (other, again)):
            moved(one, state, 2)
            weighted(state, runs)
        assert np.array_equal(vector(model), vector(other)), (first, second)


def test_a_checkpoint_has_the_parts_of_all_owners(tmp_path: Path) -> None:
    run_world(3, through_files, str(tmp_path))


def wrong_states(rank: int, world_size: int) -> None:
    """Parts that nobody has are missed on all ranks; a state that was given out twice is one."""
    state = make_state(rank, (1, 1, 1), None)
    _, aggregator, _ = rounds(state, 2, server="fedadam", server_step="owner", bucket_bytes=24)
    saved = aggregator.state_dict()
    every: list[Any] = [None] * world_size
    dist.all_gather_object(every, saved)
    again = xffl.Aggregator(build(state), state, server="fedadam", server_step="owner")
    for given, reason in (
        (every[0], "the ranks' states lack [0-9]+ of [0-9]+ elements of tensor '.*weight"),
        ({**saved, "agreed": {**saved["agreed"], "owned": {}}} if rank == 2 else saved, "places for None"),
    ):
        with pytest.raises(xffl.CheckpointError, match=reason):
            again.load_state_dict(given)
    # Before its first step a server keeps nothing for each element, so that there is less to put together.
    for other in (rounds(state, 0, server="fedadam", server_step=step)[1] for step in ("owner", "everywhere")):
        with pytest.raises(
            xffl.CheckpointError, match="rank 0: by owners, after round 2; rank 1: by .* after round 0;"
        ):
            again.load_state_dict(other.state_dict() if rank == 1 else saved)
    with pytest.raises(xffl.CheckpointError, match="7 fragments"):  # where another one has a file that is damaged
        again.load_state_dict({**saved, "fragments": 7} if rank == 1 else saved)
    again.load_state_dict(saved)
    assert str(again.state_dict()["agreed"]["optimizers"][0]["numbers"]["step"]) == "tensor(2.)"


def test_states_without_all_parts_are_refused() -> None:
    run_world(3, wrong_states)


# Failures -------------------------------------------------------------------------------------------------------------


def failing(rank: int, world_size: int) -> None:
    """A step that fails at an owner, or a round that is refused after it, leaves all as it was: weights and state."""
    state = make_state(rank, (2, 1, 1), None)
    model, aggregator, _ = rounds(state, 2, server="fedadam", server_step="owner", bucket_bytes=24)
    twin, usual, _ = rounds(state, 2, server="fedadam", server_step="everywhere", bucket_bytes=24)
    for moves in ("step", "after"):
        prepare = GlobalModel.prepare_step

        def broken(self: GlobalModel, *given: Any, moves: str = moves, prepare: Any = prepare) -> None:
            if moves == "after" or rank != 1:
                prepare(self, *given)
            if rank == 1:
                raise MemoryError("no room for a step")

        start, before = vector(model), aggregator.state_dict()
        moved(model, state, 7)
        moved(twin, state, 7)
        here = vector(model)
        with (
            mock.patch.object(GlobalModel, "prepare_step", broken),
            pytest.raises(xffl.RoundError, match="keep their weights.*rank 1 .*no room for a step"),
        ):
            weighted(state, aggregator)
        assert np.array_equal(vector(model), here) and not np.array_equal(here, start)
        after = aggregator.state_dict()
        assert str(after) == str(before)
    for number in range(2, 4):
        for one, runs in ((model, aggregator), (twin, usual)):
            moved(one, state, number)
            weighted(state, runs)
    assert same_bits(model, world_size) and np.array_equal(vector(model), vector(twin))


def test_a_round_that_is_not_taken_leaves_the_servers_state() -> None:
    run_world(4, failing)
