"""Draw elastic federations with faults, for ``tests/chaos/oracle.py``."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from xffl.distributed.failures.faults import PHASES

__all__ = ["PARTS", "SLOTS", "Draw", "draw"]

PARTS = 2
"""Parameters of the model, of one size: with two fragments each is one."""
SLOTS = 3000
"""Steps that a cell can make, in all of its lives."""
ENDLESS = SLOTS
LOSSY = ("bf16", "int8", "topk:0.01")


@dataclass(frozen=True)
class Draw:
    """What is run; all of it follows from the number, but for the moments at which processes get on."""

    number: int
    sizes: tuple[int, ...]
    every: int
    step_s: float
    save_every: int
    older: float
    """How likely a start leaves out the newest checkpoint."""
    is_weighed: bool
    """Whether the weight of a cell is the number of its steps, or each one that made a step counts 1."""
    is_shared: bool
    """Whether the journal is in a folder that the cells share, or behind the service beside the lighthouse."""
    is_one_command: bool = False
    """Whether one command starts all cells."""
    fragments: int = 1
    delay: int = 0
    codec: str = "none"
    client: Any = None
    server: Any = None
    threshold: float | None = None
    """Divergence below which a round is skipped."""
    faults: tuple[tuple[float, str, int], ...] = ()
    """Seconds after the fault before, what is killed (or stopped for a while), and in which cell."""
    pause_s: float = 0.0
    """How long a cell is stopped."""
    phase: str = ""
    """The first fault: where a process of a cell ends by itself, as ``XFFL_FAULT`` says it."""
    late: Mapping[str, float] | None = None
    """By cell, after how many seconds it starts."""
    leaves: tuple[int, ...] = ()
    """By cell, after how many steps it leaves."""

    @property
    def cells(self) -> int:
        """Return how many cells there are."""
        return len(self.sizes)

    @property
    def shows_steps(self) -> bool:
        """Whether the slot of a step that has counted has the share of its cell, and nothing else moves it."""
        return self.codec == "none" and self.client in (None, FEDPROX) and self.server in (None, PLAIN_SERVER)

    @property
    def shows_residuals(self) -> bool:
        """Whether the slot of a step that has counted has the share of its cell, but for what codecs have left out."""
        return self.codec != "none"

    @property
    def allowed(self) -> float:
        """By how much, relative to it, a slot may differ from a share: FedProx pulls the steps of a round back."""
        return 1e-4 if self.client is None else 0.05


PLAIN_SERVER = {"name": "sgd", "lr": 1.0}
"""A server whose step is the mean, to a rounding error."""
FEDPROX = {"name": "fedprox", "mu": 2.0**-10}


def draw(number: int) -> Draw:
    """Draw what is run."""
    dice = random.Random(f"oracle {number}")
    cells = dice.choice([2, 2, 2, 2, 3, 3, 3, 4])
    sizes = tuple(dice.choice([1, 1, 1, 1, 1, 2]) for _ in range(cells))
    every = dice.randint(2, 8)
    options: dict[str, Any] = {"fragments": dice.choice([1, 1, 1, 2])}
    kind = dice.choice(["plain", "plain", "delay", "delay", "server", "client", "codec", "threshold"])
    if kind == "delay":
        options["delay"] = dice.randint(1, every - 1)
    elif kind == "server":
        options["server"] = dice.choice([PLAIN_SERVER, PLAIN_SERVER, "diloco", "fedadam"])
    elif kind == "client":
        options["fragments"] = 1
        options["client"] = dice.choice([FEDPROX, FEDPROX, "scaffold"])
    elif kind == "codec":
        options["codec"] = dice.choice(LOSSY)
    elif kind == "threshold":
        options["fragments"] = 1
        options["threshold"] = dice.choice([2.5, 4.0])
    faults = _faults(dice, cells)
    phase = ""
    if dice.random() < 0.5:
        cell = dice.randrange(cells)
        phase = f"{cell}:{dice.randrange(sizes[cell])}:{dice.choice(PHASES)}:{dice.randint(1, 12)}"
    late: dict[str, float] = {}
    leaves = [ENDLESS] * cells
    if cells > 1 and dice.random() < 0.3:
        late[str(dice.randrange(cells))] = dice.uniform(2.0, 10.0)
    if cells > 2 and dice.random() < 0.3:
        leaves[dice.randrange(cells)] = dice.randint(50, 200)
    is_one_command = not late and dice.random() < 0.3
    return Draw(
        number,
        sizes,
        every=every,
        step_s=dice.choice([0.02, 0.05]),
        save_every=dice.choice([5, 7, 11, 29]),
        older=dice.choice([0.0, 0.0, 0.3]),
        is_weighed="delay" in options or dice.random() < 0.7,
        is_shared=dice.random() < 0.5,
        is_one_command=is_one_command,
        faults=faults,
        pause_s=dice.choice([3.0, 5.0, 13.0]),
        phase=phase,
        late=late,
        leaves=tuple(leaves),
        **options,
    )


def _faults(dice: random.Random, cells: int) -> tuple[tuple[float, str, int], ...]:
    """Draw what is killed when, and which cells are stopped; a fault may come while a victim is on its way back."""
    kills = ["rank", "launcher", "cell", "cell", "lighthouse", "all", "all"]
    kinds = [dice.choice(kills), *["pause"] * dice.randint(0, 2), *[dice.choice(kills)] * (dice.random() < 0.3)]
    dice.shuffle(kinds)
    return tuple((dice.uniform(0.3, 5.0), kind, dice.randrange(cells)) for kind in kinds)
