"""Roster of an elastic federation: which cells may make the next round together, from which model, and who is behind.

Pure arithmetic on what the cells tell each other; the same on all of them, since all are told the same. The words:

version
    An agreed model, named by the round that made it and its lineage, a digest of all rounds before it. Two models of
    one version are equal to the bit.
epoch
    The cells that have met for a round. Those that hold another version than the one it goes on from are behind: they
    take the result over and contribute nothing.
voters
    The lives of the cells that have agreed on a version. The next one is made by more than half of them, by half with
    the lowest cell, by all of these cells in whatever life where one has been in all meetings since, or by all known
    cells: so no two parts of a federation go on from one version without each other's knowledge. Where each cell sees
    which lives of all cells have not ended (they are on one machine), those that live go on however few they are.
    A life that ends in order leaves its vote to the next life of its cell: it has agreed on nothing later.
doubt
    What a cell is in that has said yes to a round and could not learn whether all have. It holds both models: that of
    before, and what the round has made. Where a cell that was there has refused the round, nobody has taken it. Else
    all that are in doubt take it, since an absent cell may have.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from xffl.checks import shown
from xffl.cluster.runtimes import Runtime, format_refusal
from xffl.costs import EXCHANGE_FORMAT
from xffl.errors import ConfigError
from xffl.json_text import parse_json
from xffl.reading import Fields

__all__ = [
    "LONGEST_TOLD",
    "MOST_LIVES",
    "Attendance",
    "CellRecord",
    "Epoch",
    "Standing",
    "Version",
    "cell_of",
    "cells_text",
    "check_alike",
    "form_epoch",
    "is_life",
    "least_cells",
    "name_cell",
    "read_life",
]

LONGEST_TOLD = 1 << 18
"""Characters of what a cell's user has for the others, at most."""
_LONGEST_NAME = 300
_MOST_CELLS = 1 << 16
_MOST_RANKS = 1 << 24
MOST_LIVES = 1 << 16
"""Lives of a cell that a vote is inherited from, at most"""
_LATEST_NS = (1 << 63) - 1
_LIFE = re.compile(r"([0-9]{1,9})\.[0-9a-f]{1,64}")


@dataclass(frozen=True)
class Version:
    """An agreed model: what all cells that hold it call it."""

    round: int = 0  # agreed rounds that led to it
    created: int = 0  # when the epoch of its last round was formed, in nanoseconds, by the lighthouse's clock
    lineage: str = ""  # digest of all rounds that led to it; empty: no round was agreed yet, and the model is anybody's
    voters: tuple[str, ...] = ()  # the lives of the cells that have agreed on it

    @property
    def is_agreed(self) -> bool:
        """Whether cells have agreed on it, that is, whether there was a round."""
        return bool(self.lineage)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any], what: str = "the version", *, hint: str = "") -> Version:
        """Return the version that :func:`dataclasses.asdict` has made numbers and texts of.

        Whoever has written it: ConfigError where a value is not of its type, or beyond its limit.
        """
        return cls._read(Fields(plain, what, hint=hint))

    @classmethod
    def _read(cls, told: Fields) -> Version:
        return cls(
            round=told.integer("round"),
            created=told.integer("created", 0, _LATEST_NS),
            lineage=told.text("lineage", _LONGEST_NAME),
            voters=tuple(told.list_of("voters", _MOST_CELLS, read_life)),
        )


