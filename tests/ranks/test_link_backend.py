"""A backend between cells beside that inside them, on worlds without GPUs; test_nccl.py has those with some."""

from __future__ import annotations

import hashlib
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import xffl
from tests.ports import free_port
from tests.rounds import make_rounds
from tests.worlds import be_launched, fake_world, run_world
from xffl.aggregation.engine.gpu_memory import HostCopies
from xffl.aggregation.engine.groups import RoundScope
from xffl.aggregation.privacy import Privacy
from xffl.distributed import groups
from xffl.distributed.agreement.consistency import message_device, transfer_device
from xffl.distributed.distributed_state import DistributedState
from xffl.distributed.groups import check_link_backend, with_host_side
from xffl.parallel import DistributedStrategy

GPU = torch.device("cuda", 0)
CPU = torch.device("cpu")
ON_GPUS = "cpu:gloo,cuda:nccl"

ASKED: list[dict[str, Any]] = [
    {},
    {"link_backend": "auto"},
    {"link_backend": "gloo"},
    {"backend": "cpu:gloo", "link_backend": "gloo"},  # the only other one that needs no GPU
]


def digest_of(model: nn.Module) -> str:
    whole = [value.full_tensor() if hasattr(value, "full_tensor") else value for value in model.state_dict().values()]
    return hashlib.sha256(b"".join(value.numpy().tobytes() for value in whole)).hexdigest()


def sessions(rank: int, world_size: int, port: int, hsdp: int | None) -> list[tuple[str | None, str, str, str]]:
    be_launched(rank, world_size, port)
    told = []
    for asked in ASKED:
        with xffl.session(federated=2, hsdp=hsdp, device="cpu", timeout_s=60, **asked) as state:
            torch.manual_seed(0)
            model = xffl.shard(nn.Sequential(nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 9)), state)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            aggregator = xffl.Aggregator(model, state, bucket_bytes=2**10)
            torch.manual_seed(rank)
            for _ in range(2):
                model(torch.randn(4, 24)).square().sum().backward()
                optimizer.step()
                aggregator.aggregate(1.0 + state.federated_rank)
            assert state.federation is not None
            inside, across = dist.get_backend_config(state.federation), dist.get_backend_config()
            told.append((state.link_backend, inside, across, digest_of(model)))
            if state.federated_group is not None:
                assert {dist.get_backend_config(group) for group in state.federated_group} == {across}
    return told


@pytest.mark.parametrize("hsdp", [None, 1])
def test_rounds_are_the_same_with_another_backend_between_cells(hsdp: int | None) -> None:
    told = run_world(4, sessions, free_port(), hsdp, init=False)
    for answers in told:
        usual, auto, same, other = answers
        assert len({digest for *_, digest in answers}) == 1
        assert usual == auto == same and usual[0] is None
        assert other[:3] == ("gloo", "cpu:gloo", usual[2])
    assert len({answers[0][-1] for answers in told}) == 1


def as_on_gpus() -> ExitStack:
    """Let results be handed round inside cells from memory of their own, as on GPUs."""
    stack = ExitStack()
    stack.enter_context(mock.patch.object(RoundScope, "home_device", CPU))
    stack.enter_context(mock.patch("xffl.aggregation.aggregator.stream_of", return_value=None))
    stack.enter_context(mock.patch("xffl.aggregation.engine.planning.transfers.sends_from_gpu", return_value=True))
    return stack


def bytes_after(state: DistributedState, *, count: int = 2, behind: float | bool = False, **options: Any) -> bytes:
    """Return this rank's weights and buffers after rounds between steps of its own cell."""
    torch.manual_seed(0)
    layers = [nn.Linear(24, 16), nn.BatchNorm1d(16), nn.Linear(16, 9)]
    model = xffl.shard(nn.Sequential(*(layers[::2] if {"privacy", "secure"} & options.keys() else layers)), state)
    aggregator = xffl.Aggregator(model, state, **{"bucket_bytes": 2**9, "overlap": bool(behind), **options})

    @torch.no_grad()
    def step() -> None:
        for parameter in model.parameters():
            parameter.mul_(0.9 + 0.013 * state.federated_rank).add_(0.01 * (1 + state.federated_rank))
        for buffer in model.buffers():
            buffer.add_(1 + dist.get_rank())

    weight = None if "privacy" in options else 1.0 + dist.get_rank()
    make_rounds(aggregator, step, count, weight, behind)
    values = [value.to_local() if isinstance(value, DTensor) else value for value in model.state_dict().values()]
    return b"".join(value.numpy().tobytes() for value in values)


STEPPED = {"server": "fedadam:lr=0.03"}
HANDED_ROUND: list[dict[str, Any]] = [
    *({"form": "all_gather"}, {"form": "two_hop"}, {"rails": True}, {"atomic": False}, {"fragments": 2, "count": 4}),
    *({"behind": True}, {"behind": 0.5, "rails": True}, {"atomic": False, "rails": True, "codec": "int8", "count": 3}),
    *({"codec": "int8", "count": 3}, {"codec": "topk:0.1", "behind": True, "count": 3}, {"norms": True, "rails": True}),
    *(STEPPED, {**STEPPED, "rails": True, "norms": True}),
    *({**STEPPED, "codec": "int8", "count": 3}, {**STEPPED, "behind": True, "rails": True}),
    *({"combine": "median"}, {"combine": "geometric_median", "rails": True}, {"nonfinite": "drop_cell"}),
    *({"privacy": Privacy(clip=1.0, noise=1.0, seed=1)}, {"secure": True}),
]


