"""Where a rank's data lies: the same answer from one process, one job, and cells that are jobs of their own."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import xffl
from tests.worlds import fake_world
from xffl.distributed import DistributedState
from xffl.distributed.distributed_state import set_cell_world
from xffl.distributed.parameters import DeviceParameters
from xffl.distributed.several_worlds.cell_world import CellWorld
from xffl.errors import ConfigError, StateError, TopologyError
from xffl.topology import DataPlace, Topology
from xffl.training.data.first_samples import FirstSamples, difference, digest_of
from xffl.training.data.loaders import CellLoader, adopt_loader, parts_by_ranks, validation_loader
from xffl.training.data.partition import by_key, dirichlet, iid, inner_dirichlet, quantity, shards
from xffl.training.data.sampler import CellBatchSampler, CellSampler
from xffl.training.data.streams import CellStream

CPU = torch.device("cpu")
LAYOUT = Topology(6, (4, 2))


def where(state: Any) -> tuple[int, int, int, int]:
    return state.cell, state.cells, state.cell_rank, state.cell_size


def known(rank: int, world_size: int) -> DistributedState:
    state = DistributedState()
    state.set_global("fake", CPU, "", 0, rank, world_size)
    return state


def lone(rank: int, cell: int, sizes: tuple[int, ...], topology: Topology | None = None) -> DistributedState:
    """A rank of a job that is one cell of several."""
    state = known(rank, sizes[cell])
    set_cell_world(state, CellWorld(cell, sizes))
    state._topology = topology
    return state


# The state ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cell", "cells", "cell_rank", "cell_size", "data_place"])
def test_a_state_without_a_world_says_what_to_call(name: str) -> None:
    with pytest.raises(StateError, match="call set_global first"):
        getattr(DistributedState(), name)


def test_one_process_and_one_job() -> None:
    with xffl.session() as state:
        assert where(state) == (0, 1, 0, 1)
    with fake_world(6, 5):
        state = known(5, 6)
        assert where(state) == (0, 1, 5, 6)  # one cell of all ranks
        state.set_federated_scaling((4, 2))
        assert where(state) == (1, 2, 1, 2) == where(state.data_place)
        assert (state.cell, state.cell_rank) == (state.federated_rank, state.federated_local_rank)
        state.unset_federated_scaling()
        assert where(state) == (0, 1, 5, 6)


@pytest.mark.parametrize("sizes", [(1, 1), (4, 2), (1, 2, 3)])
def test_cells_that_are_jobs_have_the_places_of_one_job(sizes: tuple[int, ...]) -> None:
    joined = Topology(sum(sizes), sizes)
    for rank in range(joined.world_size):
        place = DataPlace(joined, rank)
        state = lone(place.cell_rank, place.cell, sizes)
        assert where(state) == where(place)
        assert state.data_place.rank == rank and state.data_place.topology == joined
        assert (state.data_place.in_job.cells, state.data_place.in_job.rank) == (1, place.cell_rank)


def test_cells_that_are_jobs_with_replicas_of_a_shape() -> None:
    """A cell of another size has another number of replicas, which this one's shape does not say."""
    shape = {"dp_replicate": 2, "dp_shard": 1, "tp": 2}
    state = lone(3, 0, (4, 2), Topology(4, None, 2, shape))
    assert where(state) == (0, 2, 3, 4)
    assert state.data_place.topology.replica_counts == (2, 1)


def test_a_session_over_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XFFL_CELL", "1/2")
    with xffl.session() as state:
        assert where(state) == (1, 2, 0, 1) and state.federated_rank is None
    with xffl.DistributedWorld(DeviceParameters.FSDP()) as world:  # of a script that makes its world itself
        assert where(world.state) == (1, 2, 0, 1)
        other = world.seed_for(7, "federated")
    monkeypatch.setenv("XFFL_CELL", "0/2")
    with xffl.DistributedWorld(DeviceParameters.FSDP()) as world:
        assert where(world.state) == (0, 2, 0, 1) and world.seed_for(7, "federated") != other


