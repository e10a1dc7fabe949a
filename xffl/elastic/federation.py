"""Elastic federation, as a rank of one cell sees it: meetings with the other cells, and the group of all their ranks.

Each cell is a job, and so a world, of its own. Before a round the first rank of the cell (its leader) meets the leaders
of the other cells at the lighthouse (:meth:`ElasticFederation.meet`); then all ranks of the cells that met join one
group (:meth:`ElasticFederation.enter`), make the round, and agree on its end (:meth:`ElasticFederation.agree_on_end`).
The round counts if its record stands in the run's journal, which the leaders read and write.
"""

from __future__ import annotations

import secrets
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from enum import IntEnum
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from xffl.cluster.lighthouse.address import bind_address, resolve_lighthouse
from xffl.cluster.lighthouse.timeouts import CELL_HEARTBEAT_TIMEOUT_S, CELL_JOIN_TIMEOUT_S
from xffl.cluster.run_token import PROOF_KEY, prove_token, token_of
from xffl.cluster.runtimes import Runtime, group_by_runtime
from xffl.distributed.agreement.consistency import compute_device, control_device, own_runtime, run_on_all_ranks
from xffl.distributed.agreement.differences import tell_runtimes
from xffl.distributed.distributed_state import DistributedState
from xffl.distributed.failures.faults import inject, is_planned
from xffl.distributed.failures.faulty_group import FaultyGroup
from xffl.distributed.several_worlds.cross_world import CrossWorldGroup
from xffl.distributed.several_worlds.distant_store import StoreGone, connect_store
from xffl.distributed.startup.stores import serve_store
from xffl.elastic.answers import Answers, ask_store, knock
from xffl.elastic.arrivals import Arrivals, may_still_come
from xffl.elastic.epoch_store import await_ranks, delete_keys_of_groups
from xffl.elastic.lighthouse_client import Lighthouse, Meeting
from xffl.elastic.roster import (
    CellRecord,
    Epoch,
    cell_of,
    check_alike,
    form_epoch,
    is_life,
    name_cell,
)
from xffl.errors import (
    CheckpointError,
    ConfigError,
    LaunchError,
    MeetingLeft,
    RoundError,
    StateError,
    XfflError,
)
from xffl.journal.cell import CellJournal
from xffl.journal.place import cells_command
from xffl.journal.records import JournalUnreachable, Record, RoundRecord
from xffl.journal.who_continues import Fate, Holding
from xffl.topology import Topology, cells_text

__all__ = ["ElasticFederation", "RoundEnd"]

QUIET_S = 1.0
"""How long a leader waits at the lighthouse until it asks cells without heartbeats whether they are still there."""
LOST_S = 0.5
"""How long a cell that the lighthouse counts as lost has to answer; any other one has
:data:`CELL_HEARTBEAT_TIMEOUT_S`."""
SLICE_S = 10.0
"""How often a waiting leader sends a message to the ranks of its cell, so that their collective does not time out."""
FILE_S = 0.5
"""Seconds between two reads of the file that names the lighthouse."""
CONNECT_S = 10.0
"""Timeout of the ranks of an epoch for connecting to each other; short, because all have just met."""
UNLIKE_S = 30.0
"""How long all other cells must have had another token until this cell ends."""
ASK_AGAIN_S = 0.1
"""Seconds between two looks at the journal for the record of a round in doubt."""
REFUSED_S = 0.5
"""Seconds until cells meet again that must not make a round yet."""
SOON_S = 0.05
"""The same where only the journal or a look at a missing cell stood between."""
LATER_S = 0.2
"""The same where a cell is missing for more than :data:`CELL_HEARTBEAT_TIMEOUT_S`."""
ALONE_S = 2.0
"""How long a rank that could not enter waits for the others of its cell until it closes its connections to them."""
AWAY_KEY = "away"
"""In a cell's store, while it waits for the lighthouse or the journal with its steps made."""
MOST_TRIES = 5
"""After so many broken rounds in a row with the same members, the cells count as unable to reach each other."""


class RoundEnd(IntEnum):
    """How a round ended on one rank. :meth:`ElasticFederation.agree_on_end` combines the ends of a cell's ranks."""

    FAILED = -1  # this rank could not enter the epoch, for a reason that the others may not have
    REFUSED = 0  # rolled back for a reason that all ranks know; not repeated
    BROKEN = 1  # rolled back because this rank, or one that voted no, lost contact to another
    IN_DOUBT = 2  # this rank voted to commit and lost contact before it saw the result
    TAKEN = 3  # committed


@dataclass(frozen=True)
class Place:
    """Position of this cell's ranks among those of an epoch."""

    topology: Topology  # of the epoch: all ranks of all members
    first: int  # offset from a rank of the epoch to a rank of this world
    group: CrossWorldGroup
    is_new: bool  # whether the group was made for this epoch


