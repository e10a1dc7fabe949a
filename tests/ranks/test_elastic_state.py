"""States of elastic federations: loaded in the middle of a run, and brought to cells whose stages hold parts of it."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

import xffl
from tests.ports import free_port
from tests.ranks.test_elastic import digest, journal, lighthouse, of_all, pytestmark  # noqa: F401 - fixtures and marks of this module
from tests.worlds import be_launched, run_world
from xffl.aggregation.engine.arena import Arena
from xffl.aggregation.engine.decision.consensus import RoundBroken, RoundInput
from xffl.aggregation.federations import elastic as federation_of_cells
from xffl.aggregation.federations.elastic import ElasticAggregator
from xffl.distributed import ElasticParameters
from xffl.distributed.parameters import DeviceParameters
from xffl.journal.folder import JournalFolder
from xffl.journal.records import RoundRecord, VoidRecord, make_id
from xffl.journal.who_continues import recover_record


def play(model: nn.Module, rounds: ElasticAggregator, cell: int, until: int) -> None:
    """Make rounds between steps of the cell's own."""
    while rounds.rounds < until:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.9).add_(0.1 * (1 + cell) + 0.01 * rounds.rounds)
        rounds.open()
        with suppress(RoundBroken):  # where the other cell has left
            rounds.participate(RoundInput(1.0))


def going_back(rank: int, world: int, url: str, ports: tuple[int, ...]) -> list[str]:
    """Go on twice from one state: at once, and once more when rounds have been made behind it."""
    be_launched(0, 1, ports[rank])
    os.environ["XFFL_TOKEN"] = "the run's own token"
    with xffl.session(cell=rank, cells=world, elastic=of_all(url, world), timeout_s=60) as state:
        torch.manual_seed(0)
        model = xffl.shard(nn.Linear(5, 3), state)
        rounds = ElasticAggregator(model, state, server="fedavgm:lr=0.5")
        rounds.join()
        play(model, rounds, rank, 3)
        weights, saved = {name: one.clone() for name, one in model.state_dict().items()}, rounds.state_dict()
        ends = []
        for _ in range(2):
            play(model, rounds, rank, 6)
            ends.append(digest(model))
            model.load_state_dict(weights)
            rounds.load_state_dict(saved)
        rounds.close()
    return ends


def test_a_state_that_is_loaded_in_the_middle_of_a_run_counts(lighthouse: str) -> None:  # noqa: F811
    told = run_world(2, going_back, lighthouse, (free_port(), free_port()), init=False)
    assert told[0] == told[1]
    assert told[0][0] == told[0][1]


