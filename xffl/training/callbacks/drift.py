"""How far the cells go from the model that they agreed on, measured at each round."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from xffl.aggregation.contributions import enclosing_calls, unwrap
from xffl.errors import ConfigError
from xffl.training.callbacks.base import Callback
from xffl.training.callbacks.spread import (
    check_own_weights,
    copies_of,
    local,
    norm_of,
    spread_like,
    trained_parameters,
)

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.utils.hooks import RemovableHandle

    from xffl.aggregation import RoundReport
    from xffl.training.mixins.federated import FederatedMixin
    from xffl.training.trainer import BaseTrainer

__all__ = ["DriftCallback"]


class DriftCallback(Callback):
    """Log at each round how this cell has moved since the last one; of the parameters that train.

    With ``g`` the model of the last round, ``x`` this cell's before this round and ``n`` the new one:

    * ``drift/norm``: L2 norm of the cell's update, ``|x - g|``;
    * ``drift/relative``: that in relation to the model, ``|x - g| / |g|``;
    * ``drift/distance``: how far the cell was from the new model, ``|x - n|``;
    * ``drift/cosine``: the cosine between the cell's update and that of the federation, ``n - g``.

    With ``copies`` each rank keeps a copy of its own elements of ``g`` and makes one of ``x`` before a round: memory of
    twice the rank's own weights in their data type, and some all-reduces of a number inside the cell at each round;
    nothing crosses to other cells. Where ``federation.every`` is no number, nobody can tell which step ends in a round,
    and ``x`` is copied after each. Rounds with a delay or of fragments are refused, since there is no such ``x``.

    Without, ``drift/norm`` is what the round itself has measured (of the part of the model that was exchanged), and the
    last two are not logged. That needs ``federation.aggregator: {norms: true}``, or an algorithm that measures norms.

    A round that a cell answers without a step of its own since the last one is not logged.

    :param copies: Whether to measure with copies.
    """

    def __init__(self, *, copies: bool = True) -> None:
        self.copies = copies
        self._parameters: dict[str, nn.Parameter] = {}
        self._agreed: dict[str, torch.Tensor] = {}
        self._agreed_norm = math.nan
        self._reached: dict[str, torch.Tensor] = {}
        self._steps = 0
        self._every: int | None = None
        self._handles: list[RemovableHandle] = []

    def state_dict(self) -> dict[str, Any]:
        """Return how many steps were made since the last round."""
        return {"steps": self._steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on; in the middle between two rounds the next one cannot be measured.

        :param state: The saved state.
        """
        self._steps = int(state["steps"])

    def post_setup(self, trainer: BaseTrainer) -> None:
        """Listen to the optimizers, before rounds do.

        :param trainer: The trainer.
        :raises ConfigError: where there are no rounds, or none that can be measured with copies.
        """
        asked = getattr(trainer.config, "federation", None)
        if asked is None or not asked.has_rounds:
            raise ConfigError(
                "DriftCallback measures rounds, and there are none; give federation.every, or leave it out"
            )
        if self.copies:
            check_own_weights(trainer, "DriftCallback with copies")
        if self.copies and (asked.delay or asked.aggregator.get("fragments", 1) != 1):
            raise ConfigError(
                f"DriftCallback cannot copy what goes into rounds with delay {asked.delay} or of fragments; give "
                "copies: false and federation.aggregator: {norms: true}"
            )
        self._every = asked.every if isinstance(asked.every, int) else None
        federated = cast("FederatedMixin", trainer)
        self._parameters = trained_parameters({"model": federated.federated_model()})
        for optimizer in unwrap(federated.federated_optimizers())[-1:]:  # whose steps are counted
            self._handles.append(optimizer.register_step_post_hook(self._after_step))

    def pre_train(self, trainer: BaseTrainer) -> None:
        """Take the model as the one that the cells agreed on; collective over the cell.

        :param trainer: The trainer.
        """
        if self._steps == 0:
            self._agree(trainer)

    def post_train(self, trainer: BaseTrainer) -> None:
        """Keep what was reached: the last rounds follow.

        :param trainer: The trainer.
        """
        del trainer
        if self._steps and not self._reached:
            self._reach()

    def post_round(self, trainer: BaseTrainer, report: RoundReport) -> None:
        """Measure and log; collective over the cell.

        :param trainer: The trainer.
        :param report: What the round did.
        :raises ConfigError: where norms are needed that the round has not measured.
        """
        steps, self._steps = self._steps, 0
        reached, self._reached = self._reached, {}
        if steps and not math.isnan(self._agreed_norm):
            found = self._measure(trainer, reached) if self.copies else self._read(trainer, report)
            if found:
                trainer.log_metrics({f"drift/{name}": value for name, value in found.items()})
        if not report.is_skipped:
            self._agree(trainer)

    def preemption(self, trainer: BaseTrainer, path: str | None) -> None:
        """Stop listening.

        :param trainer: The trainer.
        :param path: The checkpoint that the run goes on from.
        """
        del path
        self.post_fit(trainer)

    def post_fit(self, trainer: BaseTrainer) -> None:
        """Stop listening.

        :param trainer: The trainer.
        """
        del trainer
        while self._handles:
            self._handles.pop().remove()

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if any(one is optimizer for one in enclosing_calls()):
            return  # super().step()
        self._steps += 1
        if self._every is None or self._steps >= self._every:
            self._reach()

    @torch.no_grad()
    def _reach(self) -> None:
        if not self.copies:
            return
        if not self._reached:
            self._reached = copies_of(self._parameters)
        else:
            for name, values in self._reached.items():
                values.copy_(local(self._parameters[name]))

    @torch.no_grad()
    def _agree(self, trainer: BaseTrainer) -> None:
        """Take the weights as they are for what the cells agreed on."""
        self._agreed_norm = norm_of(trainer.world, [one.detach() for one in self._parameters.values()]).item()
        if self.copies:
            for name, parameter in self._parameters.items():
                self._agreed[name] = local(parameter).clone()

    def _read(self, trainer: BaseTrainer, report: RoundReport) -> dict[str, float]:
        if report.update_norms is None:
            raise ConfigError(
                "DriftCallback without copies needs rounds that measure norms; give federation.aggregator: "
                "{norms: true}, or copies: true"
            )
        norm = report.update_norms[trainer.state.topology.cell_of(trainer.world.rank)]
        return {"norm": norm, "relative": _ratio(norm, self._agreed_norm)}

    @torch.no_grad()
    def _measure(self, trainer: BaseTrainer, reached: dict[str, torch.Tensor]) -> dict[str, float]:
        """Compare the three models; the copies are used up."""
        if not reached:
            return {}
        for name, parameter in self._parameters.items():
            reached[name].sub_(local(parameter))  # x - n
        distance = self._norm(trainer, reached)
        for name, parameter in self._parameters.items():
            self._agreed[name].neg_().add_(local(parameter))  # n - g
        way = self._norm(trainer, self._agreed)
        for name, values in reached.items():
            values.add_(self._agreed[name])  # x - g
        norm = self._norm(trainer, reached)
        cosine = _ratio(norm**2 + way**2 - distance**2, 2 * norm * way)
        return {
            "norm": norm,
            "relative": _ratio(norm, self._agreed_norm),
            "distance": distance,
            "cosine": max(-1.0, min(1.0, cosine)),
        }

    def _norm(self, trainer: BaseTrainer, values: Mapping[str, torch.Tensor]) -> float:
        spread = [spread_like(own, self._parameters[name]) for name, own in values.items()]
        return norm_of(trainer.world, spread).item()


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.nan
