"""Federation of a cell that is a world of its own: its meetings with other cells, and the group of all their ranks."""

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
from xffl.distributed.consistency import (
    compute_device,
    control_device,
    own_runtime,
    run_on_all_ranks,
    tell_runtimes,
)
from xffl.distributed.cross_world import CrossWorldGroup
from xffl.distributed.distributed_state import DistributedState
from xffl.distributed.stores import serve_store
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
"""How often the leader tells the ranks of its cell that it still waits, so that none of them runs out of time."""
FILE_S = 0.5
"""Seconds between two looks for the file that names the lighthouse."""
CONNECT_S = 10.0
"""How long the ranks of an epoch wait for each other to connect: all of them have just met."""
DOUBLE_S = 30.0
"""How long a job waits for another one with the same cell to end: one that was just stopped may need its grace time."""
MOST_TRIES = 5
"""Rounds that break, one behind the other, with the same members: they cannot reach each other then."""


class RoundEnd(IntEnum):
    """How a round ended on one rank; what the ranks of a cell make of it together is :meth:`agree_on_end`'s."""

    REFUSED = 0  # by a reason that all have been told; it is not repeated
    BROKEN = 1  # a rank was lost before this one had said yes, or another one said no since it had lost one
    IN_DOUBT = 2  # after its yes
    TAKEN = 3


@dataclass(frozen=True)
class Place:
    """Where a rank stands among those of an epoch."""

    topology: Topology
    first: int  # what adds up with a rank of the epoch to one of this world
    group: CrossWorldGroup
    is_new: bool  # the group was made for this epoch


