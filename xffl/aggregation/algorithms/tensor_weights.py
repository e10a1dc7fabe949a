"""Weights of single tensors, or of slices of them, in place of the cells' own: tokens that an expert has seen."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import torch

from xffl.checks import shorten
from xffl.errors import CheckpointError, ConfigError

__all__ = ["TensorCounts", "TensorWeights"]

TensorWeights: TypeAlias = Callable[[], Mapping[str, float | Sequence[float] | torch.Tensor]]
"""Returns what this rank has counted since the last call, by name pattern: a number for all of a tensor that matches,
or one for each entry of its first dimension."""

HINT = "return the same patterns each time, each with a count, or with one for each entry of the first dimension"


class TensorCounts:
    """What a rank has counted for tensors and their slices, and no round has taken in yet; local.

    :param ask: Returns the counts since its last call. It is called here for the first time.
    :param fragments: Parts of the model that rounds move in turn: each waits for the rounds of its own.
    """

    def __init__(self, ask: TensorWeights, fragments: int) -> None:
        if not callable(ask):
            raise ConfigError(
                f"tensor_weights must be a function that returns counts by name pattern, got {type(ask).__name__}"
            )
        self._ask = ask
        asked = _read(ask())
        if not asked:
            raise ConfigError("tensor_weights returned no pattern; return counts by name pattern, zeros at first")
        self.patterns: dict[str, tuple[int, int | None]] = {}
        """By pattern the place of its first count, and how many slices have one; ``None`` for a whole tensor"""
        total = 0
        for pattern, counts in asked.items():
            slices = None if isinstance(counts, float) else len(counts)
            self.patterns[pattern] = total, slices
            total += 1 if slices is None else slices
        self.size = total
        """How many counts there are"""
        self._waiting = torch.zeros(fragments, total, dtype=torch.float64)
        self._add(asked)

    def __repr__(self) -> str:
        """Return what must be the same on all ranks."""
        return ", ".join(
            f"{pattern}: {'1' if slices is None else f'{slices} slices'}"
            for pattern, (_, slices) in self.patterns.items()
        )

    def places_of(self, name: str, shape: Sequence[int]) -> tuple[str, int, int | None] | None:
        """Return the first pattern that matches a tensor, the place of its first count, and how many slices have one.

        Pure. ``None`` where no pattern matches.
        """
        for pattern, (first, slices) in self.patterns.items():
            if fnmatchcase(name, pattern):
                if slices is not None and slices != (shape[0] if shape else None):
                    raise ConfigError(
                        f"tensor_weights has {slices} counts for {pattern!r}, which matches {name!r} of shape "
                        f"{tuple(shape)}; give one for each entry of the first dimension, or a number for all of it"
                    )
                return pattern, first, slices
        return None

    def collect(self) -> None:
        """Ask for what was counted since the last call."""
        self._add(_read(self._ask()))

    def waiting(self, fragment: int) -> torch.Tensor:
        """Return a copy of what waits for a fragment's round, in fp64."""
        return self._waiting[fragment].clone()

    def subtract(self, fragment: int, taken: torch.Tensor) -> None:
        """Forget what the round of a fragment has taken in."""
        self._waiting[fragment].sub_(taken).clamp_(min=0.0)

    def state_dict(self) -> dict[str, Any]:
        """Return what waits, with what was counted up to now."""
        self.collect()
        return {"patterns": str(self), "waiting": self._waiting.clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned; what was counted up to now is forgotten."""
        waiting = state["waiting"]
        if state["patterns"] != str(self) or waiting.shape != self._waiting.shape:
            raise CheckpointError(
                f"the saved counts are those of other tensors ({shorten([state['patterns']])}) than tensor_weights has "
                f"here ({shorten([str(self)])}); resume with the same"
            )
        self._ask()
        self._waiting.copy_(waiting)

    def _add(self, asked: Mapping[str, float | list[float]]) -> None:
        """Add counts to what waits for the rounds of all fragments."""
        flat: list[float] = []
        for counts in asked.values():
            flat += [counts] if isinstance(counts, float) else counts
        now = {pattern: None if isinstance(counts, float) else len(counts) for pattern, counts in asked.items()}
        if now != {pattern: slices for pattern, (_, slices) in self.patterns.items()}:
            raise ConfigError(
                f"tensor_weights returned other patterns ({shorten(list(now))}) than at first "
                f"({shorten(list(self.patterns))}); {HINT}"
            )
        # Mappings may come in another order than at first.
        by_place = dict(zip(now, torch.split(torch.tensor(flat, dtype=torch.float64), _sizes(now)), strict=True))
        self._waiting += torch.cat([by_place[pattern] for pattern in self.patterns])


def _sizes(slices: Mapping[str, int | None]) -> list[int]:
    return [1 if count is None else count for count in slices.values()]


def _read(asked: object) -> dict[str, float | list[float]]:
    """Return counts as numbers; raise ConfigError unless each is finite and not negative."""
    if not isinstance(asked, Mapping):
        raise ConfigError(f"tensor_weights returned {type(asked).__name__}; {HINT}")
    read: dict[str, float | list[float]] = {}
    for pattern, counts in asked.items():
        try:
            values = counts.tolist() if isinstance(counts, torch.Tensor) else counts
            numbers = [float(one) for one in values] if isinstance(values, Sequence) else float(values)
        except (TypeError, ValueError) as wrong:
            raise ConfigError(f"tensor_weights returned {counts!r} for {pattern!r}: {wrong}; {HINT}") from wrong
        of_all = [numbers] if isinstance(numbers, float) else numbers
        if not isinstance(pattern, str) or not of_all or not all(0.0 <= one < math.inf for one in of_all):
            raise ConfigError(
                f"tensor_weights returned {counts!r} for {pattern!r}; give counts that are finite and not negative, by "
                "name pattern"
            )
        read[pattern] = numbers
    return read