@dataclass(frozen=True)
class CellRecord:
    """What a cell tells the others when it meets them."""

    cell: int  # its number, the same in all of its lives
    cells: int  # how many cells are known in all
    life: str  # one start of its job; see :func:`cell_of`
    restarts: int = 0  # how often its job was started again before
    ranks: int = 1
    replica_size: int | None = None
    address: str = ""  # HOST:PORT of its store, where the ranks of an epoch may meet
    version: Version = Version()
    doubt: Version | None = None  # what it holds too, if the round in doubt was taken
    group: str = ""  # the name of the process group that it still has, whole
    left: tuple[int, ...] = ()  # cells that have finished and left
    inherited: tuple[str, ...] = ()  # lives of its cell that have ended with its version, and left it their votes
    serial: int = 0  # how many requests this life has made before: a record with a lower number is an older one
    is_finished: bool = False  # it leaves after the next round
    looks: int = 0  # how often it has asked since its last round and found somebody missing
    same_lighthouse: bool = False  # the lighthouse is the one that formed the epoch of its version, and of its doubt
    met: int = 0  # the number of the last meeting that it was in, where it is the same lighthouse
    has_met_all: bool = False  # it was in every meeting from that of its version, and of its doubt, to ``met``
    living: tuple[str, ...] | None = None  # all lives that have entered an epoch and not ended; None: nobody knows
    told: str = ""  # what its user has for the others, as JSON: a text, since numbers may lose bits on the way
    total_weight: float = 0.0  # of all cells, in all rounds that led to its version
    # The number of the format of all that it gives the others, this record too: its key is the same in all formats.
    format: int = EXCHANGE_FORMAT
    runtime: Runtime = field(default_factory=Runtime)  # what its first rank runs

    def to_plain(self) -> dict[str, Any]:
        """Return it as numbers and texts."""
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> CellRecord:
        """Return what :meth:`to_plain` has made numbers and texts of; ConfigError for what another xffl has told."""
        cell = shown(plain.get("cell", "?"))
        if (number := plain.get("format")) != EXCHANGE_FORMAT:
            runtime = plain.get("runtime")
            xffl = runtime.get("xffl") if isinstance(runtime, Mapping) else None
            theirs = f"{shown(number) if number else 'unknown'}{f' (xffl {xffl!s:.40})' if xffl else ''}"
            raise ConfigError(format_refusal(f"cell {cell}", theirs, "this cell"))
        told = Fields(plain, f"the record of cell {cell}", hint="run one version of xffl in all cells")
        told.refuse_others(*(one.name for one in fields(cls)))
        cells = told.integer("cells", 1, _MOST_CELLS)
        ranks = told.integer("ranks", 1, _MOST_RANKS)
        doubt = told.optional("doubt", Fields.mapping)
        record = cls(
            cell=told.integer("cell", 0, cells - 1),
            cells=cells,
            life=read_life(told, "life"),
            restarts=told.integer("restarts"),
            ranks=ranks,
            replica_size=told.optional("replica_size", Fields.integer, 1, ranks),
            address=told.text("address", _LONGEST_NAME),
            version=Version._read(told.mapping("version")),
            doubt=None if doubt is None else Version._read(doubt),
            group=told.text("group", _LONGEST_NAME),
            left=tuple(told.list_of("left", cells, Fields.integer, 0, cells - 1)),
            inherited=tuple(told.list_of("inherited", MOST_LIVES, read_life)),
            looks=told.integer("looks"),
            serial=told.integer("serial"),
            is_finished=told.boolean("is_finished"),
            same_lighthouse=told.boolean("same_lighthouse"),
            met=told.integer("met", 0, _LATEST_NS),
            has_met_all=told.boolean("has_met_all"),
            living=None if plain.get("living") is None else tuple(told.list_of("living", MOST_LIVES, read_life)),
            told=told.text("told", LONGEST_TOLD),
            total_weight=told.number("total_weight", 0),
            runtime=_read_runtime(told.mapping("runtime")),
        )
        if cell_of(record.life) != record.cell:
            told.fail(f"{told.place('life')} is {record.life}, one of cell {cell_of(record.life)}")
        record.told_values()
        return record

    def told_values(self) -> dict[str, Any]:
        """Return what its user has for the others."""
        try:
            values = parse_json(self.told, limit=LONGEST_TOLD) if self.told else {}
        except ValueError as error:
            raise ConfigError(f"cell {self.cell} has told what cannot be read: {error}") from error
        if not isinstance(values, dict):
            raise ConfigError(f"cell {self.cell} has told no mapping of names to values, but {shown(values)}")
        return values


def read_life(told: Fields, name: str) -> str:
    """Return the name of one start of a cell's job."""
    life = told.text(name, _LONGEST_NAME)
    if _LIFE.fullmatch(life) is None:
        told.fail(f"{told.place(name)} is no start of a cell's job: {shown(life)}")
    return life


def _read_runtime(told: Fields) -> Runtime:
    names = [one.name for one in fields(Runtime)]
    told.refuse_others(*names)
    return Runtime(**{name: told.text(name, _LONGEST_NAME) for name in names if name in told})


def cell_of(life: str) -> int:
    """Return the number of the cell that a life is one of: its text begins with it, ``2.8f0c``."""
    return int(life.partition(".")[0])


def is_life(life: str, cells: int) -> bool:
    """Tell whether a text names a start of one of so many cells."""
    return _LIFE.fullmatch(life) is not None and cell_of(life) < cells


def name_cell(life: str) -> str:
    """Return which cell a life says it is one of; it may be anybody's text."""
    found = _LIFE.fullmatch(life)
    return f"cell {found[1]}" if found is not None else f"who calls itself {life[:40]!r}"