class ElasticFederation:
    """The federation of one cell with others that come and go.

    All methods are collective over the cell, except those that say "local".

    :param state: The state of this cell's world, which was joined with ``elastic``.
    :raises ConfigError: if torchft is not installed; on all ranks.
    """

    def __init__(self, state: DistributedState) -> None:
        parameters, lone = state.elastic, state.lone_cell
        if parameters is None or lone is None:
            raise StateError("this world is no cell of an elastic federation; join it with xffl.session(elastic=...)")
        self.cell, sizes = lone
        self.cells = len(sizes)
        self.record: RoundRecord | None = None
        """The round whose model this cell holds; ``None`` if it has only its own start"""
        self.total_weight = 0.0
        """Sum of all cells' weights over all rounds that led to that model"""
        self._state = state
        self._journal = state.cell_journal
        self.holding = Holding(self.cell) if self._journal is None else self._journal.holding
        """What this cell holds and may be in doubt about, the same on all of its ranks"""
        self._parameters = parameters
        self._group: CrossWorldGroup | None = None
        self._group_name = ""
        self._closing: threading.Thread | None = None
        """Closes the group of the last epoch while this rank goes on"""
        self._members: tuple[str, ...] = ()
        """Lives of the members of the last epoch"""
        self._addresses: dict[int, str] = {}
        """By cell, the stores of the members of the last epoch"""
        self._epoch: Epoch | None = None
        """The last epoch that was entered"""
        self._gone: set[int] = set()
        """Cells that have been absent since the last round, and do not answer, or have been waited for"""
        self._answers = Answers()
        """Questions to cells whether they are still there"""
        self._missed_since: dict[int, float] = {}
        """By cell, since when it is missing in meetings"""
        self._arrivals = Arrivals()
        """How long this cell takes from one meeting to the next"""
        self._reaches: dict[int, float] = {}
        """By cell, how long after the last meeting the members of that epoch may come to this one"""
        self._message_s = parameters.message_timeout_s
        self._lacks_journal = False
        """Whether the journal did not answer this cell, or did not take its record"""
        self._failures = 0
        self._said = ""
        self._warned: set[str] = set()
        self._unlike_since: float | None = None
        """Since when all other cells have another token"""
        self._finished_since: float | None = None
        """Since when this cell waits only for cells that have finished the run"""
        self._spoofed_since: float | None = None
        """Since when somebody else sends requests in the name of a cell of the last round"""
        self._lighthouse: Lighthouse | None = None
        self._store: TCPStore | None = None
        self._hosted: list[tuple[str, int]] = []
        """Groups whose ranks meet at this cell's store, with how many these are, those of earlier epochs first"""
        if parameters.lighthouse.startswith("file:"):
            self._await_lighthouse()
        self._runtime = own_runtime(compute_device(state))
        self._known: dict[int, Runtime] = {}
        """By cell, the runtimes of the cells that this one has met"""
        life = [f"{self.cell}.{secrets.token_hex(6)}"]
        was_here = [self._journal is not None and self._journal.history.has_cell(self.cell)]
        self.restore(None, 0.0)
        with run_on_all_ranks("tokens and lighthouses"):
            self._token = token_of()
            if state.rank == 0:
                self._address = self._serve_store(life[0])
                self._lighthouse = Lighthouse(parameters.lighthouse, life[0], self._token)
        dist.broadcast_object_list(life, src=0)
        self.life = life[0]
        dist.broadcast_object_list(was_here, src=0)
        self.was_here = was_here[0]
        """Whether the journal knows of an earlier start of this cell's job, which may have saved a model"""

    def _serve_store(self, life: str) -> str:
        """Serve the store where the ranks of an epoch may meet, and return its address; on the leader."""
        host = bind_address(self._parameters.lighthouse)
        store = serve_store(
            host=host,
            port=0,
            world_size=None,
            timeout=timedelta(seconds=CONNECT_S),
            is_local=False,
        )
        store.set(PROOF_KEY, prove_token(self._token, life))  # for xffl doctor
        self._store = store
        self._hosted.clear()
        return f"{host}:{store.port}"

    def restore(self, record: RoundRecord | None, total_weight: float) -> None:
        """Hold a model that was loaded, or only this cell's own start; local, on all ranks.

        :param record: The round that made the model.
        :param total_weight: Sum of all cells' weights over all rounds that led to it.
        """
        self.record = record
        self.total_weight = total_weight
        model = None if record is None else record.model
        if self._journal is None:
            self.holding.model = model
            self.holding.doubt = None
        else:
            self._journal.begin(model)

    def _await_lighthouse(self) -> None:
        """Wait for the file that names the lighthouse; the leader's broadcasts keep the other ranks from timing out."""
        deadline = time.monotonic() + self._parameters.meeting_timeout_s
        while True:
            answer: list[bool | LaunchError] = [False]
            if self._state.rank == 0:
                try:
                    answer[0] = bool(resolve_lighthouse(self._parameters.lighthouse))
                except LaunchError as error:
                    self._say(str(error))
                    time.sleep(FILE_S)
                    if time.monotonic() > deadline:
                        answer[0] = error
            dist.broadcast_object_list(answer, src=0)
            if isinstance(answer[0], LaunchError):
                raise answer[0]
            if answer[0]:
                return

    def meet(
        self, *, is_finished: bool = False, told: str = "", is_stopping: Callable[[], bool] | None = None
    ) -> Epoch:
        """Meet other cells until those present may make a round.

        :param is_finished: Whether this cell leaves after the round.
        :param told: JSON text for the other cells.
        :param is_stopping: Called on the cell's first rank: whether the cell is to stop. It then stops waiting.
        :return: The epoch.
        :raises RoundError: if no such meeting came about in time.
        :raises MeetingLeft: if the cell is to stop.
        """
        self._heed(is_stopping)
        begun = time.monotonic()
        self._arrivals.note_arrival(begun, is_again=self._failures > 0)
        self._missed_since.clear()
        # After a broken round nobody has to be waited for who does not answer. What is known of cells that were absent
        # in an earlier try stays: their addresses are forgotten, because those of a try take their place.
        if self._failures:
            self._gone.update(self._silent_cells(self._addresses))
        else:
            self._gone.clear()
        within_s = QUIET_S
        while True:
            epoch = self._ask(begun, within_s, is_stopping, is_finished=is_finished, told=told)
            if epoch is not None and not epoch.refusal:
                self._arrivals.note_end(time.monotonic())
                self._take_name(epoch)
                return epoch
            if epoch is None:
                self._ask_quiet_cells()
                within_s = SLICE_S

    def _heed(self, is_stopping: Callable[[], bool] | None) -> None:
        if self._journal is not None:
            self._journal.heed(is_stopping)

    def _take_name(self, epoch: Epoch) -> None:
        """Call a model of a lost journal as the epoch does, or hold none if it was given up; local, on all ranks."""
        mine = next(member for member in epoch.members if member.cell == self.cell)
        if mine.lost is not None:
            self.holding.model = mine.held
            is_base = epoch.base is not None and epoch.base.model == mine.held
            self.record = epoch.base if is_base else None

    def _ask(
        self, begun: float, within_s: float, is_stopping: Callable[[], bool] | None, **fields: Any
    ) -> Epoch | None:
        """Let the leader request a meeting, and broadcast its result; ``None`` if there is none yet."""
        deadline = begun + self._parameters.meeting_timeout_s
        result: list[Epoch | RoundError | ConfigError | CheckpointError | MeetingLeft | None] = [None]

        def is_left() -> bool:
            return is_stopping is not None and is_stopping()

        if self._lighthouse is not None:
            try:
                within_s = max(0.1, min(within_s, deadline - time.monotonic()))
                epoch = self._ask_lighthouse(self._lighthouse, within_s, is_left, **fields)
                result[0] = epoch
                if epoch is not None and epoch.refusal:
                    self._prepare_again(epoch, begun)
            except LaunchError as error:
                self._say(str(error))
                self._say_away()
            except JournalUnreachable as error:
                self._say(str(error))
                self._lacks_journal = True
                self._say_away()
                # The others may wait for this cell, in the round of this meeting or at the next one.
                self._lighthouse.pause()
                self.poison()
                self.drop()
                time.sleep(REFUSED_S)
            except (ConfigError, CheckpointError) as error:
                result[0] = error
            is_waiting = result[0] is None or (isinstance(result[0], Epoch) and bool(result[0].refusal))
            if is_waiting and is_left():
                result[0] = MeetingLeft()
                self._withdraw(self._lighthouse)
            elif is_waiting and time.monotonic() > deadline:
                result[0] = RoundError(
                    f"cell {self.cell} found no cells for a round within {self._parameters.meeting_timeout_s:g} s: "
                    f"{self._said or 'cells that live have not come to it'}"
                )
        dist.broadcast_object_list(result, src=0)
        [answer] = result
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _withdraw(self, lighthouse: Lighthouse) -> None:
        """Take the request for a meeting back, so that the other cells do not wait for this one; on the leader.

        They may meet its last request once more, and see at once that its store has gone.
        """
        lighthouse.withdraw()
        self.poison()
        self.drop()
        self._store = None

    def _ask_lighthouse(
        self, lighthouse: Lighthouse, within_s: float, is_left: Callable[[], bool], **fields: Any
    ) -> Epoch | None:
        journal = self._journal
        assert journal is not None, "the leader has it"
        if self._lacks_journal:
            # Whoever meets this cell would try a round that it cannot decide on, or publish.
            journal.try_again()
            self._lacks_journal = False
        journal.check()
        if self._store is None:  # the last request was taken back
            self._address = self._serve_store(self.life)
        meeting = lighthouse.meet(replace(self._make_record(), **fields), within_s, is_left)
        if meeting is None:
            return None
        if self._store is not None:
            self._store.delete_key(AWAY_KEY)
        # A cell that has made rounds continues without those of another version of xffl; one that has not ends here.
        if meeting.unread and self.record is None:
            raise meeting.unread[0]
        self._check_token(meeting)
        self._warn_of_strangers(meeting)
        if self._awaits_member(meeting):
            return None
        records = self._of_this_journal(journal, meeting)
        journal.read_for([record.member for record in records])
        journal.check()
        epoch = form_epoch(records, meeting.created, journal.history, least=self._parameters.least_cells)
        if self.life not in epoch.lives:
            check_alike((*epoch.members, *epoch.strangers))
        self._check_finished(epoch)
        self._warn_of(epoch)
        return epoch

    def _of_this_journal(self, journal: CellJournal, meeting: Meeting) -> list[CellRecord]:
        """Return the records of a meeting without those of cells that read the journal of another run.

        A cell that has made no round yet, and meets such cells, raises ConfigError.
        """
        journal.read_new()
        run = journal.history.run
        others = [record for record in meeting.records if run and record.run not in ("", run)]
        for other in others:
            text = f"cell {other.cell} reads the journal of run {other.run}, and cell {self.cell} that of run {run}"
            if self.record is None:
                raise ConfigError(
                    f"{text}, {journal.where}: give all cells one folder of a file system that their hosts share, or "
                    "use the service of a host (xffl lighthouse --journal)"
                )
            self._warn(f"{text}: it is left out")
        return [record for record in meeting.records if record not in others]

    def _check_finished(self, epoch: Epoch) -> None:
        """Raise ConfigError if the cells wait only for cells that have finished the run, and do not come back.

        Cells that continue a finished run come one after another.
        """
        wait = epoch.wait
        if wait is None or not {*wait.cells} <= {*wait.round.left}:
            self._finished_since = None
            return
        now = time.monotonic()
        if self._finished_since is None:
            self._finished_since = now
        if now > self._finished_since + CELL_JOIN_TIMEOUT_S:
            verb = "has" if len(wait.cells) == 1 else "have"
            raise ConfigError(
                f"{cells_text(wait.cells)} {verb} finished the run, and no cell that is left holds its model: there is "
                f"nothing to go on from; take the result from cell {wait.cells[0]}, or start it again with its "
                "checkpoint"
            )

    def _prepare_again(self, epoch: Epoch, begun: float) -> None:
        """Do what this cell can do, on its leader, so that the next meeting may make a round.

        :param epoch: That of the last one, which made none.
        :param begun: When this cell came to wait for a round.
        """
        journal = self._journal
        assert journal is not None, "the leader has it"
        pause_s = REFUSED_S
        if epoch.awaited:
            command = cells_command(self._parameters.lighthouse, self._parameters.journal)
            self._say(f"{epoch.refusal}: {command} --forget {epoch.awaited[0]}")
        elif not epoch.has_new_starts:  # to record starts takes a moment, at each start of a run
            self._say(epoch.refusal)
        if epoch.has_new_starts:
            pause_s = SOON_S
            if self.cell == epoch.cells[0]:
                journal.record_starts([member.member for member in epoch.members])
        if epoch.recovering is not None:
            pause_s = SOON_S
            holders = [member.cell for member in epoch.members if member.lost == epoch.recovering]
            if self.cell == min(holders) and self.record is not None:
                journal.publish(journal.history.recover(self.record, holders))
        if epoch.missing:
            pause_s = SOON_S
            now = time.monotonic()
            for cell in epoch.missing:
                self._missed_since.setdefault(cell, now)
            known = {cell: self._addresses[cell] for cell in epoch.missing if cell in self._addresses}
            silent = {*self._silent_cells(known)} - self._gone
            self._gone |= silent
            if silent:
                pause_s = 0.0
            # Cells that start again together come one after another, and this one does not know where the others were.
            is_back = self._epoch is None and epoch.base is not None
            for cell in epoch.missing:
                is_awaited = cell in known or is_back
                patience_s = CELL_JOIN_TIMEOUT_S if is_awaited else CELL_HEARTBEAT_TIMEOUT_S
                missed_s = now - self._missed_since[cell]
                if missed_s > patience_s and not self._is_on_its_way(cell, now, begun):
                    self._gone.add(cell)
                if missed_s > CELL_HEARTBEAT_TIMEOUT_S:
                    pause_s = LATER_S
        time.sleep(pause_s)

    def _say_away(self) -> None:
        """Let the others know that this cell makes no steps, though it is not at the meeting."""
        if self._store is not None:
            self._store.set(AWAY_KEY, "")

    def _is_on_its_way(self, cell: int, now: float, begun: float) -> bool:
        """Tell whether a missing cell may still be making its steps, by how long it took in its last rounds."""
        since_s = self._arrivals.since_meeting(now)
        reach_s = self._reaches.get(cell)
        # Cells that repeat a round have all made their steps.
        if since_s is None or reach_s is None or self._failures > 0:
            return False
        if ask_store(self._addresses[cell], AWAY_KEY):
            return False
        return may_still_come(
            reach_s,
            own_s=self._arrivals.own_s,
            stretch=self._arrivals.stretch,
            since_meeting_s=since_s,
            waited_s=now - begun,
            meeting_timeout_s=self._parameters.meeting_timeout_s,
        )

    def _ask_quiet_cells(self) -> None:
        """Ask the cells of the last epoch whose heartbeats do not come whether they are there, without waiting.

        When the lighthouse counts them as lost, the answer, or that there is none, is known already.
        """
        if self._lighthouse is None:
            return
        quiet = self._lighthouse.find_quiet(QUIET_S / 2)
        cells = {cell_of(life) for life in quiet if life in self._members} - {self.cell}
        self._answers.ask(self._addresses[cell] for cell in sorted(cells))

    def _silent_cells(self, addresses: Mapping[int, str]) -> list[int]:
        """Return the cells whose stores do not answer; on the leader, none elsewhere."""
        others = {cell: address for cell, address in addresses.items() if cell != self.cell}
        if self._lighthouse is None or not others:
            return []
        quiet = self._lighthouse.find_quiet(QUIET_S / 2)
        lost = {cell_of(life) for life, is_lost in quiet.items() if is_lost and life in self._members}
        silent = self._answers.find_silent(
            {address: LOST_S if cell in lost else CELL_HEARTBEAT_TIMEOUT_S for cell, address in others.items()}
        )
        return [cell for cell, address in others.items() if address in silent]

    def _check_token(self, meeting: Meeting) -> None:
        """Raise ConfigError if all other cells have had another token for a while, and this one holds no agreed model.

        While cells are missing it is not known which token is the run's. A stranger's single request ends no run.
        """
        others = [life for life in meeting.unproven if is_life(life, self.cells)]
        if len(meeting.records) > 1 or self.record is not None:
            self._unlike_since = None
        elif others and len({*map(cell_of, others)} - {self.cell}) >= self.cells - 1:
            if self._unlike_since is None:
                self._unlike_since = time.monotonic()
            elif time.monotonic() > self._unlike_since + UNLIKE_S:
                raise ConfigError(
                    f"{name_cell(others[0])} runs with another token than this cell {self.cell}; give all cells of a "
                    "run the same one (XFFL_TOKEN, or XFFL_TOKEN_FILE)"
                )

    def _make_record(self) -> CellRecord:
        """Return what this cell tells the others."""
        journal = self._journal
        assert journal is not None, "the leader has it"
        topology = self._state.topology
        member = journal.as_member()
        return CellRecord(
            cell=self.cell,
            cells=self.cells,
            life=self.life,
            start=journal.start,
            since=journal.since,
            held=member.held,
            seen=member.seen,
            lost=member.lost,
            run=journal.history.run,
            round=0 if self.record is None else self.record.round,
            gone=tuple(sorted(self._gone)),
            restarts=self._parameters.restarts,
            ranks=topology.world_size,
            replica_size=topology.replica_size,
            address=self._address,
            group=self._group_name,
            total_weight=self.total_weight,
            reach_s=self._arrivals.reach_s,
            runtime=self._runtime,
        )

    def _awaits_member(self, meeting: Meeting) -> bool:
        """Return whether to meet again because a member of the last round was displaced by a request in its name.

        The displaced cell requests again as soon as it sees that. The others wait for it as long as for a late cell.
        """
        if self._members and {*self._members} & {*meeting.unproven, *meeting.refused}:
            if self._spoofed_since is None:
                self._spoofed_since = time.monotonic()
            return time.monotonic() < self._spoofed_since + CELL_JOIN_TIMEOUT_S
        self._spoofed_since = None
        return False

    def _warn_of_strangers(self, meeting: Meeting) -> None:
        for error in meeting.unread:
            self._warn(f"{error}; it is left out")
        for life, why in meeting.refused.items():
            self._warn(f"{name_cell(life)} {why}; it is left out")
        for life in meeting.unproven:
            self._warn(f"{name_cell(life)} does not know this run's token (XFFL_TOKEN), and is left out")

    def _warn_of(self, epoch: Epoch) -> None:
        for stranger in epoch.strangers:
            self._warn(f"cell {stranger.cell} has another number of cells, or replica size, and is left out")
        if epoch.base is None and not epoch.refusal and self.cell == epoch.first:
            assert self._journal is not None, "the leader has it"
            rounds = self._journal.history.until(epoch.number - 1).rounds()
            if next(rounds, None) is not None or any(member.restarts for member in epoch.members):
                self._warn("no cell holds an agreed model; the run begins from round 1")
        if not epoch.refusal:
            self._tell_runtimes(epoch)

    def _tell_runtimes(self, epoch: Epoch) -> None:
        """Print the cells' runtimes if they differ, and again when a cell comes with a new one."""
        before = {*self._known.values()}
        self._known |= {member.cell: member.runtime for member in epoch.members}
        if self.cell == epoch.cells[0] and not before.issuperset(self._known.values()):
            groups = group_by_runtime(sorted(self._known.items()))
            tell_runtimes([(cells_text(cells), runtime) for runtime, cells in groups.items()])

    def _warn(self, text: str) -> None:
        """Print a warning, once."""
        if text not in self._warned:
            self._warned.add(text)
            print(f"xffl: {text}", file=sys.stderr, flush=True)

    def _say(self, text: str) -> None:
        """Print why this cell waits, unless it is the reason printed last."""
        if text != self._said:
            self._said = text
            print(f"xffl: cell {self.cell} waits: {text}", file=sys.stderr, flush=True)

    def enter(self, epoch: Epoch) -> Place:
        """Join the ranks of an epoch, in the group of the last one or a new one; RuntimeError if a rank is lost."""
        sizes = tuple(member.ranks for member in epoch.members)
        topology = Topology(sum(sizes), sizes, self._state.topology.replica_size, self._state.topology.cell_shape)
        first = -topology.offsets[epoch.index_of(self.cell)]
        self._said = ""
        self._addresses = {member.cell: member.address for member in epoch.members}
        self._reaches = {member.cell: member.reach_s for member in epoch.members}
        self._gone.difference_update(epoch.cells)
        if epoch.lives != self._members:
            self._members = epoch.lives
            self._failures = 0
        self._epoch = epoch
        if epoch.keeps_group and self._group is not None:
            return Place(topology, first, self._group, is_new=False)
        self._drop_behind()
        lost = [self._lost_member(epoch) if self._lighthouse is not None else ""]
        dist.broadcast_object_list(lost, src=0)
        if lost[0]:
            raise RuntimeError(lost[0])
        address = epoch.members[epoch.index_of(epoch.first)].address
        if self._store is not None and epoch.first == self.cell:
            self._hosted.append((epoch.group, topology.world_size))
        self._await_ranks(epoch, address, topology.world_size)
        kind = FaultyGroup if is_planned() else CrossWorldGroup
        self._group = kind(
            address=address,
            name=epoch.group,
            rank=dist.get_rank() - first,
            size=topology.world_size,
            first=first,
            connect_s=CONNECT_S,
            timeout_s=self._message_s,
        )
        # Somebody may have copied a record at the lighthouse and sent it again in place of a newer one.
        if unproven := self._group.unproven(self._token, CONNECT_S, epoch.digest):
            cells = sorted({epoch.cells[topology.cell_of(rank)] for rank in unproven})
            raise RuntimeError(
                f"who has come as {cells_text(cells)} does not know this run's token, or has heard other things at the "
                "meeting"
            )
        self._group_name = epoch.group
        self._tidy_store(epoch.group)
        return Place(topology, first, self._group, is_new=True)

    def _await_ranks(self, epoch: Epoch, address: str, size: int) -> None:
        """Wait at the store where an epoch's ranks connect until all are there; RuntimeError if a member is lost."""
        inject("enter")
        try:
            store = PrefixStore(epoch.group, connect_store(address, CONNECT_S))
        except StoreGone as gone:
            raise RuntimeError(f"the cell whose ranks others meet was lost: {gone}") from gone
        find_lost = None if self._lighthouse is None else partial(self._lost_member, epoch)
        await_ranks(store, size, within_s=CONNECT_S, find_lost=find_lost)

    def _tidy_store(self, group: str) -> None:
        """Delete what the ranks of earlier epochs have left in this cell's store, where it has one."""
        if self._store is None:
            return
        earlier = [hosted for hosted in self._hosted if hosted[0] != group]
        # A rank that comes too late for the last one may still write.
        self._hosted = [hosted for hosted in self._hosted if hosted in earlier[-1:] or hosted[0] == group]
        delete_keys_of_groups(self._store, earlier, [hosted for hosted in self._hosted if hosted[0] == group])

    def _lost_member(self, epoch: Epoch) -> str:
        """Connect to the stores of all members, and return in words which one is lost.

        A cell that dies while it waits for a meeting is still a member if its last heartbeat was within two seconds.
        Without this check the others would wait :data:`CONNECT_S` for it.
        """
        for member in epoch.members:
            # Other errors do not count: the ranks may reach each other by another route, or notice that they do not.
            if isinstance(knock(member.address), ConnectionRefusedError):
                return f"cell {member.cell} was lost after it had met: nothing listens at {member.address}"
        return ""

    @property
    def has_group(self) -> bool:
        """Whether there is still a group with the other cells of the last epoch."""
        return self._group is not None

    @property
    def publishes(self) -> bool:
        """Whether this rank publishes the record of the round: the leader of the lowest cell does."""
        return self._journal is not None and self._epoch is not None and self.cell == self._epoch.cells[0]

    def publish(self, weights: tuple[float, ...]) -> bool:
        """Publish the record of the round that all ranks have voted for; local, on the rank that publishes.

        :param weights: What each cell of the epoch contributes.
        :return: Whether it stands, and not another one.
        :raises JournalUnreachable: if that is not known.
        """
        assert self._journal is not None and self._epoch is not None, "asked of the rank that publishes"
        attempt = self._epoch.attempt(weights)
        inject("publish")
        try:
            standing = self._journal.publish(attempt)
        except JournalUnreachable:
            self._lacks_journal = True
            raise
        inject("published")
        return standing.id == attempt.id

    def end_doubt(self, is_stopping: Callable[[], bool] | None = None) -> Fate:
        """End this cell's doubt about a round by what stands in the journal.

        The record may still come: its publisher may be slow. After a while the cell gives the number up.

        :param is_stopping: Called on the cell's first rank while the journal cannot be reached: whether the cell is to
            stop. The doubt then stays.
        :return: What becomes of the steps that the cell has made.
        :raises RoundError: if the journal does not answer in time.
        :raises CheckpointError: if it holds something else than records of this run.
        :raises ConfigError: if its service refuses to answer.
        :raises MeetingLeft: if the cell is to stop.
        """
        self._heed(is_stopping)
        attempt = self.holding.doubt
        assert attempt is not None, "asked for where there is one"
        begun = time.monotonic()
        while True:
            answer: list[Record | XfflError | MeetingLeft | None] = [None]
            if self._journal is not None:
                waited_s = time.monotonic() - begun
                try:
                    answer[0] = self._journal.ask_for(attempt, waited_s)
                except JournalUnreachable as error:
                    self._say(str(error))
                    if is_stopping is not None and is_stopping():
                        answer[0] = MeetingLeft()
                    elif waited_s > self._parameters.meeting_timeout_s:
                        answer[0] = error
                except XfflError as error:  # the journal is damaged, or another one: the other ranks wait for this
                    answer[0] = error
                if answer[0] is None:
                    time.sleep(ASK_AGAIN_S)
            dist.broadcast_object_list(answer, src=0)
            [standing] = answer
            if isinstance(standing, XfflError | MeetingLeft):
                raise standing
            if standing is not None:
                fate = self.holding.settle(standing)
                if isinstance(standing, RoundRecord) and fate is not Fate.PUT_BACK:
                    self.record = standing
                return fate

    def find_given(self, epoch: Epoch) -> list[RoundRecord]:
        """Return the rounds to which this cell has given something, of those between its model and that of an epoch.

        An earlier start of its job was in them, and is lost.
        """
        base = epoch.base
        held = self.holding.model
        if base is None or base.model == held:
            return []
        given: list[list[RoundRecord]] = [[]]
        if self._journal is not None:
            behind = self._journal.history.rounds_behind(base, held)
            given[0] = [record for record in behind if record.weight_of(self.cell) > 0]
        dist.broadcast_object_list(given, src=0)
        return given[0]

    def is_likely_behind(self) -> bool:
        """Tell whether the journal, as far as it was read, has a newer round than that whose model this cell holds."""
        is_behind = [False]
        if self._journal is not None:
            newest = next(self._journal.history.rounds(), None)
            is_behind[0] = newest is not None and newest.model != self.holding.model
        dist.broadcast_object_list(is_behind, src=0)
        return is_behind[0]

    def drop_doubt(self) -> None:
        """Forget a doubt, because other weights are loaded; local, on all ranks."""
        self.holding.doubt = None

    def agree_on_end(
        self, end: RoundEnd, epoch: Epoch, weights: Sequence[float], *, leave: Callable[[], None] | None = None
    ) -> tuple[RoundEnd, Fate]:
        """Agree in the cell on how a round ended, and note what the cell holds now.

        A rank that committed the round knows that its record stands. If a rank had not voted to commit, then nobody
        published it. If all ranks of the cell are in doubt, :meth:`end_doubt` asks the journal. If some ranks could not
        enter the epoch, the cell has to end. If none could, then the reason is the same for all of them, and the round
        counts as refused.

        :param end: How it ended on this rank.
        :param epoch: The epoch.
        :param weights: What each cell of the epoch contributes, if this rank has voted to commit.
        :param leave: Called, if the rank has failed, where the others do not come: they may wait for it in the round.
        :return: How it ended in the cell, and what becomes of the steps that the cell has made.
        """
        fate = Fate.PUT_BACK
        ends = torch.tensor([end, -end], dtype=torch.int64, device=control_device())
        comparing = dist.all_reduce(ends, op=dist.ReduceOp.MAX, async_op=True)
        assert comparing is not None, "the rank is in its own world"
        if end is RoundEnd.FAILED:
            self._poison_if_alone(comparing, leave)
        comparing.wait()
        most, least = RoundEnd(int(ends[0])), RoundEnd(-int(ends[1]))
        if most is RoundEnd.FAILED:
            most = RoundEnd.REFUSED
        elif least is RoundEnd.FAILED and most is not RoundEnd.TAKEN:
            most = RoundEnd.FAILED
        elif most is RoundEnd.TAKEN:
            if least < RoundEnd.IN_DOUBT:
                raise RoundError(
                    f"the round of epoch {epoch.group} was taken, but a rank of cell {self.cell} could not write it; "
                    "start this cell again"
                )
            self.record = epoch.attempt(weights)
            fate = self.holding.take(self.record)
            self._failures = 0
            self._gone.clear()
        elif least is RoundEnd.IN_DOUBT:
            most = RoundEnd.IN_DOUBT
            self.holding.say_yes(epoch.attempt(weights))
        else:
            most = RoundEnd.REFUSED if most is RoundEnd.REFUSED else RoundEnd.BROKEN
        if least < RoundEnd.TAKEN and (most is not RoundEnd.REFUSED):
            self.drop()
        if most in (RoundEnd.BROKEN, RoundEnd.IN_DOUBT):
            self._failures += 1
            if self._failures >= MOST_TRIES:
                raise RoundError(
                    f"{cells_text(epoch.cells)} met {self._failures} times and could not reach each other "
                    f"({', '.join(member.address for member in epoch.members)}); see that these addresses are "
                    "reached from all of them (XFFL_IFNAME)"
                )
        return most, fate

    def _poison_if_alone(self, comparing: dist.Work, leave: Callable[[], None] | None) -> None:
        """Close this rank's connections if the other ranks of its cell do not come: they wait for it in the epoch.

        Not before, because an error that all ranks of the epoch hear of may still be on its way to some of them.
        """
        deadline = time.monotonic() + ALONE_S
        while not comparing.is_completed():
            if time.monotonic() > deadline:
                self.poison()
                if leave is not None:
                    leave()
                return
            time.sleep(SOON_S)

    def limit_messages(self, seconds: float, quick_s: float) -> None:
        """Set the timeouts of messages, and of short ones such as votes, in this epoch and later ones; local."""
        self._message_s = seconds
        if self._group is not None:
            self._group.timeout_s = seconds
            self._group.quick_timeout_s = quick_s

    def poison(self) -> None:
        """Close this rank's connections in the epoch's group, so that all others notice at once; local."""
        if self._group is not None:
            self._group.poison()

    def drop(self) -> None:
        """Close the group without waiting for other ranks; local."""
        if self._group is not None:
            self._group.close()
        self._group = None
        self._group_name = ""

    def _drop_behind(self) -> None:
        """Close the group while this rank goes on; local. gloo takes up to 10 ms for each connection."""
        self._await_closed()
        if self._group is not None:
            # Not a daemon: the process would abort if the interpreter ended while the thread is inside gloo.
            self._closing = threading.Thread(target=self._group.close, name="xffl-closing", daemon=False)
            self._closing.start()
        self._group = None
        self._group_name = ""

    def _await_closed(self) -> None:
        """Wait until the group of the epoch before is closed; local."""
        if self._closing is not None:
            self._closing.join()
        self._closing = None

    def leave(self) -> None:
        """Leave the other cells; local."""
        self.drop()
        self._await_closed()
        self._store = None  # who still looks for this cell sees at once that it has left
        if self._lighthouse is not None:
            self._lighthouse.leave()