def test_the_variable_of_the_other_project_is_told(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XFFL_FEDERATED_LOCAL_WORLD_SIZE", "4,4")
    with xffl.session():
        pass
    told = capfd.readouterr().err
    assert "XFFL_FEDERATED_LOCAL_WORLD_SIZE=4,4 has no effect" in told
    assert "set XFFL_FEDERATED=4,4" in told and told.count("\n") == 1


def test_a_place_is_inside_its_topology() -> None:
    with pytest.raises(TopologyError, match="rank must be an integer from 0 to 5, got 6"):
        DataPlace(LAYOUT, 6)


# What takes the state -------------------------------------------------------------------------------------------------

NUMBERS = TensorDataset(torch.arange(48))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(48))


CALLS: dict[str, tuple[Callable[..., Any], str]] = {
    "CellLoader": (lambda *at: CellLoader(NUMBERS, *at, batch_size=4), "CellLoader(dataset, state, batch_size=4)"),
    "CellStream": (
        lambda *at: CellStream(Stream(), *at, batch_size=2, part="own"),
        "CellStream(dataset, state, batch_size=2, part='own')",
    ),
    "CellBatchSampler": (
        lambda *at: CellBatchSampler(iid(48, 2), *at, batch_size=4),
        "CellBatchSampler(part, state, batch_size=4)",
    ),
    "CellSampler": (
        lambda *at: CellSampler(iid(48, 2), *at, batch_size=4),
        "CellSampler(part, state, batch_size=4)",
    ),
    "validation_loader": (
        lambda *at: validation_loader(NUMBERS, *at, batch_size=4),
        "validation_loader(dataset, state, batch_size=4)",
    ),
    "adopt_loader": (lambda *at: adopt_loader(DataLoader(NUMBERS), *at), "adopt_loader(loader, state)"),
    "parts_by_ranks": (lambda *at: parts_by_ranks(48, *at[:1]), "parts_by_ranks(samples, state)"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_topology_in_place_of_the_state_is_refused(name: str) -> None:
    call, line = CALLS[name]
    call(lone(0, 1, (1, 1)))
    call(DataPlace(LAYOUT, 0))
    with pytest.raises(ConfigError) as refused:
        call(LAYOUT, 0)
    assert f"give the state, which knows all cells: {line}" in str(refused.value)
    with pytest.raises(ConfigError, match="state must be the DistributedState .*got a Namespace"):
        call(type("Namespace", (), {})())


def test_a_topology_by_name_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"CellLoader\(dataset, state, batch_size=4\)"):
        CellLoader(dataset=NUMBERS, topology=LAYOUT, rank=0, batch_size=4)  # type: ignore[call-arg]


@pytest.mark.parametrize("sizes", [(1, 1), (2, 1)])
def test_cells_that_are_jobs_share_the_samples_out(sizes: tuple[int, ...]) -> None:
    """Each sample comes to one rank of one cell, as in one job; the first loader that the manual showed dealt twice."""
    joined = Topology(sum(sizes), sizes)
    places = [DataPlace(joined, rank) for rank in range(joined.world_size)]
    states = [lone(place.cell_rank, place.cell, sizes) for place in places]
    for make in (
        lambda at: CellLoader(NUMBERS, at, batch_size=4),
        lambda at: CellLoader(NUMBERS, at, batch_size=4, part=dirichlet(np.arange(48) % 3, at, alpha=1.0, minimum=4)),
        lambda at: CellStream(Stream(), at, batch_size=4),
    ):
        taken = [[torch.as_tensor(b[0] if isinstance(b, list) else b).tolist() for b in make(at)] for at in states]
        assert taken == [
            [torch.as_tensor(b[0] if isinstance(b, list) else b).tolist() for b in make(at)] for at in places
        ]
        assert sorted(one for batches in taken for batch in batches for one in batch) == list(range(48))


def test_validation_counts_what_its_job_can_add_up() -> None:
    """No reduction reaches the ranks of another job: a cell that is one counts all samples by itself."""
    for over in ("cell", "federation"):
        found = [validation_loader(NUMBERS, lone(rank, 1, (1, 2)), batch_size=5, over=over) for rank in (0, 1)]  # type: ignore[arg-type]
        assert sorted(int(one) for loader in found for (batch,) in loader for one in batch) == list(range(48))


PARTITIONS: dict[str, Callable[[Any], Any]] = {
    "iid": lambda cells: iid(60, cells),
    "quantity": lambda cells: quantity(60, cells, alpha=1.0),
    "dirichlet": lambda cells: dirichlet(np.arange(60) % 3, cells, alpha=1.0),
    "inner_dirichlet": lambda cells: inner_dirichlet(np.arange(60) % 3, cells, alpha=1.0),
    "shards": lambda cells: shards(np.arange(60) % 3, cells),
    "by_key": lambda cells: by_key(np.arange(60) % 10, cells),
}


@pytest.mark.parametrize("name", PARTITIONS)
def test_partitions_count_the_cells_of_a_state(name: str) -> None:
    make = PARTITIONS[name]
    assert make(lone(0, 1, (1, 1, 1))) == make(DataPlace(Topology(3, 1), 2)) == make(3)
    assert make(lone(0, 1, (1, 1, 1))).method == make(3).method
    with pytest.raises(ConfigError, match="cells is a topology, .*give the state, or state.cells"):
        make(Topology(1))


def test_a_partition_for_the_cells_of_one_job_is_refused_by_a_lone_cell() -> None:
    with pytest.raises(ConfigError, match="partition is for 1 cells, but there are 2; make it for state.cells"):
        CellLoader(NUMBERS, lone(0, 0, (1, 1)), batch_size=4, part=iid(48, 1))


# Every cell has the whole data set ------------------------------------------------------------------------------------


def whole(rank: int) -> CellLoader:
    return CellLoader(NUMBERS, DataPlace(LAYOUT, rank), batch_size=4, part="whole", seed=3)


def test_every_cell_is_dealt_the_whole_data_set() -> None:
    loaders = [whole(rank) for rank in range(6)]
    orders = {}
    for epoch in range(2):
        for cell in range(2):
            mine = [loaders[rank] for rank in LAYOUT.federation(cell)]
            taken = [[batch[0].tolist() for batch in loader] for loader in mine]
            steps = zip(*taken, strict=True)
            orders[cell, epoch] = [one for step in steps for batch in step for one in batch]
            assert sorted(orders[cell, epoch]) == list(range(48))
            assert {loader.samples_seen for loader in mine} == {48 * (epoch + 1)}
    assert [len(loader) for loader in loaders] == [3] * 4 + [6] * 2
    assert len(set(map(str, orders.values()))) == 4  # each cell and epoch its own shuffle


def test_the_whole_data_set_resumes() -> None:
    expected = [batch[0].tolist() for batch in whole(5)]
    stopped = whole(5)
    before = [next(iter(stopped))[0].tolist() for _ in range(2)]
    resumed = whole(5)
    resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
    assert before + [batch[0].tolist() for batch in resumed] == expected


class Drawn(IterableDataset[Any]):
    """Shuffled by torch's global generator, which the stream seeds."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(48).tolist())


def test_every_cell_reads_the_whole_stream() -> None:
    orders = []
    for ranks in (range(4), range(4, 6)):
        streams = [CellStream(Drawn(), DataPlace(LAYOUT, rank), batch_size=2, part="whole") for rank in ranks]
        steps = zip(*([batch.tolist() for batch in stream] for stream in streams), strict=True)
        orders.append([one for step in steps for turn in zip(*step, strict=True) for one in turn])
        assert sorted(orders[-1]) == list(range(48))
        assert {stream.samples_seen for stream in streams} == {48}
    assert orders[0] != orders[1]
    with pytest.raises(ConfigError, match="saved with part 'all', but this one has 'whole'"):
        streams[0].load_state_dict(CellStream(Drawn(), DataPlace(LAYOUT, 4), batch_size=2).state_dict())


# Streams that are split already ---------------------------------------------------------------------------------------


def test_a_stream_of_a_rank_is_taken_as_it_is() -> None:
    stream = CellStream(Stream(), DataPlace(Topology(2, 1), 1), batch_size=5, part="rank")  # its cell has one rank
    assert [one for batch in stream for one in batch.tolist()] == list(range(45))
    assert (stream.samples_seen, stream.epoch) == (45, 1)
    with pytest.raises(ConfigError, match='part="rank" needs the state of a process group: the 4 ranks of the cell'):
        CellStream(Stream(), DataPlace(LAYOUT, 1), batch_size=5, part="rank")
    with pytest.raises(ConfigError, match='give resume="count"'):
        CellStream(Stream(), DataPlace(Topology(1), 0), batch_size=5, part="rank", resume="state")


# Digests of samples ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Pair:
    first: Any
    second: Any


class Picture:
    """What an image of PIL has."""

    mode, size = "L", (1, 2)

    def __init__(self, values: bytes) -> None:
        self.values = values

    def tobytes(self) -> bytes:
        return self.values


UNLIKE: list[tuple[Any, Any]] = [
    (1, 2),
    (1, True),
    (1.0, math.nextafter(1.0, 2.0)),
    ("a", "b"),
    (b"a", b"b"),
    (torch.tensor([1, 2]), torch.tensor([1, 3])),
    (torch.tensor([1, 2]), torch.tensor([[1, 2]])),
    (torch.tensor(1.0), torch.tensor(1.0, dtype=torch.bfloat16)),
    (torch.ones(2, dtype=torch.complex64).conj(), torch.zeros(2, dtype=torch.complex64)),
    (np.arange(3), np.arange(3) + 1),
    (np.array(["a", {"b": 1}], dtype=object), np.array(["a", {"b": 2}], dtype=object)),
    ({"x": torch.tensor(1), "y": "a"}, {"x": torch.tensor(1), "y": "b"}),
    ({"x": 1}, {"y": 1}),
    ([1, (2, 3)], [1, (2, 4)]),
    ([1], [1, 1]),
    ({1, 2}, {1, 3}),
    (Pair(1, "a"), Pair(1, "b")),
    (Picture(b"\0\1"), Picture(b"\0\2")),
    (PurePosixPath("a"), PurePosixPath("b")),
]


@pytest.mark.parametrize(("one", "other"), UNLIKE, ids=range(len(UNLIKE)))
def test_digests_tell_samples_apart(one: Any, other: Any) -> None:
    assert digest_of(one) != digest_of(other)
    assert digest_of((one, [one])) == digest_of((one, [one]))


def test_digests_leave_out_what_is_not_of_the_sample() -> None:
    assert digest_of({"x": 1, "__url__": "/tmp/a"}) == digest_of({"__url__": "/tmp/b", "x": 1})
    assert digest_of(object()) == digest_of(object())  # nothing is known of what it holds
    assert digest_of({"x": torch.arange(3), "y": "b"}) == digest_of({"y": "b", "x": torch.arange(3)})
    strange = [
        None,
        float("nan"),
        torch.zeros(0),
        torch.eye(2).to_sparse(),
        torch.empty(2, device="meta"),
        2**80,
        "\ud800",
    ]
    assert digest_of(strange) == digest_of(strange)
    circle: list[Any] = []
    circle.append(circle)
    assert digest_of(circle) == digest_of(circle)


def test_what_is_compared() -> None:
    own, other = FirstSamples.of([1, 2], (0, 0)), FirstSamples.of([2, 2], (0, 0))
    assert difference({0: own, 1: own}, "Stream", "Do.") == ""
    text = difference({0: own, 1: own, 2: other}, "Stream", "Do.")
    assert text == (
        "the ranks do not read the same data from Stream: ranks 0-1 begin with 1; rank 2 begins with 2. Do."
    )
    # Ranks that have gone on from another position, and data that are unlike each time, cannot be compared.
    assert difference({0: own, 1: dataclasses.replace(other, at=(0, 1))}, "Stream", "Do.") == ""
    assert difference({0: own, 1: FirstSamples(is_random=True), 2: other}, "Stream", "Do.") == ""
    longer = dataclasses.replace(own, layout="3 samples")
    assert "2 samples on rank 0; 3 samples on rank 1" in difference(
        {0: dataclasses.replace(own, layout="2 samples"), 1: longer}, "Stream", "Do."
    )
    failed = FirstSamples(error="OSError: gone")
    assert difference({0: own, 1: failed}, "Stream", "Do.").endswith("samples of Stream: rank 1: OSError: gone")


NUMBERS_OF_A_SAMPLE = torch.randn(3, 40, generator=torch.Generator().manual_seed(0))


def with_noise(value: Any, by: float) -> Any:
    noise = torch.randn(value.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return (value.double() * (1 + by * noise)).to(value.dtype)


NEAR: list[tuple[Any, Any]] = [
    (1.0, math.nextafter(1.0, 2.0)),
    (0.9995, math.nextafter(0.9995, 0.0)),  # 1.00 and 0.999 if they were rounded to three digits
    (1e-9, -1e-9),  # left of numbers that cancel out
    (0.0, -0.0),
    (1 + 1j, 1 + 1.0000001j),
    ({1.0, 2.0, "a"}, {1.0000001, 2.0, "a"}),
    (NUMBERS_OF_A_SAMPLE, with_noise(NUMBERS_OF_A_SAMPLE, 1e-6)),
    (NUMBERS_OF_A_SAMPLE.half(), with_noise(NUMBERS_OF_A_SAMPLE.half(), 1e-3)),
    (NUMBERS_OF_A_SAMPLE.bfloat16(), with_noise(NUMBERS_OF_A_SAMPLE.bfloat16(), 8e-3)),
    (NUMBERS_OF_A_SAMPLE.numpy(), with_noise(NUMBERS_OF_A_SAMPLE, 1e-6).numpy()),
    ((torch.tensor([math.inf, math.nan, 1.0]), 3), (torch.tensor([math.inf, math.nan, 1.0000001]), 3)),
    (torch.tensor([1e300, 1e300], dtype=torch.float64), torch.tensor([1e300, 1e300], dtype=torch.float64)),
    (torch.zeros(0), torch.zeros(0)),
    (
        torch.complex(NUMBERS_OF_A_SAMPLE, NUMBERS_OF_A_SAMPLE),
        torch.complex(with_noise(NUMBERS_OF_A_SAMPLE, 1e-6), NUMBERS_OF_A_SAMPLE),
    ),
]


@pytest.mark.parametrize(("one", "other"), NEAR, ids=range(len(NEAR)))
def test_what_processors_compute_otherwise_is_the_same_sample(one: Any, other: Any) -> None:
    told = {rank: FirstSamples.of([7, {"x": value}], (0, 0)) for rank, value in enumerate((one, other))}
    assert difference(told, "Mel", "Do.") == ""


FAR: list[tuple[Any, Any]] = [
    *UNLIKE[:2],
    *UNLIKE[3:],  # all but the numbers that processors compute otherwise
    (1.0, 1.01),
    (1e-3, 2e-3),
    (1j, 1.01j),
    ({1.0}, {2.0}),
    (torch.tensor([1.0, math.nan]), torch.tensor([1.0, 0.0])),
    (torch.eye(10)[3], torch.eye(10)[4]),
    (NUMBERS_OF_A_SAMPLE, NUMBERS_OF_A_SAMPLE.flip(1)),
    (NUMBERS_OF_A_SAMPLE.bfloat16(), NUMBERS_OF_A_SAMPLE.bfloat16().flip(1)),
    (NUMBERS_OF_A_SAMPLE[0].numpy(), NUMBERS_OF_A_SAMPLE[1].numpy()),
    (1.0, 1),
]


@pytest.mark.parametrize(("one", "other"), FAR, ids=range(len(FAR)))
def test_other_samples_are_told_apart(one: Any, other: Any) -> None:
    told = {rank: FirstSamples.of([7, value], (0, 0)) for rank, value in enumerate((one, other))}
    text = difference(told, "Stream", "Do.")
    assert text.startswith("the ranks do not read the same data from Stream: rank 0 has as sample 1 ")
    shown = text.removesuffix(". Do.").split(" has as sample 1 ")
    assert len(shown) == 3 and shown[1].removesuffix("; rank 1") != shown[2]


def test_what_was_read_is_the_same_behind_json() -> None:
    own = FirstSamples.of([1.5, (2, "a")], (1, 2), "layout")
    assert FirstSamples.from_json(json.loads(json.dumps(dataclasses.asdict(own)))).has(0, own)
    assert dataclasses.asdict(FirstSamples.from_json(dataclasses.asdict(own))) == dataclasses.asdict(own)


def test_samples_that_look_alike_are_shown_by_their_digests() -> None:
    long = "a" * 80
    told = {rank: FirstSamples.of([text], (0, 0)) for rank, text in enumerate((long + "b", long + "c"))}
    assert difference(told, "Stream", "Do.").count("(digest ") == 2
    shorter = {0: FirstSamples.of([1, 2], (0, 0)), 1: FirstSamples.of([1], (0, 0))}
    assert "rank 0 has as sample 1 2; rank 1 has as sample 1 no sample" in difference(shorter, "Stream", "Do.")