def least_cells(cells: int) -> int:
    """Return how many cells a round needs by default: more than half of those that are known, of two one."""
    return 1 if cells == 2 else cells // 2 + 1


@dataclass(frozen=True)
class Epoch:
    """The cells that have met for a round, in the order of their numbers, and what the round goes on from."""

    created: int  # when it was formed, unique to it
    members: tuple[CellRecord, ...]
    base: Version  # the model that the round goes on from
    first: int  # the lowest cell that holds it
    behind: frozenset[int]  # cells that hold another model; of a federation that begins, all but the first
    keeps_group: bool  # all have the same process group still, and it has just these members
    refusal: str = ""  # why these cells make no round; they meet again
    looks_again: bool = False  # the refusal is only that a cell may come that nobody has seen dead yet
    strangers: tuple[CellRecord, ...] = ()  # have come too, with settings that do not go with those of the members

    @property
    def cells(self) -> tuple[int, ...]:
        """Return the numbers of the cells."""
        return tuple(member.cell for member in self.members)

    @property
    def lives(self) -> tuple[str, ...]:
        """Return the lives of the cells."""
        return tuple(member.life for member in self.members)

    @property
    def has_all_holders(self) -> bool:
        """Return whether nobody else can hold the run's model, or a doubt: all lives that have not ended are here.

        What one member has seen is not enough, since another one may have made a round with a newcomer after that. The
        last to see does so after all of them have come to wait in this meeting. A model from a checkpoint, whose voters
        have all ended, is held by nobody: others may come with a later one.
        """
        seen, here = [member.living for member in self.members], {*self.lives}
        return not here.isdisjoint(self.base.voters) and all(one is not None and {*one} <= here for one in seen)

    @property
    def group(self) -> str:
        """Return what a process group of its members is called: a name that no other has, and how many they are."""
        return f"{self.base.round + 1}.{self.created}/{len(self.members)}"

    @property
    def digest(self) -> bytes:
        """Return a digest of all that its members have told: who has the same was in the same meeting."""
        told = [self.created, self.first, *(member.to_plain() for member in self.members)]
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).digest()

    @property
    def membership(self) -> str:
        """Return what the group is called in which its round takes place: the same in rounds of the same cells."""
        return self.members[0].group if self.keeps_group else self.group

    @property
    def left(self) -> tuple[int, ...]:
        """Return the cells that have left before this epoch."""
        return tuple(sorted({cell for member in self.members for cell in member.left} - {*self.cells}))

    @property
    def has_same_lighthouse(self) -> bool:
        """Return whether the lighthouse is known to be the one that has formed the last round."""
        return any(member.same_lighthouse and member.version == self.base for member in self.members)

    @property
    def missing(self) -> tuple[int, ...]:
        """Return the cells of the last round that may be alive, and are not here; of one that begins, all others."""
        if not self.base.is_agreed:
            return tuple(sorted({*range(self.members[0].cells)} - {*self.cells}))
        # A life has ended where another one of its cell is here.
        return tuple(sorted(cell for cell in map(cell_of, self.base.voters) if cell not in (*self.cells, *self.left)))

    @property
    def votes(self) -> frozenset[str]:
        """Return the lives whose votes are here: those of its members, and what holders of its base have inherited."""
        left = (life for member in self.members if member.version == self.base for life in member.inherited)
        return frozenset((*self.lives, *left))

    @property
    def next_left(self) -> tuple[int, ...]:
        """Return the cells that will have left once its round is taken."""
        return tuple(sorted({*self.left, *(member.cell for member in self.members if member.is_finished)}))

    @property
    def next_version(self) -> Version:
        """Return the version that its round makes: no other round can make one of the same name."""
        told = json.dumps([self.base.lineage, self.base.round, self.created, self.lives])
        lineage = hashlib.sha256(told.encode()).hexdigest()[:16]
        return Version(self.base.round + 1, self.created, lineage, self.lives)

    @property
    def total_weight(self) -> float:
        """Return the sum of the weights of all rounds that led to its base.

        Cells that were all in doubt of the last of these have not told it: its weight is missing then.
        """
        return max(member.total_weight for member in self.members if self.base in (member.version, member.doubt))

    def index_of(self, cell: int) -> int:
        """Return the place of a cell among the members."""
        return self.cells.index(cell)


