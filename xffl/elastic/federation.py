"""Elastic federation, as a rank of one cell sees it: meetings with the other cells, and the group of all their ranks.

Each cell is a job, and so a world, of its own. Before a round the first rank of the cell (its leader) meets the leaders
of the other cells at the lighthouse (:meth:`ElasticFederation.meet`); then all ranks of the cells that met join one
group (:meth:`ElasticFederation.enter`), make the round, and agree on its end (:meth:`ElasticFederation.agree_on_end`).
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from xffl.cluster.launch.failure import lives_of_run
from xffl.cluster.lighthouse_address import bind_address, resolve_lighthouse
from xffl.cluster.network import CELL_HEARTBEAT_TIMEOUT_S, CELL_JOIN_TIMEOUT_S
from xffl.cluster.run_token import PROOF_KEY, prove_token, token_of
from xffl.cluster.runtimes import Runtime, group_by_runtime
from xffl.distributed.consistency import compute_device, control_device, own_runtime, run_on_all_ranks
from xffl.distributed.cross_world import CrossWorldGroup
from xffl.distributed.differences import tell_runtimes
from xffl.distributed.distributed_state import DistributedState
from xffl.distributed.failures.faults import is_planned
from xffl.distributed.failures.faulty_group import FaultyGroup
from xffl.distributed.startup.stores import serve_store
from xffl.elastic.lighthouse import Lighthouse, Meeting
from xffl.elastic.roster import (
    MOST_LIVES,
    CellRecord,
    Epoch,
    Standing,
    cell_of,
    cells_text,
    check_alike,
    form_epoch,
    is_life,
    name_cell,
    read_life,
)
from xffl.errors import ConfigError, LaunchError, MeetingLeft, RoundError, StateError
from xffl.files import read_sealed_json, remove_file, write_sealed_json
from xffl.reading import Fields
from xffl.topology import Topology

__all__ = ["ElasticFederation", "RoundEnd"]

LOG = logging.getLogger(__name__)

SLICE_S = 10.0
"""How often a waiting leader sends a message to the ranks of its cell, so that their collective does not time out."""
FILE_S = 0.5
"""Seconds between two reads of the file that names the lighthouse."""
CONNECT_S = 10.0
"""Timeout of the ranks of an epoch for connecting to each other; short, because all have just met."""
DOUBLE_S = 30.0
"""How long a job waits for another job of the same cell to end, which may still be in its grace time."""
MOST_TRIES = 5
"""After so many broken rounds in a row with the same members, the cells count as unable to reach each other."""


class RoundEnd(IntEnum):
    """How a round ended on one rank. :meth:`ElasticFederation.agree_on_end` combines the ends of a cell's ranks."""

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
        self.standing = Standing()
        self._state = state
        self._parameters = parameters
        self._group: CrossWorldGroup | None = None
        self._group_name = ""
        self._members: tuple[str, ...] = ()
        """Lives of the members of the last epoch"""
        self._addresses: dict[int, str] = {}
        """By cell, the stores of the members of the last epoch"""
        self._vote: Path | None = None
        """File that bequeaths this life's vote to the next one"""
        self._inherited: tuple[str, tuple[str, ...]] = ("", ())
        """A lineage, and the earlier lives that ended with it and bequeathed their votes"""
        self._may_have_agreed = False
        """Whether this life has entered a round whose end it does not know"""
        self._message_s = parameters.message_timeout_s
        self._failures = 0
        self._said = ""
        self._warned: set[str] = set()
        self._doubled_since: float | None = None
        self._unlike_since: float | None = None
        """Since when all other cells have another token"""
        self._spoofed_since: float | None = None
        """Since when somebody else sends requests in the name of a cell of the last round"""
        self._lighthouse: Lighthouse | None = None
        self._lives = lives_of_run()
        if parameters.lighthouse.startswith("file:"):
            self._await_lighthouse()
        self._runtime = own_runtime(compute_device(state))
        self._known: dict[int, Runtime] = {}
        """By cell, the runtimes of the cells that this one has met"""
        life = [f"{self.cell}.{secrets.token_hex(6)}"]
        with run_on_all_ranks("tokens and lighthouses"):
            self._token = token_of()
            if state.rank == 0:
                host = bind_address(parameters.lighthouse)
                self._store = serve_store(
                    host=host,
                    port=0,
                    world_size=None,
                    timeout=timedelta(seconds=CONNECT_S),
                    is_local=False,
                )
                self._store.set(PROOF_KEY, prove_token(self._token, life[0]))  # for xffl doctor
                self._address = f"{host}:{self._store.port}"
                self._lighthouse = Lighthouse(parameters.lighthouse, life[0], self._address, self._token)
        dist.broadcast_object_list(life, src=0)
        self.life = life[0]

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
        :param is_stopping: Called on the cell's first rank: whether the cell is to stop. It then stops waiting, unless
            it is in doubt.
        :return: The epoch, whose records end this cell's doubt.
        :raises RoundError: if no such meeting came about in time.
        :raises MeetingLeft: if the cell is to stop.
        """
        begun = time.monotonic()
        deadline = begun + self._parameters.meeting_timeout_s
        looks = 0
        while True:
            epoch = self._ask(looks, deadline, is_stopping, is_finished=is_finished, told=told)
            if epoch is not None and not epoch.refusal:
                return epoch
            if epoch is not None and epoch.looks_again:
                looks += not self._is_late(epoch.missing) or time.monotonic() > begun + CELL_JOIN_TIMEOUT_S

    def _ask(self, looks: int, deadline: float, is_stopping: Callable[[], bool] | None, **fields: Any) -> Epoch | None:
        """Let the leader request a meeting, and broadcast its result; ``None`` if there is none yet."""
        result: list[Epoch | RoundError | ConfigError | MeetingLeft | None] = [None]

        def is_left() -> bool:
            return is_stopping is not None and self.standing.doubt is None and is_stopping()

        if self._lighthouse is not None:
            try:
                within_s = max(0.1, min(SLICE_S, deadline - time.monotonic()))
                epoch = self._ask_lighthouse(self._lighthouse, looks, within_s, is_left, **fields)
                result[0] = epoch
                if epoch is not None and epoch.refusal:
                    self._say(epoch.refusal)
                    is_new_lighthouse = epoch.looks_again and not epoch.has_same_lighthouse
                    time.sleep(CELL_HEARTBEAT_TIMEOUT_S if is_new_lighthouse else 0.5)
            except LaunchError as error:
                self._say(str(error))
            except ConfigError as error:
                result[0] = error
            is_waiting = result[0] is None or (isinstance(result[0], Epoch) and bool(result[0].refusal))
            if is_waiting and is_left():
                result[0] = MeetingLeft()
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

    def _ask_lighthouse(
        self, lighthouse: Lighthouse, looks: int, within_s: float, is_left: Callable[[], bool], **fields: Any
    ) -> Epoch | None:
        is_agreed = self.standing.version.is_agreed
        ended = {} if self._lives is None else self._lives.ended_cells()
        meeting = lighthouse.meet(replace(self._record(looks, ended), **fields), within_s, is_left)
        if meeting is None:
            return None
        # A cell that has made rounds continues without those of another version of xffl; one that has not ends here.
        if meeting.unread and not is_agreed:
            raise meeting.unread[0]
        self._check_token(meeting)
        self._warn_of_strangers(meeting)
        if self._awaits_member(meeting):
            return None
        epoch = form_epoch(
            meeting.records,
            created=meeting.created,
            number=meeting.number,
            least=self._parameters.least_cells,
        )
        if self.life not in epoch.lives:
            check_alike((*epoch.members, *epoch.strangers))
        self._check_double(epoch)
        finished = [cell for cell, code in ended.items() if code == 0]
        if finished and not epoch.base.is_agreed:
            raise ConfigError(
                f"cell {finished[0]} has finished the run, and no cell that is left holds its model: there is nothing "
                "to go on from; take the result from that cell"
            )
        self._warn_of(epoch)
        return epoch

    def _check_token(self, meeting: Meeting) -> None:
        """Raise ConfigError if all other cells have had another token for a while, and this one holds no version yet.

        While cells are missing it is not known which token is the run's. A stranger's single request ends no run.
        """
        others = [life for life in meeting.unproven if is_life(life, self.cells)]
        if len(meeting.records) > 1 or self.standing.version.is_agreed:
            self._unlike_since = None
        elif others and len({*map(cell_of, others)} - {self.cell}) >= self.cells - 1:
            if self._unlike_since is None:
                self._unlike_since = time.monotonic()
            elif time.monotonic() > self._unlike_since + DOUBLE_S:
                raise ConfigError(
                    f"{name_cell(others[0])} runs with another token than this cell {self.cell}; give all cells of a "
                    "run the same one (XFFL_TOKEN, or XFFL_TOKEN_FILE)"
                )

    def _check_double(self, epoch: Epoch) -> None:
        """Raise ConfigError if another job has been the same cell for a while, and takes precedence over this one."""
        same = [member for member in epoch.members if member.cell == self.cell]
        stays = max(
            same,
            key=lambda member: (member.life in epoch.base.voters, member.restarts, member.life),
            default=None,
        )
        if stays is None or stays.life == self.life:
            self._doubled_since = None
            return
        if self._doubled_since is None:
            self._doubled_since = time.monotonic()
        elif time.monotonic() > self._doubled_since + DOUBLE_S:
            raise ConfigError(
                f"another job is cell {self.cell} of this run already (its store is at {stays.address}); end that one, "
                "or give this one another number (--cell)"
            )

    def _record(self, looks: int, ended: Collection[int]) -> CellRecord:
        """Return this cell's record; ``ended`` are the cells that are known not to start again."""
        standing, topology = self.standing, self._state.topology
        return CellRecord(
            cell=self.cell,
            cells=self.cells,
            life=self.life,
            restarts=self._parameters.restarts,
            ranks=topology.world_size,
            replica_size=topology.replica_size,
            address=self._address,
            version=standing.version,
            doubt=standing.doubt,
            group=self._group_name,
            left=tuple(sorted({*standing.left, *ended})),
            inherited=self._inherited_votes(),
            looks=looks,
            living=None if self._lives is None else self._lives.living(),
            total_weight=standing.total_weight,
            runtime=self._runtime,
        )

    def _inherited_votes(self) -> tuple[str, ...]:
        lineage, lives = self._inherited
        return lives if lineage == self.standing.version.lineage else ()

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
        is_lost = not epoch.base.is_agreed and any(member.restarts for member in epoch.members)
        if is_lost and not epoch.refusal and self.cell == epoch.first:
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
        if epoch.lives != self._members:
            self._members = epoch.lives
            self._failures = 0
        self._may_have_agreed = True
        if epoch.keeps_group and self._group is not None:
            return Place(topology, first, self._group, is_new=False)
        self.drop()
        if self._lives is not None and self._lighthouse is not None:
            self._lives.begin(self.life)
        lost = [self._lost_member(epoch) if self._lighthouse is not None else ""]
        dist.broadcast_object_list(lost, src=0)
        if lost[0]:
            raise RuntimeError(lost[0])
        kind = FaultyGroup if is_planned() else CrossWorldGroup
        self._group = kind(
            address=epoch.members[epoch.index_of(epoch.first)].address,
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
        return Place(topology, first, self._group, is_new=True)

    def _lost_member(self, epoch: Epoch) -> str:
        """Connect to the stores of all members, and return in words which one is lost.

        A cell that dies while it waits for a meeting is still a member if its last heartbeat was within two seconds.
        Without this check the others would wait :data:`CONNECT_S` for it.
        """
        for member in epoch.members:
            # Other errors do not count: the ranks may reach each other by another route, or notice that they do not.
            if isinstance(_knock(member.address), ConnectionRefusedError):
                return f"cell {member.cell} was lost after it had met: nothing listens at {member.address}"
        return ""

    def _is_late(self, missing: Collection[int]) -> bool:
        """Return whether the store of a missing cell still answers where it was in the last round; on the leader."""
        places = [address for cell, address in self._addresses.items() if cell in missing]
        return self._lighthouse is not None and any(_knock(place) is None for place in places)

    def agree_on_end(self, end: RoundEnd, epoch: Epoch) -> RoundEnd:
        """Agree in the cell on how a round ended, and update the standing.

        A rank that committed the round knows that all ranks had voted for it. If a rank had not voted to commit, then
        nobody committed. If all ranks of the cell are in doubt, the next meeting decides.
        """
        ends = torch.tensor([end, -end], dtype=torch.int64, device=control_device())
        dist.all_reduce(ends, op=dist.ReduceOp.MAX)
        most, least = RoundEnd(int(ends[0])), RoundEnd(-int(ends[1]))
        if most is RoundEnd.TAKEN:
            if least < RoundEnd.IN_DOUBT:
                raise RoundError(
                    f"the round of epoch {epoch.group} was taken, but a rank of cell {self.cell} could not write it; "
                    "start this cell again"
                )
            self.standing.take(epoch)
            self._failures = 0
        elif least is RoundEnd.IN_DOUBT:
            most = RoundEnd.IN_DOUBT
            self.standing.suspect(epoch)
        else:
            most = RoundEnd.REFUSED if most is RoundEnd.REFUSED else RoundEnd.BROKEN
            self.standing.refuse()
        self._may_have_agreed = most is RoundEnd.IN_DOUBT
        if least < RoundEnd.TAKEN and (most is not RoundEnd.REFUSED):
            self.drop()
        if most in (RoundEnd.BROKEN, RoundEnd.IN_DOUBT):
            self._failures += 1
            if self._failures >= MOST_TRIES:
                raise RoundError(
                    f"cells {', '.join(map(str, epoch.cells))} met {self._failures} times and could not reach each "
                    f"other ({', '.join(member.address for member in epoch.members)}); see that these addresses are "
                    "reached from all of them (XFFL_IFNAME)"
                )
        return most

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
        """Release the group without waiting for other ranks; local."""
        self._group = None
        self._group_name = ""

    def leave(self) -> None:
        """Leave the other cells; local."""
        self.drop()
        if self._lighthouse is not None:
            self._lighthouse.leave()
            self._leave_vote()

    def inherit_vote(self, file: Path) -> None:
        """Read the vote that the previous life of this cell has bequeathed, and use the file for this life's; local.

        A life that ends between rounds has agreed on nothing after its version, so the next life of the cell may vote
        in its place. Otherwise the other cells would have to wait for the ended life. A vote is read once.

        :param file: The file of the vote.
        """
        if self._lighthouse is None:
            return
        self._vote = file
        if not os.path.lexists(file):
            return
        try:
            self._inherited = read_vote(file)
            remove_file(file)
        except (OSError, ValueError, StateError) as error:  # without the vote more cells may have to be waited for
            LOG.warning("%s cannot be used (%s): this cell votes for itself alone", file, error)

    def _leave_vote(self) -> None:
        """Write this life's vote, and inherited ones that still count, for the next life of its cell."""
        version, latest = self.standing.version, self.standing.latest
        if self._vote is None or not version.is_agreed or self._may_have_agreed or latest not in (None, version):
            return
        lives = [life for life in (self.life, *self._inherited_votes()) if life in version.voters]
        if not lives:
            return
        with suppress(OSError):  # without it the others wait for this cell, which may hold a later version
            write_sealed_json(self._vote, {"lineage": version.lineage, "lives": lives})


def read_vote(file: Path) -> tuple[str, tuple[str, ...]]:
    """Return the lineage and the lives of a vote that :meth:`ElasticFederation.leave` has written; local.

    Raises what :func:`~xffl.files.read_sealed_json` does, and StateError if the file holds no vote.
    """
    fields = Fields(read_sealed_json(file), str(file), error=StateError)
    return fields.text("lineage", 200), tuple(fields.list_of("lives", MOST_LIVES, read_life))


def _knock(place: str) -> OSError | None:
    """Try to connect to HOST:PORT; return the error, ``None`` if it succeeds."""
    host, _, port = place.rpartition(":")
    try:
        socket.create_connection((host, int(port)), CELL_HEARTBEAT_TIMEOUT_S).close()
    except OSError as error:
        return error
    return None
