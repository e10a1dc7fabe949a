"""Who trains with whom: planted mistakes are refused on all ranks, replicas and cells are compared in a first round."""

from __future__ import annotations

import contextlib
import copy
import io
import time
from collections.abc import Callable
from functools import cache, partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import xffl
from tests.rounds import aggregator_of
from tests.worlds import run_world
from xffl.aggregation.engine.groups import RoundScope
from xffl.aggregation.engine.planning.lone_coverage import check_lone_cell
from xffl.aggregation.engine.stages.first_round import FirstRound
from xffl.aggregation.federations.elastic import ElasticAggregator
from xffl.aggregation.federations.hierarchical import Level, Levels
from xffl.distributed.distributed_state import set_cell_world
from xffl.distributed.several_worlds.cell_world import CellWorld
from xffl.distributed.values.gradients import find_reduction, mark_reduced
from xffl.distributed.values.sharding import local_tensor

NONE = "nothing was raised"


class Sparse(nn.Module):
    """A part that does not train, and gradients that are sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4, sparse=True)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
        self.head = nn.Linear(8, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.head(self.backbone(inputs))
        return outputs


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def make_state(rank: int, **setup: Any) -> xffl.DistributedState:
    state = xffl.DistributedState()
    cpu, size = torch.device("cpu"), dist.get_world_size()
    state.set_global(backend="gloo", device_type=cpu, master_addr="", master_port=0, rank=rank, world_size=size)
    state.set_exec_device(cpu)
    state.set_federated_scaling(**setup)
    return state


def raised(call: Callable[[], object]) -> str:
    try:
        call()
    except xffl.XfflError as error:
        return f"{type(error).__name__}: {error}"
    return NONE


# Mistakes in two cells of two ranks -----------------------------------------------------------------------------------


def forgotten_shard(state: xffl.DistributedState) -> nn.Module:
    return net()


def part_sharded(state: xffl.DistributedState) -> nn.Module:
    model = net()
    xffl.shard(model.backbone, state)
    return model


def part_fully_sharded(state: xffl.DistributedState) -> nn.Module:
    model = net()
    fully_shard(model.head, mesh=state.fsdp_mesh)
    return model


def part_in_ddp(state: xffl.DistributedState) -> nn.Module:
    model = net()
    backbone: Any = DistributedDataParallel(model.backbone, process_group=state.federation)
    model.backbone = backbone
    return model


def ddp_over_the_world(state: xffl.DistributedState) -> nn.Module:
    return DistributedDataParallel(net())


def ddp_over_pairs_of_cells(state: xffl.DistributedState) -> nn.Module:
    groups = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    return DistributedDataParallel(net(), process_group=groups[dist.get_rank() % 2])


def fsdp_over_the_world(state: xffl.DistributedState) -> nn.Module:
    model = net()
    fully_shard(model)
    return model


def hsdp_over_the_world(state: xffl.DistributedState) -> nn.Module:
    model = net()
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "cut")))
    return model


def added_after_ddp(state: xffl.DistributedState) -> nn.Module:
    model = DistributedDataParallel(net(), process_group=state.federation)
    model.module.extra = nn.Linear(2, 2)
    return model


def unfrozen_after_ddp(state: xffl.DistributedState) -> nn.Module:
    model = net()
    model.head.requires_grad_(False)
    spread = DistributedDataParallel(model, process_group=state.federation)
    model.head.requires_grad_(True)
    return spread


def refrozen_after_ddp(state: xffl.DistributedState) -> nn.Module:
    """As many train as before, and others."""
    model = net()
    model.head.requires_grad_(False)
    spread = DistributedDataParallel(model, process_group=state.federation)
    model.requires_grad_(True)
    model.backbone.requires_grad_(False)
    return spread


def ignored_by_ddp(state: xffl.DistributedState) -> nn.Module:
    model = net()
    ignore: Any = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    ignore(model, ["head.weight"])
    return DistributedDataParallel(model, process_group=state.federation)


def module_in_ddp(state: xffl.DistributedState) -> nn.Module:
    """The script trains by the wrapper, and keeps the module for its checkpoints."""
    return DistributedDataParallel(net(), process_group=state.federation).module  # type: ignore[no-any-return]


def average_of_weights(state: xffl.DistributedState) -> nn.Module:
    spread = DistributedDataParallel(net(), process_group=state.federation)
    return nn.ModuleDict({"model": spread, "average": AveragedModel(spread.module)})


def ddp_of_one_rank(state: xffl.DistributedState) -> nn.Module:
    groups = [dist.new_group([rank]) for rank in range(4)]
    return DistributedDataParallel(net(), process_group=groups[dist.get_rank()])


def module_replaced_after_shard(state: xffl.DistributedState) -> nn.Module:
    model = net()
    xffl.shard(model, state)
    model.head = nn.Linear(8, 2)
    return model


def parameter_replaced_after_shard(state: xffl.DistributedState) -> nn.Module:
    model = net()
    xffl.shard(model, state)
    model.head.bias = nn.Parameter(torch.zeros(2))
    return model


def copied_marks(state: xffl.DistributedState) -> nn.Module:
    model = net()
    mark_reduced(model, state.federation or (), by="a hook")
    assert xffl.Aggregator(model, state).aggregate().round == 1
    return copy.deepcopy(model)


TWO_CELLS: dict[Callable[[xffl.DistributedState], nn.Module], tuple[str, ...]] = {
    forgotten_shard: ("'backbone.0.weight'", "plain tensor", "xffl.shard", "gradients_reduced_by_caller"),
    part_sharded: ("'head.weight'", "plain tensor", "xffl.shard"),
    part_fully_sharded: ("'backbone.0.weight'", "plain tensor"),
    part_in_ddp: ("'head.weight'", "plain tensor"),
    ddp_over_the_world: ("'backbone.0.weight'", "ranks 0-3", "cells 0, 1", "process_group=state.federation"),
    ddp_over_pairs_of_cells: ("'backbone.0.weight'", "cells 0, 1"),
    fsdp_over_the_world: ("'backbone.0.weight'", "ranks 0-3", "cells 0, 1"),
    hsdp_over_the_world: ("'backbone.0.weight'", "ranks 0-3", "cells 0, 1"),
    added_after_ddp: ("'extra.weight'",),
    unfrozen_after_ddp: ("'head.weight'", "unfrozen"),
    refrozen_after_ddp: ("'head.weight'", "unfrozen"),
    module_in_ddp: ("'backbone.0.weight'", "give them what DistributedDataParallel returned, not the module in it"),
    average_of_weights: ("'average.backbone.0.weight'", "freeze what does not train", "requires_grad_(False)"),
    ignored_by_ddp: ("'head.weight'", "plain tensor"),
    ddp_of_one_rank: ("'backbone.0.weight'", "1 of the 2 ranks"),
    module_replaced_after_shard: ("'head.weight'", "plain tensor"),
    parameter_replaced_after_shard: ("'head.bias'", "plain tensor"),
    copied_marks: ("'backbone.0.weight'", "plain tensor"),
}


# Mistakes in one cell of four ranks, which has a mesh inside ----------------------------------------------------------


def shards_without_replicas(state: xffl.DistributedState) -> nn.Module:
    assert state.hsdp_mesh is not None
    model = net()
    fully_shard(model, mesh=state.hsdp_mesh["shard"])
    return model


def shards_over_replicas(state: xffl.DistributedState) -> nn.Module:
    model = net()
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    return model


def replicas_without_shards(state: xffl.DistributedState) -> nn.Module:
    assert state.replica_group is not None
    return DistributedDataParallel(net(), process_group=state.replica_group[0])


def cut_by_layers(state: xffl.DistributedState) -> nn.Module:
    """Tensor parallelism alone, where the cell has data-parallel ranks, too."""
    assert state.hsdp_mesh is not None

    def cut(name: str, module: nn.Module, mesh: Any) -> None:
        for leaf, tensor in list(module.named_parameters(recurse=False)):
            part = distribute_tensor(tensor, mesh, [Shard(0)], src_data_rank=None)
            module.register_parameter(leaf, nn.Parameter(part))

    return distribute_module(net(), state.hsdp_mesh["shard"], cut)


REPLICAS: dict[Callable[[xffl.DistributedState], nn.Module], tuple[str, ...]] = {
    shards_without_replicas: ("'backbone.0.weight'", "DTensor", "2 of the 4 ranks"),
    shards_over_replicas: ("'backbone.0.bias'", "part 0 of 4", "shard 0 of 2"),
    replicas_without_shards: ("'backbone.0.weight'", "2 of the 4 ranks"),
    cut_by_layers: ("'backbone.0.weight'", "DTensor", "2 of the 4 ranks"),
}


def stage(state: xffl.DistributedState) -> nn.Module:
    """One of two stages, which two ranks hold."""
    model = net()
    return nn.ModuleDict({"head": model.head} if dist.get_rank() >= 2 else {"backbone": model.backbone})


def stages_alone(state: xffl.DistributedState) -> nn.Module:
    return stage(state)


def tied_over_stages(state: xffl.DistributedState) -> nn.Module:
    model = nn.ModuleDict({"tied": nn.Linear(3, 3)})
    assert state.replica_group is not None
    return DistributedDataParallel(model, process_group=state.replica_group[0])


STAGES: dict[Callable[[xffl.DistributedState], nn.Module], tuple[str, ...]] = {
    stages_alone: ("plain tensor", "2 ranks of a cell"),
    tied_over_stages: ("'tied.", "2 of the 4 ranks"),
}

LAYOUTS: dict[str, tuple[dict[str, Any], dict[Callable[[xffl.DistributedState], nn.Module], tuple[str, ...]]]] = {
    "two cells": ({"federated_group_size": (2, 2)}, TWO_CELLS),
    "replicas": ({"federated_group_size": (4,), "hsdp": 2}, REPLICAS),
    "stages": ({"federated_group_size": (4,), "cell_shape": {"pp": 2, "dp_replicate": 2}}, STAGES),
}


def make_mistakes(rank: int, world_size: int, layout: str) -> dict[str, str]:
    setup, mistakes = LAYOUTS[layout]
    state = make_state(rank, **setup)
    told = {}
    for mistake in mistakes:
        model = mistake(state)
        told[mistake.__name__] = raised(lambda model=model: xffl.Aggregator(model, state))  # type: ignore[misc]
    return told


@cache
def refusals(layout: str) -> list[dict[str, str]]:
    return run_world(4, make_mistakes, layout)


@pytest.mark.parametrize(
    ("layout", "mistake", "parts"),
    [(name, one.__name__, parts) for name, (_, mistakes) in LAYOUTS.items() for one, parts in mistakes.items()],
)
def test_a_mistake_is_refused_on_all_ranks(layout: str, mistake: str, parts: tuple[str, ...]) -> None:
    told = {one[mistake] for one in refusals(layout)}
    assert len(told) == 1, told
    (text,) = told
    assert text.startswith("ConfigError: ") and all(part in text for part in parts), text


# What is right --------------------------------------------------------------------------------------------------------


def right(rank: int, world_size: int) -> None:
    """What each way to spread a model leaves takes part in rounds, and so does what the caller answers for."""
    state = make_state(rank, federated_group_size=(2, 2))
    frozen = net().requires_grad_(False)
    frozen.head.requires_grad_(True)
    delayed = net()
    late = [("head.weight", delayed.head.weight)]
    options: dict[str, Any] = {
        "delay_all_reduce_named_params": late,
        "param_to_hook_all_reduce": delayed.backbone[0].weight,
    }
    nested: Any = net()
    nested.backbone = DistributedDataParallel(nested.backbone, process_group=state.federation)
    nested.head = DistributedDataParallel(nested.head, process_group=state.federation)
    marked = net()
    mark_reduced(marked, state.federation or (), by="a hook")
    assert find_reduction(marked.head.bias) is not None and find_reduction(copy.deepcopy(marked).head.bias) is None
    for model in (
        xffl.shard(net(), state),
        DistributedDataParallel(net(), process_group=state.federation),
        fully_shard(net(), mesh=state.fsdp_mesh),
        nested,
        marked,
        DistributedDataParallel(marked, process_group=state.federation),
        net().requires_grad_(False),
        torch.compile(xffl.shard(net(), state)),
        DistributedDataParallel(frozen, process_group=state.federation),
        DistributedDataParallel(delayed, process_group=state.federation, **options),
        DistributedDataParallel(Sparse(), process_group=state.federation),
        nn.ModuleDict({"model": xffl.shard(net(), state), "average": net().requires_grad_(False)}),
    ):
        assert xffl.Aggregator(model, state, policies={"*": "average"}).aggregate().round == 1  # type: ignore[arg-type]
    options = {"gradients_reduced_by_caller": True}  # what the caller answers for
    assert Levels(net(), state, [Level(), Level(groups=(2,))], **options).aggregate().round == 1
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with xffl.FederatedScaling(model, optimizer, state, every=1, aggregator=options) as scaling:
        optimizer.step()
        assert scaling.aggregator.rounds == 1
    for asked in ({}, {"levels": [Level()]}):
        with pytest.raises(xffl.ConfigError, match=r"'backbone.0.weight'"):
            xffl.FederatedScaling(model, optimizer, state, every=1, aggregator=asked).__enter__()
    # Not even the caller can mean it.
    with pytest.raises(xffl.ConfigError, match="cells 0, 1"):
        xffl.Aggregator(DistributedDataParallel(net()), state, gradients_reduced_by_caller=True)


def test_what_is_spread_over_its_cell_is_right() -> None:
    run_world(4, right)


def lone_ranks(rank: int, world_size: int) -> None:
    """One rank in each cell trains with nobody."""
    state = make_state(rank, federated_group_size=(1, 1))
    for model in (net(), xffl.shard(net(), state), DistributedDataParallel(net(), process_group=state.federation)):
        assert xffl.Aggregator(model, state).aggregate().round == 1
    assert "cells 0, 1" in raised(lambda: xffl.Aggregator(DistributedDataParallel(net()), state))


def test_cells_of_one_rank_keep_plain_models() -> None:
    run_world(2, lone_ranks)


def stages_and_replicas(rank: int, world_size: int) -> None:
    """Each stage is reduced over the ranks that hold it; what both hold has to be marked."""
    state = make_state(rank, federated_group_size=(4,), cell_shape={"pp": 2, "dp_replicate": 2})
    assert state.replica_group is not None
    group = state.replica_group[0]
    assert xffl.Aggregator(DistributedDataParallel(stage(state), process_group=group), state).aggregate().round == 1
    torch.manual_seed(0)
    tied = nn.ModuleDict({"tied": nn.Linear(3, 3)})
    other = 2 + rank if rank < 2 else rank - 2
    mark_reduced(tied, (rank, other), by="the stages that hold it")
    assert xffl.Aggregator(DistributedDataParallel(tied, process_group=group), state).aggregate().round == 1


def test_stages_are_reduced_over_who_holds_them() -> None:
    run_world(4, stages_and_replicas)


def jobs_of_one_cell(rank: int, world_size: int) -> None:
    """Where a job is one cell, which meets others later or over files, its model is checked before."""
    state = make_state(rank, federated_group_size=(4,), cell_shape={"pp": 2, "dp_replicate": 2})
    assert state.replica_group is not None
    check = partial(check_lone_cell, state=state)
    check(DistributedDataParallel(stage(state), process_group=state.replica_group[0]), is_reduced_by_caller=False)
    check(stage(state), is_reduced_by_caller=True)
    told = raised(lambda: check(stage(state), is_reduced_by_caller=False))
    assert "ConfigError" in told and "plain tensor" in told, told
    with pytest.raises(xffl.ConfigError, match=r"by a hook over ranks \[7\] .* rank"):
        mark_reduced(net(), [7], by="a hook")
    state.unset_federated_scaling()
    for kind in ("elastic", "files"):
        alone = make_state(rank, federated_group_size=(4,))
        set_cell_world(alone, CellWorld(0, (4, 4)))
        model = net()
        if kind == "elastic":
            told = raised(lambda alone=alone, model=model: ElasticAggregator(model, alone))  # type: ignore[misc]
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            scaling = xffl.FederatedScaling(model, optimizer, alone, every=1)
            told = raised(scaling.__enter__)
        assert "ConfigError: parameter 'backbone.0.weight' is a plain tensor" in told, told
        alone.unset_federated_scaling()


def test_jobs_that_are_one_cell_are_checked_before_they_meet_others() -> None:
    run_world(4, jobs_of_one_cell)


# First rounds ---------------------------------------------------------------------------------------------------------

WARNING = "have made steps and hold the same bits"
ADVICE = "by Subset(data, range(state.cell, len(data), state.cells)) or xffl's CellLoader (docs/data.rst)"


def moved(model: nn.Module, by: float, name: str = "") -> None:
    with torch.no_grad():
        for other, tensor in model.named_parameters():
            if name in other:
                tensor.add_(by)


FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "codec": {"codec": "int8"},
    "fragments": {"fragments": 2},
    "delay": {"overlap": True},
    "server": {"server": "fedavgm"},
    "secret": {"privacy": {"name": "dp_fedavg", "clip": 1.0, "noise": 0.1, "seed": 3}},
}


def replicas_apart(rank: int, world_size: int, form: str) -> None:
    """One rank of cell 1 has trained apart: all are told which, and keep their weights."""
    state = make_state(rank, federated_group_size=(2, 2), hsdp=1)
    for _ in range(2):
        model = net()
        aggregator = aggregator_of(model, state, **FORMS[form])
        moved(model, 0.1 + rank // 2)
        if rank == 3:
            moved(model, 2.0**-20, "head.weight")
        before = [tensor.clone() for tensor in model.parameters()]
        for _ in range(2):
            run = (lambda: aggregator.aggregate_async().merge()) if form == "delay" else aggregator.aggregate  # noqa: B023
            told = raised(run)
            texts: list[str] = [""] * world_size
            dist.all_gather_object(texts, told)
            assert set(texts) == {told}, texts
            assert told.startswith("RoundError: ") and "'head.weight'" in told, told
            assert "rank 2 and rank 3 of cell 1" in told, told
        assert all(map(torch.equal, before, model.parameters()))
        if rank == 3:
            moved(model, 0.0)
        for tensor in model.parameters():
            dist.broadcast(tensor.detach(), src=2 * (rank // 2), group=state.federation)
        report = aggregator.aggregate_async().merge() if form == "delay" else aggregator.aggregate()
        assert report.round == 1
        if rank == 3:
            moved(model, 1.0)
        assert aggregator.aggregate().round == 2  # compared once


@pytest.mark.parametrize("form", FORMS)
def test_replicas_that_train_apart_are_refused(form: str) -> None:
    run_world(4, replicas_apart, form)


def shards_apart(rank: int, world_size: int) -> None:
    """What the shards of a cell hold alike is compared, too, in cells with and without replicas."""
    for setup in ({}, {"hsdp": 2}, {"cell_shape": {"dp_replicate": -1, "tp": 2}}):
        state = make_state(rank, federated_group_size=(4,), **setup)
        model = net()
        mesh = state.fsdp_mesh or state.hsdp_mesh
        assert mesh is not None
        fully_shard(model.backbone, mesh=mesh)
        model.head.weight = nn.Parameter(distribute_tensor(model.head.weight, mesh, [Replicate()] * mesh.ndim))
        aggregator = aggregator_of(model, state)
        bias = model.head.bias.detach().clone()
        if rank == 1:
            moved(model.head, 1.0, "bias")
        assert "'head.bias' is not the same on ranks 0, 2-3 and rank 1" in raised(aggregator.aggregate)
        with torch.no_grad():
            model.head.bias.copy_(bias)
            local_tensor(model.head.weight).add_(float(rank == 2))
        assert "'head.weight' is not the same on ranks 0-1, 3 and rank 2" in raised(aggregator.aggregate)


def test_what_shards_hold_alike_is_compared() -> None:
    run_world(4, shards_apart)


def on_unlike_processors(rank: int, world_size: int, apart: float) -> str:
    """Small differences between kinds of processors are told, large ones refused."""
    state = make_state(rank, federated_group_size=(2, 2), hsdp=1)
    text = io.StringIO()
    kinds = mock.patch("xffl.aggregation.engine.setup.processor_number", return_value=1.0 + rank % 2)
    with contextlib.redirect_stderr(text), kinds:
        model = net()
        aggregator = aggregator_of(model, state, overlap=True)
        moved(model, 0.5 + rank // 2)
        if rank == 1:
            moved(model, apart)
        pending = aggregator.aggregate_async()
        moved(model, 7.0 * rank)  # of no concern to the round under way
        told = raised(pending.merge)
    return told + text.getvalue()


def test_replicas_on_unlike_processors_may_differ_a_little() -> None:
    first, *others = run_world(4, on_unlike_processors, 1e-5)
    assert first.startswith(NONE) and "xffl: in cells 0 replicas on unlike processors" in first, first
    assert others == [NONE] * 3
    told = set(run_world(4, on_unlike_processors, 0.1))
    assert len(told) == 1 and "on rank 0 and rank 1 of cell 0, by " in told.pop()


def equal_cells(rank: int, world_size: int, setup: dict[str, Any]) -> list[bool]:
    """Tell after which first rounds the line about equal cells was written."""
    state = make_state(rank, **setup)
    cell = state.federated_rank or 0

    def is_told(run: Callable[[nn.Module], None]) -> bool:
        text = io.StringIO()
        with contextlib.redirect_stderr(text):
            run(xffl.shard(net(), state))
        told = text.getvalue()
        assert (WARNING in told) == (ADVICE in told), told
        return WARNING in told

    def alike(model: nn.Module) -> None:
        aggregator = xffl.Aggregator(model, state)
        moved(model, 1.0)
        aggregator.aggregate()

    def unlike(model: nn.Module) -> None:
        aggregator = xffl.Aggregator(model, state)
        moved(model, 1.0 + cell)
        aggregator.aggregate()
        moved(model, 1.0)
        aggregator.aggregate()

    def without_steps(model: nn.Module) -> None:
        xffl.Aggregator(model, state).aggregate()

    def resumed(model: nn.Module) -> None:
        aggregator = xffl.Aggregator(model, state)
        saved = aggregator.state_dict()
        moved(model, 1.0)  # a checkpoint is loaded
        aggregator.load_state_dict(saved)
        aggregator.aggregate()

    def in_a_loop(steps: int) -> Callable[[nn.Module], None]:
        def run(model: nn.Module) -> None:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with xffl.FederatedScaling(model, optimizer, state, every=2):
                for _ in range(steps):
                    model(torch.ones(2, 4)).sum().backward()
                    optimizer.step()

        return run

    def elastic(*by: float) -> Callable[[nn.Module], None]:
        """The aggregator is made after steps, and does not know what they have changed."""

        def run(model: nn.Module) -> None:
            scope = RoundScope(state, state.topology, goes_on=True)
            aggregator = xffl.Aggregator(model, scope)
            for one in by:
                moved(model, one)
                aggregator.aggregate()

        return run

    told = [is_told(run) for run in (alike, unlike, without_steps, resumed, in_a_loop(0), in_a_loop(2))]
    # After steps with a learning rate of 0, steps on the same data, on others, and none that change anything.
    return told + [is_told(elastic(*by)) for by in ((0.0, 1.0), (0.0, 1.0 + cell), (0.0, 0.0), (1.0 + cell, 0.0))]


@pytest.mark.parametrize(
    ("world_size", "setup"),
    [
        (4, {"federated_group_size": (2, 2)}),
        (3, {"federated_group_size": (2, 1)}),
        (3, {"federated_group_size": (2, 1), "hsdp": 1}),
    ],
)
def test_cells_that_are_equal_in_spite_of_steps_are_told(world_size: int, setup: dict[str, Any]) -> None:
    told = run_world(world_size, equal_cells, setup)
    assert told[0] == [True, False, False, False, False, True, True, False, False, False]
    assert not any(any(one) for one in told[1:])


def one_cell(rank: int, world_size: int) -> list[bool]:
    return equal_cells(rank, world_size, {"federated_group_size": (2,)})


def test_one_cell_is_equal_to_no_other() -> None:
    assert run_world(2, one_cell) == [[False] * 10] * 2


def price(rank: int, world_size: int) -> float:
    """Processor seconds that the comparison adds to a first round of 100 MB."""
    state = make_state(rank, federated_group_size=(1, 1))
    model = nn.ParameterList([nn.Parameter(torch.randn(1_000_000)) for _ in range(25)])
    first = xffl.Aggregator(model, state)._exchange.find(FirstRound)
    assert first is not None
    first.read(has_steps=True)
    start = time.process_time()
    first.read(has_steps=True)
    return time.process_time() - start


def test_the_comparison_is_cheap() -> None:
    assert min(run_world(2, price)) < 0.5  # 0.02 s on a free CPU


def scratch_for(rank: int, world_size: int) -> list[int]:
    """Count the allocations of half a MiB and more that an aggregator makes to look at few and at many tensors."""
    counts = []
    for tensors in (2, 12):
        model = nn.ParameterList([nn.Parameter(torch.ones(2**16)) for _ in range(tensors)])
        state = make_state(rank, federated_group_size=(1, 1))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            xffl.Aggregator(model, state, gradients_reduced_by_caller=True)
        counts.append(sum(event.self_cpu_memory_usage >= 2**19 for event in profile.events()))
    return counts


def test_the_first_look_at_a_model_takes_the_same_memory_for_any_number_of_tensors() -> None:
    for few, many in run_world(2, scratch_for):
        assert 0 < few == many