def form_epoch(
    records: Iterable[CellRecord], created: int, number: int = 0, *, least: int | None = None, looks: int = 1
) -> Epoch:
    """Draw the conclusion of a meeting; pure, the same for all that have met.

    :param records: What the cells have told, one record each.
    :param created: When the meeting ended, in nanoseconds; no other meeting has the same.
    :param number: The lighthouse's number of the meeting: that of the last one where the same lives met, else the next.
    :param least: How many cells a round needs; by default :func:`least_cells` of those that are known, or all that
        live, where that is known.
    :param looks: How often the cells meet again before they go on without one that was there in the last round, where
        the lighthouse may be another one since, or one is here that was not.
    :return: The epoch, with a refusal where these cells must not make a round.
    :raises ConfigError: if the records do not go together, and it is not just newcomers that were started otherwise.
    """
    members, strangers = _split(sorted(records, key=lambda record: (record.cell, record.life)))
    resolved = tuple(_resolve(member, members) for member in members)
    base = max((member.version for member in resolved), key=lambda one: (one.round, one.created, one.lineage))
    holders = [member.cell for member in resolved if member.version == base]
    first = holders[0]
    behind = frozenset(
        member.cell for member in resolved if member.version != base or not (base.is_agreed or member.cell == first)
    )
    groups = {member.group for member in members}
    keeps_group = len(groups) == 1 and members[0].group.endswith(f"/{len(members)}")
    epoch = Epoch(created, resolved, base, first, behind, keeps_group, strangers=strangers)
    refusal = _refusal(epoch, least, number)
    # The lighthouse of the last round has heard who is missing now, and no longer does. One that was started since may
    # only not have heard it yet; and where one has asked long before the others, it has waited for nobody who is late.
    is_old = epoch.has_same_lighthouse and all(member.life in base.voters for member in resolved)
    if epoch.has_all_holders or is_old:
        looks = 0
    if not refusal and epoch.missing and min(member.looks for member in members) < looks:
        return replace(epoch, refusal=f"{cells_text(epoch.missing)} may still come", looks_again=True)
    return replace(epoch, refusal=refusal)


def _split(records: Sequence[CellRecord]) -> tuple[tuple[CellRecord, ...], tuple[CellRecord, ...]]:
    """Tell those that go on with a model of theirs from newcomers that were started for another federation."""
    agreed = [record for record in records if record.version.is_agreed]
    check_alike(agreed or records)
    own = {(record.cells, record.replica_size) for record in agreed or records}
    members = tuple(record for record in records if (record.cells, record.replica_size) in own)
    return members, tuple(record for record in records if record not in members)


def check_alike(members: Sequence[CellRecord]) -> None:
    """Raise ConfigError where cells were started for different federations."""
    for what, text, option in (
        ("cells", "numbers of cells", "--cell NUMBER/CELLS"),
        ("replica_size", "replica sizes", "--hsdp"),
    ):
        told = {getattr(member, what): member.cell for member in reversed(members)}
        if len(told) > 1:
            shown = ", ".join(f"cell {cell}: {value}" for value, cell in sorted(told.items(), key=lambda one: one[1]))
            raise ConfigError(f"the cells were given different {text} ({shown}); give all the same ({option})")


def _resolve(member: CellRecord, members: Sequence[CellRecord]) -> CellRecord:
    """Return a record without doubt: what it was in doubt of is taken, unless one that was there has refused it."""
    doubt = member.doubt
    if doubt is None:
        return member
    is_refused = any(
        # Who has gone on since is followed, whatever became of it.
        other.version.created > doubt.created
        or (other.life in doubt.voters and other.version != doubt and other.doubt != doubt)
        for other in members
    )
    return replace(member, version=member.version if is_refused else doubt, doubt=None)