def compare(
    rank: int, world_size: int, port: int, cells: tuple[int, ...], hsdp: int, chosen: list[dict[str, Any]]
) -> list[str]:
    be_launched(rank, world_size, port)
    unequal = []
    with xffl.session(federated=cells, hsdp=hsdp, device="cpu", timeout_s=60) as state:
        for options in chosen:
            plain = bytes_after(state, **options)
            bring = mock.patch.object(HostCopies, "bring", autospec=True, side_effect=HostCopies.bring)
            with as_on_gpus(), bring as brought:
                if bytes_after(state, **options) != plain:
                    unequal.append(str(options))
            if state.is_sender and state.replica_world_size[state.federated_rank] > 1 and options.get("atomic", True):
                assert brought.called  # else both lie in the model here
    return unequal


OF_TWO_CELLS = [options for options in HANDED_ROUND if "secure" not in options]


@pytest.mark.parametrize(
    ("cells", "hsdp", "chosen"),
    [((2, 2), 1, OF_TWO_CELLS[::2]), ((4, 2), 2, OF_TWO_CELLS[1::2]), ((1, 3, 2), 1, HANDED_ROUND)],
    ids=["(2, 2)", "(4, 2)", "(1, 3, 2)"],
)
def test_results_are_the_same_that_are_handed_round_from_other_memory(
    cells: tuple[int, ...], hsdp: int, chosen: list[dict[str, Any]]
) -> None:
    """To the bit, after every kind of round: what crosses and what the cell gets lie apart."""
    assert run_world(sum(cells), compare, free_port(), cells, hsdp, chosen, init=False) == [[]] * sum(cells)


def by_key(rank: int, world_size: int, port: int) -> tuple[str | None, float]:
    be_launched(rank, world_size, port)
    distributed = {"strategy": "fsdp", "federated": 2, "device": "cpu", "backend": "cpu:gloo", "link_backend": "gloo"}
    with DistributedStrategy.from_config({"distributed": distributed}) as strategy:
        total = strategy.world.all_reduce(torch.tensor([float(rank)]))
        return strategy.state.link_backend, total.item()


def test_a_configuration_names_it() -> None:
    assert run_world(4, by_key, free_port(), init=False) == [("gloo", 6.0)] * 4


def lonely(rank: int, world_size: int, port: int) -> None:
    be_launched(rank, world_size, port)
    with xffl.session(backend="cpu:gloo", link_backend="gloo", device="cpu", timeout_s=60) as state:
        assert state.link_backend is None and dist.get_backend_config() == "cpu:gloo"  # one cell
    with (
        pytest.raises(
            xffl.ConfigError, match="jobs of their own have gloo between them; leave link_backend 'nccl' out"
        ),
        xffl.session(cell=0, cells=2, link_backend="nccl"),
    ):
        pass


def test_one_cell_has_no_link() -> None:
    run_world(2, lonely, free_port(), init=False)


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch have NCCL, whatever its build."""
    monkeypatch.setattr(groups.dist, "is_backend_available", lambda name: True)


@pytest.mark.usefixtures("nccl")
def test_what_is_asked_of_gpus() -> None:
    assert check_link_backend(None, ON_GPUS, GPU) is None is check_link_backend("auto", ON_GPUS, GPU)
    assert check_link_backend("nccl", ON_GPUS, GPU) is None is check_link_backend(ON_GPUS, "nccl", GPU)
    assert check_link_backend("gloo", ON_GPUS, GPU) == "gloo" == check_link_backend("gloo", "nccl", GPU)
    assert check_link_backend("gloo", "gloo", GPU) is None
    assert with_host_side("nccl") == ON_GPUS == with_host_side(ON_GPUS) and with_host_side("gloo") == "gloo"
    with pytest.raises(xffl.ConfigError, match="needs NCCL in the cells, too, but backend is 'gloo'"):
        check_link_backend("nccl", "gloo", GPU)
    with pytest.raises(xffl.ConfigError, match="link_backend must be a name such as 'gloo' or 'nccl', got 1"):
        check_link_backend(1, ON_GPUS, GPU)


@pytest.mark.usefixtures("nccl")
def test_nccl_may_not_span_the_world_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    with fake_world(4, 1):
        state = DistributedState()
        monkeypatch.setattr(dist, "get_backend_config", lambda group=None: ON_GPUS)
        with pytest.raises(xffl.ConfigError, match=f"initialized with '{ON_GPUS}'; initialize it with 'gloo'"):
            state.set_global("nccl", "cuda", None, None, 1, 4, link_backend="gloo")
        monkeypatch.setattr(dist, "get_backend_config", lambda group=None: "cpu:gloo,cuda:gloo")
        state.set_global("nccl", "cuda", None, None, 1, 4, link_backend="gloo")
        assert (state.backend, state.link_backend) == (ON_GPUS, "gloo")
        assert transfer_device(state) == CPU == message_device(GPU)
        monkeypatch.setattr(dist, "get_backend_config", lambda group=None: ON_GPUS)
        assert message_device(GPU) == GPU and message_device(CPU) == CPU
