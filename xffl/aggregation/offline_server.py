"""A server optimizer between rounds over files: the last agreed model and the optimizer's state, piece by piece."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from xffl.aggregation.exports import PART, compare, read_told
from xffl.aggregation.mean import wide_type
from xffl.aggregation.pieces import Box, PieceReader, PieceWriter
from xffl.aggregation.server import ServerOptimizer, asked_of
from xffl.checkpoint.folder import find_record, settle
from xffl.distributed.plain import from_plain, to_plain
from xffl.errors import CheckpointError

__all__ = ["OfflineServer"]

STATE = "server"
"""The only part of a state; its tensors are ``server/model/NAME``, and ``server/KEY/NAME`` of the optimizer."""


class OfflineServer:
    """Take the agreed model on by a round, as :class:`xffl.aggregation.globals.GlobalState` does; elementwise.

    :param server: The server optimizer.
    :param folder: Where the states of all rounds are.
    :param told: What the exports of this round say of themselves.
    :param start: The model that all cells have started from, for the first round.
    :raises CheckpointError: if there is no state of the round before, or it is of another model or optimizer.
    """

    def __init__(self, server: ServerOptimizer, folder: Path, told: Mapping[str, Any], start: Path | None) -> None:
        self._server, self._told = server, told
        self._target = folder / f"round_{told['round']}"
        self._writer: PieceWriter | None = None
        self._numbers: dict[str, Any] = {}
        self._elements: list[str] = []
        probe = server.make([torch.zeros(1)])
        self._schedule = server.make_schedule(probe)
        self._asked, self._probe = asked_of(probe, self._schedule), probe
        before = folder / f"round_{told['round'] - 1}"
        record = find_record(settle(before))
        if record is not None and record.parts == (STATE,):
            kept: dict[str, Any] = from_plain(record.values[STATE], {})
            compare(kept["tensors"], told["tensors"], str(before), "the exports")
            saved = kept["asked"]
            others = sorted(key for key in self._asked.keys() & saved.keys() if self._asked[key] != saved[key])
            if others:
                there, here = (", ".join(f"{key}={one[key]}" for key in others) for one in (saved, self._asked))
                raise CheckpointError(
                    f"{before} is the state of a server optimizer with {there}, and {here} is asked for; go on with "
                    "the same server"
                )
            self._old, self._prefix = PieceReader(before, STATE), "model/"
            self._elements, self._numbers = kept["elements"], kept["numbers"]
            probe.param_groups[0].update(kept["options"])
            if self._schedule is not None:
                self._schedule.load_state_dict(kept["schedule"])
        elif start is not None:
            first = read_told(start, "global")
            compare(first["tensors"], told["tensors"], str(start), "the exports")
            self._old, self._prefix = PieceReader(start, PART), ""
        else:
            raise CheckpointError(
                f"{folder} has no state of round {told['round'] - 1}, so the model that the cells have started from is "
                "not known; for a first round give it (--start)"
            )
        self._old.check()
        self._made: Optimizer | None = None
        self._made_elements: list[str] = []

    def begin(self) -> None:
        """Begin to write the state after the round."""
        self._writer = PieceWriter(self._target)

    @torch.no_grad()
    def step(self, name: str, box: Box, mean: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """Take a piece of a tensor on.

        :param name: The tensor.
        :param box: The piece.
        :param mean: What the cells have made of it, flat, of real numbers.
        :param shape: The whole tensor's shape.
        :return: What it becomes, in the mean's data type.
        """
        assert self._writer is not None, "begun"
        # The state is of real numbers; those of a complex tensor are pairs of them.
        is_pairs = mean.numel() != math.prod(box[1])
        flat, whole = ((*shape, 2), ((*box[0], 0), (*box[1], 2))) if is_pairs else (shape, box)
        place = whole if self._prefix else box
        kept = self._old.read(f"{self._prefix}{name}", place).to(wide_type(mean.dtype))
        optimizer = self._server.make([kept])
        optimizer.param_groups[0].update({key: _copied(value) for key, value in self._options().items()})
        state = {key: self._old.read(f"{key}/{name}", place) for key in self._elements}
        state |= {key: _number(value) for key, value in self._numbers.items()}
        if state:
            optimizer.state[kept].update(state)
        # From what was written, so that what rounding to a narrow type has left out is not taken for a step.
        kept.grad = torch.sub(kept.to(mean.dtype).to(kept.dtype), mean.to(kept.dtype))
        optimizer.step()
        made = optimizer.state.get(kept, {})
        elements = sorted(
            key for key, value in made.items() if isinstance(value, torch.Tensor) and value.shape == kept.shape != ()
        )
        self._writer.write(f"{STATE}/model/{name}", whole, kept.detach(), flat)
        for key in elements:
            self._writer.write(f"{STATE}/{key}/{name}", whole, made[key].detach(), flat)
        if kept.numel() or self._made is None:
            self._made, self._made_elements = optimizer, elements
            self._made_numbers = {key: _plain(value) for key, value in made.items() if key not in elements}
        return kept.to(mean.dtype)

    def publish(self) -> None:
        """Give the state after the round its name."""
        assert self._writer is not None and self._made is not None, "begun, and something was trained"
        self._probe.param_groups[0]["params"][0].grad = torch.zeros(1)
        self._probe.step()
        if self._schedule is not None:
            self._schedule.step()
        kept = {
            "tensors": self._told["tensors"],
            "asked": self._asked,
            "elements": self._made_elements,
            "numbers": self._made_numbers,
            "options": self._options(),
            "schedule": None if self._schedule is None else self._schedule.state_dict(),
        }
        self._writer.publish(STATE, {}, {STATE: to_plain(kept, STATE)})

    def discard(self) -> None:
        """Leave nothing of it."""
        if self._writer is not None:
            self._writer.discard()

    def _options(self) -> dict[str, Any]:
        return {key: value for key, value in self._probe.param_groups[0].items() if key != "params"}


def _plain(value: Any) -> Any:
    """Write what an optimizer counts: numbers, also as tensors of one element."""
    if isinstance(value, torch.Tensor):
        return {"dtype": str(value.dtype).removeprefix("torch."), "value": value.item()}
    return value


def _number(value: Any) -> Any:
    if isinstance(value, dict) and value.keys() == {"dtype", "value"}:
        return torch.tensor(value["value"], dtype=getattr(torch, value["dtype"]))
    return value


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