def _refusal(epoch: Epoch, least: int | None, number: int) -> str:
    """Return why the members must not make a round, or nothing."""
    known = epoch.members[0].cells
    twice = [cell for cell, count in Counter(epoch.cells).items() if count > 1]
    if twice:
        verb = "is" if len(twice) == 1 else "are"
        return f"{cells_text(twice)} {verb} there twice; if two jobs have the same number (--cell), end one of them"
    if len(epoch.members) + len(epoch.left) >= known:
        return ""  # whoever could hold a later model is here
    needed = 1 if least is None and epoch.has_all_holders else least_cells(known) if least is None else least
    if len(epoch.members) < min(needed, known - len(epoch.left)):
        return f"a round needs {needed} of {known} cells, but only {cells_text(epoch.cells)} came"
    if epoch.has_all_holders:
        return ""
    absent = sorted({*range(known)} - {*epoch.cells, *epoch.left})
    hint = "see that it runs" if len(absent) == 1 else "see that they run"
    if not epoch.base.is_agreed:
        # Where cells have lost what they held, another one may hold the run's model: none of these is to define it.
        fresh = [member for member in epoch.members if member.restarts == 0]
        if 2 * len(fresh) > known:
            return ""
        if len(fresh) == len(epoch.members):
            return f"a run begins with more than half of its cells, but only {cells_text(epoch.cells)} came"
        return f"no cell here holds an agreed model, and {cells_text(absent)} may; {hint}"
    # Those whose lives have ended may have gone on, if they were half of the voters, with any cell that is not here.
    voters = sorted((life for life in epoch.base.voters if cell_of(life) not in epoch.left), key=cell_of)
    here = [life for life in voters if life in epoch.votes]
    # Of two halves the one with the lowest cell goes on; of two cells each, or the loss of one would end the run.
    is_half = 2 * len(here) == len(voters) and (known == 2 or (bool(here) and here[0] == voters[0]))
    # Nor have they where a cell of the last round has been in every meeting since. A meeting without that cell has a
    # number of its own, so the cell sees a gap; having seen one, it can never make this claim for that version again.
    has_seen_all = any(
        member.life in here
        and member.version == epoch.base
        and member.same_lighthouse
        and member.has_met_all
        and number - member.met <= 1
        for member in epoch.members
    )
    if 2 * len(here) > len(voters) or is_half or (has_seen_all and not epoch.missing):
        return ""
    return f"{cells_text(absent)} may hold a later model than round {epoch.base.round}; {hint}"


def cells_text(cells: Sequence[int]) -> str:
    """Name cells by their numbers."""
    return f"cell{'s' if len(cells) != 1 else ''} {', '.join(map(str, cells))}"


class Attendance:
    """The meetings of one lighthouse that this cell was in, back to the last one that it missed.

    A meeting has the number of the one before it where the same lives met, else the next number. So a number that is
    left out is a meeting without this cell, in which others may have made a round.
    """

    def __init__(self) -> None:
        self.last_number = 0
        """The number of the last meeting that this cell was in."""
        self._created: set[int] = set()
        """When the meetings since the last gap were formed."""

    def note(self, number: int, created: int) -> None:
        """Note a meeting that this cell was in, whether or not these cells may make a round."""
        if not 0 <= number - self.last_number <= 1:  # lower: another lighthouse counts anew
            self._created.clear()
        self.last_number = number
        self._created.add(created)

    def note_absence(self) -> None:
        """Note that others may have met without this cell, whatever the number of their meeting."""
        self._created.clear()

    def covers(self, *versions: Version | None) -> bool:
        """Tell whether this cell has missed no meeting since the ones whose rounds made these versions."""
        return {version.created for version in versions if version is not None} <= self._created

    def forget_before(self, created: int) -> None:
        """Forget the meetings that were formed before a time: nothing will be asked about them."""
        self._created = {one for one in self._created if one >= created}


@dataclass
class Standing:
    """Where one cell stands: the version that it holds, and the round that it may be in doubt of.

    Each of the four ends of a round is one method; :meth:`settle` ends a doubt by what the next meeting has told.
    """

    version: Version = field(default_factory=Version)
    doubt: Version | None = None
    latest: Version | None = None  # on which this life has agreed last; a state that was loaded since may hold another
    left: tuple[int, ...] = ()
    total_weight: float = 0.0
    _doubted_left: tuple[int, ...] = ()

    def restore(self, version: Version, left: tuple[int, ...], total_weight: float) -> None:
        """Hold a version that was saved, and the cells that had left and the weight that had counted by then."""
        self.version = version
        self.left = left
        self.total_weight = total_weight

    def adopt_weight(self, total_weight: float) -> None:
        """Hold a model in which so much has counted."""
        self.total_weight = total_weight

    def add_weight(self, weight: float) -> None:
        """Note that a round has counted so much."""
        self.total_weight += weight

    def take(self, epoch: Epoch) -> None:
        """Note that the round was taken."""
        self.version = self.latest = epoch.next_version
        self.doubt, self.left = None, epoch.next_left

    def refuse(self) -> None:
        """Note that nobody has taken the round."""
        self.doubt = None

    def suspect(self, epoch: Epoch) -> None:
        """Note that this cell has said yes, and could not learn what the others said."""
        self.doubt, self._doubted_left = epoch.next_version, epoch.next_left

    def settle(self, epoch: Epoch, cell: int) -> bool | None:
        """End the doubt, if there is one; return whether its round was taken, ``None`` where there was no doubt."""
        if self.doubt is None:
            return None
        is_taken = epoch.members[epoch.index_of(cell)].version == self.doubt
        if is_taken:
            self.version = self.latest = self.doubt
            self.left = self._doubted_left
        self.doubt = None
        return is_taken
