"""The place of a rank in a job whose cells are worlds of their own, and the variable that tells it to the script."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from xffl.checks import decimal
from xffl.cluster.environment import ISOLATED_VARIABLE
from xffl.compat.datasets import ENVIRON
from xffl.errors import ConfigError
from xffl.topology import Topology

__all__ = ["IsolatedCell", "read_isolated_cell"]


@dataclass(frozen=True)
class IsolatedCell:
    """Which rank of a job this is, where torch.distributed's default group holds the ranks of its cell only."""

    rank: int
    """This rank's number among the ranks of all cells"""
    sizes: tuple[int, ...]
    """The ranks of each cell"""
    store: str
    """Where the store of the whole job listens, HOST:PORT; it lives as long as the job's rank 0"""

    @property
    def cell(self) -> int:
        """The number of this rank's cell."""
        return Topology(sum(self.sizes), self.sizes).cell_of(self.rank)

    @property
    def cell_rank(self) -> int:
        """This rank's number in its cell."""
        return self.rank - sum(self.sizes[: self.cell])

    def variables(self) -> dict[str, str]:
        """Return the variable from which :func:`read_isolated_cell` reads it."""
        return {ISOLATED_VARIABLE: f"{self.rank} {','.join(map(str, self.sizes))} {self.store}"}


def read_isolated_cell(environ: Mapping[str, str] = ENVIRON) -> IsolatedCell | None:
    """Return the place that the variable tells; ``None`` where the cells of this job are not isolated."""
    text = environ.get(ISOLATED_VARIABLE, "").strip()
    if not text:
        return None
    words = text.split()
    numbers = [] if len(words) != 3 else [decimal(word) for word in (words[0], *words[1].split(","))]
    if not numbers or None in numbers:
        raise ConfigError(f"{ISOLATED_VARIABLE} is {text!r}; xffl exec --isolate sets it, leave it out elsewhere")
    rank, *sizes = [number for number in numbers if number is not None]
    return IsolatedCell(rank, tuple(sizes), words[2])
