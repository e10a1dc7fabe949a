"""The last agreed model in flat tensors, apart from any world."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.rounds import options_of
from xffl.aggregation.engine.arena import Arena
from xffl.aggregation.engine.buffers import Copies
from xffl.aggregation.engine.global_model import GlobalModel
from xffl.aggregation.engine.planning.plan import Cut, Item, plan_groups, plan_transfers
from xffl.aggregation.federations.first_memory import SLACK, measure_memory
from xffl.topology import Topology

SIZES = {"big": 4000, "bias": 100, "other": 4000}


class WholeTensors:
    """What a global model asks a layout, on a rank that holds all of each tensor."""

    def name(self, item: int) -> str:
        return [*SIZES][item]

    def held(self, item: int) -> tuple[int, int]:
        return 0, [*SIZES.values()][item]


def make(cells: tuple[int, ...]) -> GlobalModel:
    """Of the first rank of the second cell, in cells of replicas that send in turn."""
    topology = Topology(sum(cells), cells, 1)
    rank = topology.offsets[1]
    cuts = [tuple(Cut.of_copy(numel, 1, 2**20) for _ in cells) for numel in SIZES.values()]
    items = [Item(item, "float32", "average", False, cut, "none", 0, True) for item, cut in enumerate(cuts)]
    groups: Any = SimpleNamespace(multi_rail=True, replica=None, cell=None)
    options = options_of(server="fedadam", rails=True)
    transfers = plan_transfers(plan_groups(items, topology, rank), topology, rank, groups, options, {}, is_on_cpu=True)
    layout: Any = WholeTensors()
    return GlobalModel(transfers, layout, options, torch.device("cpu"))


def test_a_global_model_of_other_cells_is_taken_over_element_by_element() -> None:
    """With rails the order of elements follows from the numbers of replicas, and so from the cells that are there."""
    known = {name: torch.full((numel,), float(place)) for place, (name, numel) in enumerate(SIZES.items())}
    for cells in ((2, 2), (4, 2)):
        last, model = make((2, 2)), make(cells)
        last.load_model(known)
        model.take_over(last)
        state = model.state_dict()["model"]
        assert all(state[name].equal(values) for name, values in known.items()), cells


def test_tables_are_given_memory_that_was_prepared_as_long_as_there_is_some() -> None:
    arena = Arena(Copies())
    arena.prepare(64, [4096, 4096])
    given = [arena.give(500, torch.float64, torch.device("cpu")) for _ in range(3)]
    stores = [one.untyped_storage().data_ptr() for one in given]
    assert len({*stores}) == 3 and [one.untyped_storage().nbytes() for one in given] == [4096, 4096, 4000]
    for value, one in enumerate(given):
        one.fill_(value)
    assert [one.sum().item() for one in given] == [0, 500, 1000]
    arena.prepare(64, [4096])
    arena.drop_prepared()
    assert arena.give(500, torch.float64, torch.device("cpu")).untyped_storage().nbytes() == 4000


@pytest.mark.parametrize(
    "server, is_shared_on_gpus, values, tables",
    [("fedadam", False, 24, 3), (None, False, 24, 1), ("fedadam", True, 0, 3), ("fedadam:device=meta", False, 24, 0)],
)
def test_only_memory_of_the_host_that_every_rank_needs_is_prepared(
    server: str | None, is_shared_on_gpus: bool, values: int, tables: int
) -> None:
    model = nn.Linear(3, 3).to(torch.bfloat16)
    given = {"server": server}
    measured = measure_memory(model, given, keeps_agreed=True, is_shared_on_gpus=is_shared_on_gpus)
    assert measured == (values + SLACK if values else 0, [48 + SLACK] * tables)