class Stage(nn.Module):
    """A stage of a pipeline, of which each holds one parameter, that is, one fragment."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.register_parameter("ab"[stage], nn.Parameter(torch.linspace(-1, 1, 7 - stage)))


def in_stages(rank: int, world: int, url: str, ports: tuple[int, ...]) -> dict[int, str]:
    """Be a stage of a cell, the second of which loses all that it has, and comes again."""
    cell, stage = divmod(rank, 2)
    be_launched(stage, 2, ports[cell])
    os.environ["XFFL_TOKEN"] = "the run's own token"
    told: dict[int, str] = {}
    shape = DeviceParameters(pp=2)
    with xffl.session(cell=cell, cells=2, device_parameters=shape, elastic=of_all(url, 2), timeout_s=60) as state:
        for until in (4, 30) if cell else (30,):
            model = Stage(stage)
            rounds = ElasticAggregator(model, state, server="fedadam:lr=0.1", fragments=2)
            rounds.join()
            told.clear()
            while rounds.rounds < until:
                agreed = rounds.state_dict()["agreed"]
                told[rounds.rounds] = repr((agreed["model"], agreed["optimizers"]))
                play(model, rounds, cell, rounds.rounds + 1)
                time.sleep(0.05)
            rounds.close()
    return told


def test_a_late_cell_takes_over_servers_of_fragments_that_different_stages_hold(lighthouse: str) -> None:  # noqa: F811
    told = run_world(4, in_stages, lighthouse, (free_port(), free_port()), init=False)
    for stage in (0, 1):
        early, late = told[stage], told[2 + stage]
        assert 4 <= min(late) < 25
        assert {number: early[number] for number in late} == late


def come_late(rank: int, world: int, url: str, ports: tuple[int, ...], folder: str) -> tuple[int, int, int]:
    """Be one of two cells, of which the second comes when the first has made rounds.

    Return how many pieces of memory this one has prepared, how many of them hold what it keeps, and how many are left.
    """
    be_launched(0, 1, ports[rank])
    os.environ["XFFL_TOKEN"] = "the run's own token"
    begun = Path(folder, "begun")
    ended = Path(folder, "ended")
    while rank and not begun.exists():
        time.sleep(0.02)
    prepared: set[int] = set()

    class NotingArena(Arena):
        def prepare(self, nbytes: int, tables: Sequence[int]) -> None:
            super().prepare(nbytes, tables)
            prepared.update(map(place_of, (self._memory, *self._prepared)))

    elastic = ElasticParameters(lighthouse=url)
    with (
        mock.patch.object(federation_of_cells, "Arena", NotingArena),
        xffl.session(cell=rank, cells=world, elastic=elastic, timeout_s=60) as state,
    ):
        model = nn.Linear(300, 200)
        rounds = ElasticAggregator(model, state, server="fedadam:lr=0.1")
        rounds.join()
        while not rank and not ended.exists():
            play(model, rounds, rank, rounds.rounds + 1)
            begun.touch()
            time.sleep(0.02)
        ended.touch()
        assert rounds._aggregator is not None
        kept = rounds._aggregator.global_model
        assert kept is not None
        tables = [*kept._values.values(), *(table for state in kept._states.values() for table in state.values())]
        places = {*map(place_of, (rounds._arena._memory, *tables))}
        rounds.close()
    return len(prepared), len(prepared & places), len(rounds._arena._prepared)


def place_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def test_a_late_cell_writes_to_its_memory_before_it_meets_the_others(lighthouse: str, tmp_path: Path) -> None:  # noqa: F811
    """That is memory for a round's values, for the agreed model, and for the two tables of FedAdam."""
    ports = (free_port(), free_port())
    told = run_world(2, come_late, lighthouse, ports, str(tmp_path), init=False, timeout_s=60)
    assert told == [(0, 0, 0), (4, 4, 0)]


def with_a_new_journal(rank: int, world: int, url: str, ports: tuple[int, ...], journal: str) -> dict[str, object]:  # noqa: F811
    """Train, lose the journal, be refused by an empty one, and go on with one that takes its place."""
    be_launched(0, 1, ports[rank])
    os.environ["XFFL_TOKEN"] = "the run's own token"
    told: dict[str, object] = {}
    elastic = ElasticParameters(lighthouse=url, journal=f"{journal}/first", least_cells=world)
    with xffl.session(cell=rank, cells=world, elastic=elastic, timeout_s=60) as state:
        model = xffl.shard(nn.Linear(5, 3), state)
        rounds = ElasticAggregator(model, state)
        rounds.join()
        play(model, rounds, rank, 3 if rank else 2)
        saved = {name: one.clone() for name, one in model.state_dict().items()}, rounds.state_dict()
        play(model, rounds, rank, 3)
        if not rank:  # cell 0 has a checkpoint of the round before only
            model.load_state_dict(saved[0])
        rounds.close()
    elastic = ElasticParameters(lighthouse=url, journal=f"{journal}/empty_{rank}", least_cells=world)
    with xffl.session(cell=rank, cells=world, elastic=elastic, timeout_s=60) as state:
        rounds = ElasticAggregator(model, state)
        rounds.load_state_dict(saved[1])
        with pytest.raises(xffl.ConfigError) as refused:
            rounds.join()
        told["refused"] = str(refused.value)
        rounds.close()
    elastic = ElasticParameters(lighthouse=url, journal=f"{journal}/second", least_cells=world)
    with xffl.session(cell=rank, cells=world, elastic=elastic, timeout_s=60) as state:
        rounds = ElasticAggregator(model, state)
        rounds.load_state_dict(saved[1])
        told["before"] = rounds.rounds
        held = digest(model)
        rounds.join()
        told["joined"] = (rounds.rounds, digest(model) == held, digest(model))
        play(model, rounds, rank, 6)
        told["after"] = digest(model)
        rounds.close()
    return told


