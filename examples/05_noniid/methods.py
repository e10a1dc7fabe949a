"""The algorithms that are compared: what was tried for each, and what was chosen."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["CENTRALIZED", "CHOSEN", "GRIDS", "Trial", "chosen_trials", "grid_trials"]

CENTRALIZED = "centralized"
CHOSEN = Path(__file__).resolve().parent / "chosen.json"
"""Where ``choose.py`` writes what it found."""


@dataclass(frozen=True)
class Trial:
    """One setting of one algorithm.

    :param run: The algorithm's name: an entry of ``xffl list algorithms``, or ``centralized``.
    :param lr: Learning rate of the local steps, plain SGD.
    :param options: The algorithm's options.
    """

    run: str
    lr: float
    options: dict[str, float]

    @property
    def algorithm(self) -> dict[str, Any]:
        """What to give to :class:`xffl.FederatedScaling`."""
        return {"name": "fedavg" if self.run == CENTRALIZED else self.run, **self.options}

    @property
    def text(self) -> str:
        """The setting, for tables."""
        names = {"lr": "server"}
        return ", ".join(
            [f"lr {self.lr:g}", *(f"{names.get(key, key)} {value:g}" for key, value in self.options.items())]
        )


def _line(*rates: float) -> list[tuple[float, dict[str, float]]]:
    return [(rate, {}) for rate in rates]


def _square(rates: tuple[float, ...], option: str, values: tuple[float, ...]) -> list[tuple[float, dict[str, float]]]:
    return [(rate, {option: value}) for rate in rates for value in values]


# Nine for each: one number where an algorithm has one, three by three where it has two.
GRIDS: dict[str, list[tuple[float, dict[str, float]]]] = {
    "fedavg": _line(0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.65, 0.8, 1.0),
    "fedprox": _square((0.3, 0.5, 0.8), "mu", (0.001, 0.01, 0.1)),
    "scaffold": _line(0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.65, 0.8, 1.0),
    "fedadam": _square((0.1, 0.3, 0.6), "lr", (0.05, 0.1, 0.2)),
    "fedyogi": _square((0.1, 0.3, 0.6), "lr", (0.05, 0.1, 0.2)),
    CENTRALIZED: _line(0.1, 0.15, 0.2, 0.3, 0.45, 0.65, 1.0, 1.5, 2.2),
}
"""What is tried: learning rate of the local steps, and options."""


def grid_trials() -> list[Trial]:
    """Return all that is tried."""
    return [Trial(run, lr, options) for run, tried in GRIDS.items() for lr, options in tried]


def chosen_trials() -> list[Trial]:
    """Return the best of each algorithm on the validation part, as ``choose.py`` found them."""
    chosen = json.loads(CHOSEN.read_text())["chosen"]
    return [Trial(run, chosen[run]["lr"], chosen[run]["options"]) for run in GRIDS]
