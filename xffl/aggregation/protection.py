"""What happens to a cell's update before it leaves, where rounds are private."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist

from xffl.aggregation.accountant import Accountant
from xffl.aggregation.globals import GlobalState
from xffl.aggregation.journal import Journal
from xffl.aggregation.plan import Bucket
from xffl.aggregation.privacy import Privacy, privatize
from xffl.aggregation.secure import Masker
from xffl.aggregation.staging import Staging
from xffl.aggregation.tracks import Track
from xffl.distributed.backends import control_device

__all__ = ["Protection"]


class Protection:
    """One rank's clipping and noise, and what they have cost so far.

    :param privacy: What was asked for.
    :param rank: This rank.
    :param masker: The masks of a secure sum, if it is one.
    """

    def __init__(self, privacy: Privacy, rank: int, masker: Masker | None) -> None:
        self._privacy = privacy
        self._rank = rank
        self._masker = masker
        self.accountant = Accountant(privacy)

    def apply(
        self,
        carried: Sequence[tuple[Track, Bucket]],
        agreed: GlobalState,
        staging: Staging,
        journal: Journal,
        *,
        cells: Collection[int],
        cell: int,
        home: dist.ProcessGroup | None,
    ) -> None:
        """Clip this cell's update and add noise to what this rank carries of it, in the stages.

        Collective over the cell. The norm is added up inside the cell only: it tells about the data, too. Where
        something fails, nothing of the update is left in the stages, since they are sent all the same; and they are
        sent without masks, since masked they would bare the sum of the other cells, which then has too little noise.

        :param carried: The buckets that this rank carries.
        :param agreed: The last agreed model.
        :param staging: Where values are read from and collected.
        :param journal: Where seconds and failures are noted.
        :param cells: The cells that contribute.
        :param cell: This cell; where it does not contribute, nothing of it is sent, and nothing is done.
        :param home: The group of the cell; ``None`` where there is one rank.
        """
        self.accountant.spend(len(cells))  # also where the round is rejected later: it has been seen then
        if cell not in cells:
            return
        staging.read_from_stages()
        # What could not be measured is too long to be clipped, on all ranks of the cell.
        total = torch.full((), math.inf, dtype=torch.float64, device=agreed.device)
        with journal.noting("protect"):
            for track, bucket in carried:
                stage = staging.stage(track, bucket)
                values = staging.copied(track, bucket)
                if values.data_ptr() != stage.data_ptr():
                    stage.copy_(values)  # the snapshot is what later steps are measured from
            norms = [agreed.squared_distance(track, bucket, staging.stage(track, bucket)) for track, bucket in carried]
            total = torch.stack(norms).sum() if norms else torch.zeros_like(total)
        if home is not None:
            with journal.phase("home"):
                total = total.to(control_device(home))
                dist.all_reduce(total, group=home)
        protected = 0
        with journal.noting("protect"):
            scale = self._privacy.scale_of(math.sqrt(total.item()))
            deviation = self._privacy.deviation(len(cells))
            noise = self._privacy.noise_of(self._rank, self.accountant.rounds)
            for track, bucket in carried:
                privatize(staging.stage(track, bucket), agreed.written(track, bucket), scale, deviation, noise)
                protected += 1
        if journal.failure is None:
            return
        for track, bucket in carried[protected:]:
            staging.stage(track, bucket).zero_()
        if self._masker is not None:
            self._masker.abandon()