def test_a_run_goes_on_with_a_journal_that_takes_the_place_of_a_lost_one(lighthouse: str, tmp_path: Path) -> None:  # noqa: F811
    JournalFolder(tmp_path / "second").put(recover_record())
    zero, one = run_world(2, with_a_new_journal, lighthouse, (free_port(), free_port()), str(tmp_path), init=False)
    for cell, told in enumerate((zero, one)):
        assert f"cell {cell} holds the model of record" in told["refused"] and "--recover" in told["refused"]
    assert (zero["before"], one["before"]) == (2, 3)
    assert (zero["joined"][1], one["joined"][1]) == (False, True)  # cell 0 takes the newer model over
    assert zero["joined"][0] == one["joined"][0] == 4
    assert zero["joined"][2] == one["joined"][2]
    assert zero["after"] == one["after"]
    records = JournalFolder(tmp_path / "second").read_from(0)
    recovered = next(record for record in records if isinstance(record, RoundRecord))
    assert (recovered.round, recovered.cells) == (3, (1,))


def with_folders_of_their_own(rank: int, world: int, url: str, ports: tuple[int, ...], journal: str) -> str:  # noqa: F811
    be_launched(0, 1, ports[rank])
    os.environ["XFFL_TOKEN"] = "the run's own token"
    # Neither begins without the other, and cell 0 comes first.
    elastic = ElasticParameters(lighthouse=url, journal=f"{journal}/{rank}", least_cells=2, meeting_timeout_s=15.0)
    with xffl.session(cell=rank, cells=world, elastic=elastic, timeout_s=60) as state:
        rounds = ElasticAggregator(xffl.shard(nn.Linear(5, 3), state), state)
        while rank == 1 and not Path(journal, "0", "000000000.json").exists():
            time.sleep(0.05)
        try:
            rounds.join()
        except (xffl.ConfigError, xffl.RoundError) as refused:
            return str(refused)
        finally:
            rounds.close()
    return ""


@pytest.mark.parametrize("has_begun", [False, True], ids=["empty", "begun"])
def test_cells_whose_folders_are_not_one_are_refused_by_name(lighthouse: str, tmp_path: Path, has_begun: bool) -> None:  # noqa: F811
    for cell in (0, 1) if has_begun else ():
        name = make_id()
        JournalFolder(tmp_path / str(cell)).put(VoidRecord(name, 0, name))
    told = run_world(2, with_folders_of_their_own, lighthouse, (free_port(), free_port()), str(tmp_path), init=False)
    assert f"{tmp_path}/1" in told[1] and "use the service of a host (xffl lighthouse --journal)" in told[1]
    # A journal in which only this cell has written is one; it waits for the other one in vain.
    assert ("use the service of a host" in told[0]) == has_begun


def with_a_codec(rank: int, world: int, url: str, ports: tuple[int, ...]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Start twice from what was saved, the second cell at last from a state that is two rounds older.

    Return the model before each start and at the end, and what this cell's codec had left out.
    """
    be_launched(0, 1, ports[rank])
    os.environ["XFFL_TOKEN"] = "the run's own token"
    told, states = [], []
    with xffl.session(cell=rank, cells=2, elastic=of_all(url, 2), timeout_s=60) as state:
        model = nn.Linear(16, 1, bias=False)
        nn.init.zeros_(model.weight)
        for start, number in enumerate((3, 2, 2)):
            rounds = ElasticAggregator(model, state, codec="topk:0.2")
            if start:
                weights, saved = states[0 if (start, rank) == (2, 1) else -1]
                model.load_state_dict(weights)
                rounds.load_state_dict(saved)
            rounds.join()
            for _ in range(number):
                with torch.no_grad():
                    model.weight.add_((1 + rank) * torch.arange(1.0, 17.0))
                rounds.open()
                rounds.participate(RoundInput(1.0))
            states.append(({name: one.clone() for name, one in model.state_dict().items()}, rounds.state_dict()))
            told.append((model.weight.detach().clone().flatten(), rounds.state_dict()["residuals"]["weight"]))
            rounds.close()
    return told


def test_what_codecs_have_left_out_is_in_a_state_and_is_given_once(lighthouse: str) -> None:  # noqa: F811
    told = run_world(2, with_a_codec, lighthouse, (free_port(), free_port()), init=False)
    lost = torch.zeros(16)
    for rounds, (model, left), (equal, left_by_other) in zip((3, 5, 7), *told, strict=True):
        assert torch.equal(model, equal) and left.any() and left_by_other.any()
        if rounds == 7:
            lost = told[1][1][1]  # which the second cell had before it started from the older state
        torch.testing.assert_close(model + left + left_by_other + lost, rounds * 1.5 * torch.arange(1.0, 17.0))
