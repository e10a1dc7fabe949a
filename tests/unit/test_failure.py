"""What is told of an exception that ends a rank, whatever its class does."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

from xffl.cluster.launch import failure, runner
from xffl.cluster.launch.failure import (
    RankFailure,
    describe_failure,
    is_left_to_others,
    is_only_lost_peer,
    line_of,
    note_alike,
    note_failure,
    note_hint,
    note_unmet,
)
from xffl.cluster.listening import PortHeldError
from xffl.cluster.reaching import UnansweredError
from xffl.distributed.agreement.differences import rebuild_error
from xffl.distributed.failures.first_failure import JoinedWorld, tell_failure
from xffl.distributed.failures.isolated_job import tell_ended
from xffl.distributed.several_worlds.isolated_cell import IsolatedCell
from xffl.distributed.several_worlds.job_ranks import ENDED
from xffl.errors import ConfigError, LaunchError, OtherLayoutError, RoundError, TopologyError, class_name
from xffl.jobs.ranks import tell_failure as tell_first
from xffl.topology import Topology


@dataclass(frozen=True)
class Frozen(Exception):
    """It refuses attributes."""

    value: int


class Textless(RuntimeError):
    __slots__ = ()

    def __str__(self) -> str:
        raise AttributeError("no text yet")


@pytest.mark.parametrize(
    ("error", "headline"),
    [
        (Frozen(4), "Frozen: 4. HINT: try"),
        (Textless("x"), "Textless: (its text cannot be made: AttributeError). HINT: try"),
    ],
)
def test_an_exception_with_a_will_of_its_own_is_told(error: Exception, headline: str) -> None:
    note_failure(error)
    at = describe_failure(error).time
    note_hint(error, "try")
    note_alike(error, is_speaker=False)
    told = describe_failure(error)
    assert (told.time, told.headline, told.exit_code, told.lost_peer) == (at, headline, 1, False)
    assert is_left_to_others(error) and not is_only_lost_peer(error)


def in_package(error: Exception) -> None:
    """Raise an error in code of xffl."""
    exec(compile("raise error", failure.__file__, "exec"), {"error": error})


def in_script(error: Exception) -> None:
    raise error


@pytest.mark.parametrize(
    ("fail", "cause", "is_shown"),
    [
        (in_script, KeyError("a"), True),
        (in_script, TopologyError("a"), False),
        (in_script, None, False),
        (in_package, KeyError("a"), False),
    ],
)
def test_what_a_script_answers_with_an_error_of_xffl_is_shown(
    fail: Callable[[Exception], None], cause: Exception | None, is_shown: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    error = ConfigError("wrapped by the script")
    error.__cause__ = cause
    with pytest.raises(ConfigError):
        fail(error)
    layout: Any = SimpleNamespace(cell=None, topology=SimpleNamespace(world_size=1), cell_of=lambda rank: None)
    tell_first(RankFailure(0, 2, describe_failure(error)), layout, with_traceback=False)
    told = capsys.readouterr().err
    assert ("KeyError: 'a'" in told) is ("Traceback" in told) is is_shown
    assert told.splitlines()[-1].startswith("xffl: rank 0 failed with ConfigError: wrapped by the script (at ")
    assert runner.be_rank(lambda: fail(error)) == 2
    assert ("KeyError: 'a'" in capsys.readouterr().err) is is_shown


def test_rank_0_tells_what_may_be_of_all_and_the_others_its_first_words() -> None:
    text = "nothing answers at a:1 (refused; tried for 9 s), where rank 0 is to listen; set MASTER_ADDR; or MASTER_PORT"
    errors = [LaunchError(text) for _ in range(3)]
    for rank, error in enumerate(errors[:2]):
        note_unmet(error, rank, is_speaker=rank == 0)
        note_unmet(error, 2, is_speaker=True)  # the first counts
    first, other, apart = (line_of(error, describe_failure(error)) for error in errors)
    assert first == apart == f"xffl: LaunchError: {text}"
    assert other == "xffl: rank 1 has not met the others: LaunchError: " + text.partition("; set")[0]


@pytest.mark.parametrize(
    ("kind", "environ", "line", "waits"),
    [
        (LaunchError, {}, "xffl: LaunchError: a; b", False),
        (LaunchError, {"RANK": "0", "WORLD_SIZE": "1"}, "xffl: LaunchError: a; b", False),
        (PortHeldError, {"RANK": "0", "WORLD_SIZE": "2"}, "xffl: LaunchError: a; b", True),
        (UnansweredError, {"RANK": "3"}, "xffl: rank 3 has not met the others: LaunchError: a", True),
    ],
)
def test_a_command_tells_what_ends_it_before_ranks_meet(
    kind: type[LaunchError],
    environ: dict[str, str],
    line: str,
    waits: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waited: list[BaseException] = []
    monkeypatch.setattr(failure, "leave_together", waited.append)
    failure.tell_unmet(kind("a; b"), environ)
    assert capsys.readouterr().err == line + "\n" and bool(waited) is waits


@pytest.mark.parametrize("is_speaker", [True, False])
def test_a_command_whose_ranks_have_met_tells_their_error_once(
    is_speaker: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    error = TopologyError("6 ranks asked for; 2 are there")
    note_alike(error, is_speaker=is_speaker)
    failure.tell_unmet(error, {"RANK": "1", "WORLD_SIZE": "2"})
    assert capsys.readouterr().err == (f"xffl: TopologyError: {error}\n" if is_speaker else "")


@pytest.mark.parametrize(
    ("told", "has_worlds", "text"),
    [
        (False, False, "since of rank 2 (cell 1), which was killed"),
        (True, False, "rank 2 ended first, with KeyE"),
        (True, True, "rank 2 of the job, which is rank 0 of cell 1, ended first, with KeyE"),
    ],
)
def test_ranks_that_are_left_name_the_one_that_is_gone(told: bool, has_worlds: bool, text: str) -> None:
    store = HashStore()
    worlds = [JoinedWorld(store, rank, 3, Topology(3, (2, 1)), has_worlds=has_worlds) for rank in range(3)]
    if told:
        tell_failure(KeyError("a"), worlds[2])
    errors = [RuntimeError("[gloo/transport/tcp/pair.cc:537] Connection closed by peer [127.0.0.1]") for _ in range(2)]
    asking = [threading.Thread(target=tell_failure, args=[error, worlds[rank]]) for rank, error in enumerate(errors)]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    assert all(text in describe_failure(error).headline for error in errors)


def test_a_bounded_number_of_ranks_looks_for_those_that_are_gone() -> None:
    class Counting:
        """A store that counts its questions."""

        def __init__(self) -> None:
            self.store = HashStore()
            self.looks: Counter[str] = Counter()

        def __getattr__(self, name: str) -> Any:
            return getattr(self.store, name)

        def check(self, keys: list[str]) -> bool:
            self.looks.update(key for key in keys if key.startswith("xffl_left/"))
            return self.store.check(keys)

    store: Any = Counting()
    lost = 9
    worlds = [JoinedWorld(store, rank, 12, Topology(12, (6, 6))) for rank in range(12) if rank != lost]
    errors = [RuntimeError("[gloo/transport/tcp/pair.cc:537] Connection closed by peer [127.0.0.1]") for _ in worlds]
    asking = [threading.Thread(target=tell_failure, args=each) for each in zip(errors, worlds, strict=True)]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    assert all("since of rank 9 (cell 1), which was killed" in describe_failure(error).headline for error in errors)
    assert set(store.looks.values()) == {4}


def test_a_rank_that_was_lost_between_worlds_is_told_of_as_any_other() -> None:
    text = "round 1 could not be opened: a rank of the group rounds/1 was lost in the middle of a message"
    assert is_only_lost_peer(RoundError(text))


def test_what_ends_a_rank_is_raised_also_where_the_store_goes_while_others_are_told() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    isolated = IsolatedCell(rank=1, sizes=(1, 1), store=f"127.0.0.1:{server.port}")
    tell_ended(isolated, server, 10.0)
    assert server.check([ENDED])
    store = mock.Mock(**{"set.side_effect": RuntimeError("Connection reset by peer")})
    tell_ended(isolated, store, 10.0)
    store.set.assert_called_once()


def test_an_error_is_called_by_its_public_name_and_made_on_other_ranks_as_what_it_is() -> None:
    error = OtherLayoutError("saved by two ranks")
    assert describe_failure(error).headline == "ConfigError: saved by two ranks"  # so no cell is started again in vain
    assert type(rebuild_error(class_name(error), str(error))) is OtherLayoutError