class ElasticFederation:
    """What one rank of a cell knows of the other cells. All methods but :meth:`poison` are collective over the cell.

    :param state: The state of this cell's world, which was joined with ``elastic``.
    :raises ConfigError: if torchft is not installed; on all ranks.
    """

    def __init__(self, state: DistributedState) -> None:
        asked, lone = state.elastic, state.lone_cell
        if asked is None or lone is None:
            raise StateError("this world is no cell of an elastic federation; join it with xffl.session(elastic=...)")
        self.cell, sizes = lone
        self.cells = len(sizes)
        self.standing = Standing()
        self._state, self._asked = state, asked
        self._group: CrossWorldGroup | None = None
        self._group_name = ""
        self._members: tuple[str, ...] = ()
        self._addresses: dict[int, str] = {}  # of the stores of the cells that met last
        self._vote: Path | None = None
        self._inherited: tuple[str, tuple[str, ...]] = ("", ())  # a lineage, and earlier lives that ended with it
        self._may_have_agreed = False  # this life has entered a round of which it does not know the end
        self._message_s = asked.message_timeout_s
        self._failures = 0
        self._said = ""
        self._warned: set[str] = set()
        self._doubled_since: float | None = None
        self._unlike_since: float | None = None
        """Since when all other cells are known by another token."""
        self._spoofed_since: float | None = None
        """Since when somebody else speaks at the lighthouse in the name of a cell of the last round."""
        self._lighthouse: Lighthouse | None = None
        self._lives = lives_of_run()
        if asked.lighthouse.startswith("file:"):
            self._await_lighthouse()
        self._runtime = own_runtime(compute_device(state))
        self._known: dict[int, Runtime] = {}  # what the cells run that this one has met
        life = [f"{self.cell}.{secrets.token_hex(6)}"]
        with run_on_all_ranks("tokens and lighthouses"):
            self._token = token_of()
            if state.rank == 0:
                host = bind_address(asked.lighthouse)
                self._store = serve_store(host, 0, None, timedelta(seconds=CONNECT_S), is_local=False)
                self._store.set(PROOF_KEY, prove_token(self._token, life[0]))  # for xffl doctor
                self._address = f"{host}:{self._store.port}"
                self._lighthouse = Lighthouse(asked.lighthouse, life[0], self._address, self._token)
        dist.broadcast_object_list(life, src=0)
        self.life = life[0]

    def _await_lighthouse(self) -> None:
        """Wait for the file that names the lighthouse; the leader tells the ranks of its cell that it waits."""
        deadline = time.monotonic() + self._asked.meeting_timeout_s
        while True:
            told: list[bool | LaunchError] = [False]
            if self._state.rank == 0:
                try:
                    told[0] = bool(resolve_lighthouse(self._asked.lighthouse))
                except LaunchError as error:
                    self._say(str(error))
                    time.sleep(FILE_S)
                    if time.monotonic() > deadline:
                        told[0] = error
            dist.broadcast_object_list(told, src=0)
            if isinstance(told[0], LaunchError):
                raise told[0]
            if told[0]:
                return

    def meet(
        self, *, is_finished: bool = False, told: str = "", is_stopping: Callable[[], bool] | None = None
    ) -> Epoch:
        """Wait until cells have met that may make a round, and end this cell's doubt by what they have told.

        :param is_finished: Whether this cell leaves after the round.
        :param told: What all others learn of this cell, as JSON.
        :param is_stopping: Asked on the cell's first rank whether the cell is to stop; it waits for nobody then, unless
            it is in doubt.
        :return: The epoch.
        :raises RoundError: if no round came about in time.
        :raises MeetingLeft: if the cell is to stop.
        """
        begun = time.monotonic()
        deadline = begun + self._asked.meeting_timeout_s
        looks = 0
        while True:
            epoch = self._ask(looks, deadline, is_stopping, is_finished=is_finished, told=told)
            if epoch is not None and not epoch.refusal:
                return epoch
            if epoch is not None and epoch.looks_again:
                looks += not self._is_late(epoch.missing) or time.monotonic() > begun + CELL_JOIN_TIMEOUT_S

    def _ask(self, looks: int, deadline: float, is_stopping: Callable[[], bool] | None, **own: Any) -> Epoch | None:
        """Have the leader ask, and tell its answer to all ranks of the cell; ``None`` where there is none yet."""
        told: list[Epoch | RoundError | ConfigError | MeetingLeft | None] = [None]

        def is_left() -> bool:
            return is_stopping is not None and self.standing.doubt is None and is_stopping()

        if self._lighthouse is not None:
            try:
                within_s = max(0.1, min(SLICE_S, deadline - time.monotonic()))
                told[0] = epoch = self._ask_lighthouse(self._lighthouse, looks, within_s, is_left, **own)
                if epoch is not None and epoch.refusal:
                    self._say(epoch.refusal)
                    is_new_lighthouse = epoch.looks_again and not epoch.has_same_lighthouse
                    time.sleep(CELL_HEARTBEAT_TIMEOUT_S if is_new_lighthouse else 0.5)
            except LaunchError as error:
                self._say(str(error))
            except ConfigError as error:
                told[0] = error
            is_waiting = told[0] is None or (isinstance(told[0], Epoch) and bool(told[0].refusal))
            if is_waiting and is_left():
                told[0] = MeetingLeft()
            elif is_waiting and time.monotonic() > deadline:
                told[0] = RoundError(
                    f"cell {self.cell} found no cells for a round within {self._asked.meeting_timeout_s:g} s: "
                    f"{self._said or 'cells that live have not come to it'}"
                )
        dist.broadcast_object_list(told, src=0)
        [answer] = told
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _ask_lighthouse(
        self, lighthouse: Lighthouse, looks: int, within_s: float, is_left: Callable[[], bool], **own: Any
    ) -> Epoch | None:
        is_agreed = self.standing.version.is_agreed
        ended = {} if self._lives is None else self._lives.ended_cells()
        meeting = lighthouse.meet(replace(self._record(looks, ended), **own), within_s, is_left)
        if meeting is None:
            return None
        # Those that make rounds already go on; what comes to them, or would begin a run with others, ends.
        if meeting.unread and not is_agreed:
            raise meeting.unread[0]
        self._check_token(meeting)
        self._warn_of_strangers(meeting)
        if self._awaits_member(meeting):
            return None
        epoch = form_epoch(meeting.records, meeting.created, meeting.number, least=self._asked.least_cells)
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
        """Raise ConfigError where a cell that holds nothing yet has met all others for a while, by another token each.

        Where others may still come, who has another token than they is not known yet. Who just looks in ends no run.
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
        """Raise ConfigError where another job has been the same cell for a while, and is the one that goes on."""
        own = [member for member in epoch.members if member.cell == self.cell]
        stays = max(own, key=lambda one: (one.life in epoch.base.voters, one.restarts, one.life), default=None)
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
        """Return what this cell tells the others; ``ended`` are the cells that are known not to start again."""
        standing, topology = self.standing, self._state.topology
        return CellRecord(
            cell=self.cell,
            cells=self.cells,
            life=self.life,
            restarts=self._asked.restarts,
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
        """Return whether a cell of the last round is to ask again: somebody else has just spoken in its name.

        It does so at once when it sees that. For as long as a cell that is late is waited for, the others do, too.
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
        """Write what the cells run where that differs, once, and again where one comes with what nobody ran before."""
        before = {*self._known.values()}
        self._known |= {member.cell: member.runtime for member in epoch.members}
        if self.cell == epoch.cells[0] and not before.issuperset(self._known.values()):
            groups = group_by_runtime(sorted(self._known.items()))
            tell_runtimes([(cells_text(cells), runtime) for runtime, cells in groups.items()])

    def _warn(self, text: str) -> None:
        """Write once what this cell has found."""
        if text not in self._warned:
            self._warned.add(text)
            print(f"xffl: {text}", file=sys.stderr, flush=True)

    def _say(self, text: str) -> None:
        """Write once why this cell waits."""
        if text != self._said:
            self._said = text
            print(f"xffl: cell {self.cell} waits: {text}", file=sys.stderr, flush=True)

    def enter(self, epoch: Epoch) -> Place:
        """Join the ranks of an epoch, in the group that they have or a new one; RuntimeError where one is lost."""
        sizes = tuple(member.ranks for member in epoch.members)
        topology = Topology(sum(sizes), sizes, self._state.topology.replica_size, self._state.topology.cell_shape)
        first = -topology.offsets[epoch.index_of(self.cell)]
        self._said = ""
        self._addresses = {member.cell: member.address for member in epoch.members}
        if epoch.lives != self._members:
            self._members, self._failures = epoch.lives, 0
        self._may_have_agreed = True
        if epoch.keeps_group and self._group is not None:
            return Place(topology, first, self._group, False)
        self.drop()
        if self._lives is not None and self._lighthouse is not None:
            self._lives.begin(self.life)
        lost = [self._lost_member(epoch) if self._lighthouse is not None else ""]
        dist.broadcast_object_list(lost, src=0)
        if lost[0]:
            raise RuntimeError(lost[0])
        self._group = CrossWorldGroup(
            epoch.members[epoch.index_of(epoch.first)].address,
            epoch.group,
            dist.get_rank() - first,
            topology.world_size,
            first=first,
            connect_s=CONNECT_S,
            timeout_s=self._message_s,
        )
        # A record may have been read at the lighthouse, and told again by somebody else, in place of a newer one.
        if unproven := self._group.unproven(self._token, CONNECT_S, epoch.digest):
            cells = sorted({epoch.cells[topology.cell_of(rank)] for rank in unproven})
            raise RuntimeError(
                f"who has come as {cells_text(cells)} does not know this run's token, or has heard other things at the "
                "meeting"
            )
        self._group_name = epoch.group
        return Place(topology, first, self._group, True)

    def _lost_member(self, epoch: Epoch) -> str:
        """Knock at the stores of the other cells, and return what is lost.

        A cell that is lost while it waits for a meeting is still a member of it, if its last heartbeat was within two
        seconds. Without this the others would wait :data:`CONNECT_S` for it.
        """
        for member in epoch.members:
            # What else fails: ranks may reach each other on other ways, or find out that they do not.
            if isinstance(_knock(member.address), ConnectionRefusedError):
                return f"cell {member.cell} was lost after it had met: nothing listens at {member.address}"
        return ""

    def _is_late(self, missing: Collection[int]) -> bool:
        """Return whether one of the cells that are missing still answers as in the last round; on the leader."""
        places = [address for cell, address in self._addresses.items() if cell in missing]
        return self._lighthouse is not None and any(_knock(place) is None for place in places)

    def agree_on_end(self, end: RoundEnd, epoch: Epoch) -> RoundEnd:
        """Draw the cell's conclusion of how a round ended on its ranks, and note it in the standing.

        A rank that took the round knows that all ranks had said yes; of one that had not said yes all know that nobody
        took it. Where all are in doubt the next meeting tells.
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
        """Let messages of this epoch and later ones take so many seconds at most, and where they are quick; local."""
        self._message_s = seconds
        if self._group is not None:
            self._group.timeout_s, self._group.quick_timeout_s = seconds, quick_s

    def poison(self) -> None:
        """Let all others of the epoch know at once that this rank goes no further in it; local."""
        if self._group is not None:
            self._group.poison()

    def drop(self) -> None:
        """Let go of the group; no other rank is waited for."""
        self._group, self._group_name = None, ""

    def leave(self) -> None:
        """Leave the other cells; local."""
        self.drop()
        if self._lighthouse is not None:
            self._lighthouse.leave()
            self._leave_vote()

    def inherit_vote(self, file: Path) -> None:
        """Take what the life of this cell before has left in a file, and leave it there for the next one; local.

        Where a life ends between rounds it has agreed on nothing behind its version, and the next life of its cell may
        vote in its place: else the others would wait for who may have gone on with it. A vote is read once.
        """
        if self._lighthouse is None:
            return
        self._vote = file
        if not os.path.lexists(file):
            return
        try:
            self._inherited = read_vote(file)
            remove_file(file)
        except (OSError, ValueError, StateError) as error:  # without a vote the others are waited for
            LOG.warning("%s cannot be used (%s): this cell votes for itself alone", file, error)

    def _leave_vote(self) -> None:
        """Write this life's vote, and those that it has inherited and not used, for the next life of its cell."""
        version, latest = self.standing.version, self.standing.latest
        if self._vote is None or not version.is_agreed or self._may_have_agreed or latest not in (None, version):
            return
        lives = [life for life in (self.life, *self._inherited_votes()) if life in version.voters]
        if not lives:
            return
        with suppress(OSError):  # then the others wait for who may hold a later model
            write_sealed_json(self._vote, {"lineage": version.lineage, "lives": lives})


def read_vote(file: Path) -> tuple[str, tuple[str, ...]]:
    """Return the lineage and the lives that a vote is of, as :meth:`ElasticFederation.leave` writes it; local.

    Raises what :func:`~xffl.files.read_sealed_json` does, and StateError for what is no vote.
    """
    told = Fields(read_sealed_json(file), str(file), error=StateError)
    return told.text("lineage", 200), tuple(told.list_of("lives", MOST_LIVES, read_life))


def _knock(place: str) -> OSError | None:
    """Return what keeps this host from the store at HOST:PORT, if anything does."""
    host, _, port = place.rpartition(":")
    try:
        socket.create_connection((host, int(port)), CELL_HEARTBEAT_TIMEOUT_S).close()
    except OSError as error:
        return error
    return None
