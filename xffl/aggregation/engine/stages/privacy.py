"""Differential privacy in a round: a cell's update is clipped, and noise added to what leaves it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from xffl.aggregation.engine.buffers import ModelCopy
from xffl.aggregation.engine.exchange import RoundRun
from xffl.aggregation.engine.global_model import GlobalModel
from xffl.aggregation.engine.planning.transfers import RoundContext
from xffl.aggregation.engine.stages.stage import RoundStage
from xffl.aggregation.privacy import Accountant, Masker, Noise, Privacy, privatize
from xffl.distributed.agreement.consistency import control_device
from xffl.errors import ConfigError

__all__ = ["Protection"]


class Protection(RoundStage):
    """One rank's clipping and noise, and what they have cost so far."""

    key = "privacy"

    def __init__(self, privacy: Privacy, rank: int, global_model: GlobalModel, masker: Masker | None) -> None:
        self._privacy = privacy
        self._global_model = global_model
        self._rank = rank
        self._masker = masker
        self.accountant = Accountant(privacy)

    def open(self, fragment: int, *, is_weighed: bool) -> None:
        """Refuse weights."""
        if is_weighed:
            raise ConfigError("privacy counts all cells alike, since weights tell about the data; give no weight")

    def begin(self, fragment: int, copy: ModelCopy) -> ModelCopy:
        """Ask for a copy: what is clipped and noised is not the model itself."""
        return ModelCopy.STAGED if copy is ModelCopy.NONE else copy

    def state_dict(self) -> dict[str, Any]:
        """Return what has been spent."""
        return self.accountant.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned."""
        self.accountant.load_state_dict(state)

    def take_over(self, last: RoundStage) -> None:
        """Count on behind what rounds with other cells have spent."""
        assert isinstance(last, Protection), "of the same kind"
        self.accountant = last.accountant

    def before_exchange(self, run: RoundRun, context: RoundContext) -> None:
        """Clip this cell's update and add noise to what this rank sends of it, where new values wait.

        Collective over the cell. The norm is added up inside the cell only: it tells about the data, too. Where
        something fails, nothing of the update is left there, since it is sent all the same; and it is sent without
        masks, since masked it would bare the sum of the other cells, which then has too little noise.
        """
        memory = run.memory
        profile = run.profile
        sent = list(run.sent())
        global_model, group, cells = self._global_model, run.round_groups.cell, context.cells
        self.accountant.spend(len(cells))  # also where the round is rejected later: it has been seen then
        if run.link.cell not in cells:
            return
        memory.read_from_staging()
        # What could not be measured is too long to be clipped, on all ranks of the cell.
        total = torch.full((), math.inf, dtype=torch.float64, device=global_model.device)
        with profile.capture_failure("protect"):
            for transfer, bucket in sent:
                memory.settle(bucket)
                staging = memory.lasting.staging_of(transfer, bucket)
                values = memory.copy_of(transfer, bucket)
                if values.data_ptr() != staging.data_ptr():
                    staging.copy_(values)  # the copy is what later steps are measured from
            norms = [
                global_model.squared_distance(transfer, bucket, memory.lasting.staging_of(transfer, bucket))
                for transfer, bucket in sent
            ]
            total = torch.stack(norms).sum() if norms else torch.zeros_like(total)
        if group is not None:
            with profile.phase("home"):
                total = total.to(control_device(group))
                dist.all_reduce(total, group=group)
        protected = 0
        with profile.capture_failure("protect"):
            scale = self._privacy.scale_of(math.sqrt(total.item()))
            deviation = self._privacy.deviation(len(cells))
            noise = Noise(self._rank, self._privacy.seed, self.accountant.rounds)
            for transfer, bucket in sent:
                privatize(
                    memory.lasting.staging_of(transfer, bucket),
                    anchor=global_model.written(transfer, bucket),
                    scale=scale,
                    deviation=deviation,
                    noise=noise,
                )
                protected += 1
        if profile.failure is None:
            return
        for transfer, bucket in sent[protected:]:
            memory.lasting.staging_of(transfer, bucket).zero_()
        if self._masker is not None:
            self._masker.abandon()
