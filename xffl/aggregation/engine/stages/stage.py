"""What a feature may do to a round: the base of all stages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from xffl.aggregation.engine.buffers import ModelCopy
    from xffl.aggregation.engine.exchange import RoundRun
    from xffl.aggregation.engine.planning.transfers import Bucket, GroupTransfer, RoundContext
    from xffl.aggregation.engine.transport import Crossing, ExactValues
    from xffl.aggregation.engine.voting.votes import RoundStatus

__all__ = ["PlanStage", "RoundStage", "WeighedStage"]


class RoundStage:
    """What a feature does to a round; a plain round has none.

    The methods follow in the order of a round, and do nothing here. They are local where they do not say otherwise.
    """

    key: str | None = None
    """The name, in an aggregator's state dict, of what the stage remembers from round to round."""

    weighs_result = False
    """Whether :meth:`result` tells something that all ranks have to know before they write."""

    inspects = False
    """Whether :meth:`inspect` looks at values, which have to be with the host then."""

    def note_cells_behind(self, is_behind: bool) -> None:
        """Note whether the next round of an elastic federation brings cells up to date."""

    def open(self, fragment: int, *, is_weighed: bool) -> None:
        """Raise, before the model is read, where no round can be made: the first vote tells all ranks.

        ``is_weighed`` tells whether the caller gave a weight.
        """

    def read(self, *, has_steps: bool) -> None:
        """Look at the model before its values are read; ``has_steps`` tells whether this cell has trained."""

    def begin(self, fragment: int, copy: ModelCopy) -> ModelCopy:
        """Forget a round that was not taken; return what this one has to copy, if that is more than ``copy``."""
        return copy

    def inspect(self, transfer: GroupTransfer, bucket: Bucket, values: torch.Tensor) -> None:
        """Look at what this rank is going to send of a bucket that training changes."""

    def end_inspection(self) -> None:
        """Conclude what :meth:`inspect` has seen."""

    def status(self, fragment: int) -> Mapping[str, Any]:
        """Return fields of this rank's status in the first vote."""
        return {}

    def compare(self, statuses: Sequence[RoundStatus]) -> None:
        """Compare what ranks have told in the first vote; raise on all alike. May communicate over all ranks."""

    def count(self, context: RoundContext, statuses: Sequence[RoundStatus]) -> RoundContext:
        """Add to what a round counts with what all ranks have told; pure."""
        return context

    def check(self, context: RoundContext) -> None:
        """Raise where these cells cannot be combined so; pure, the same on all ranks."""

    def weighed(self, run: RoundRun, context: RoundContext) -> RoundContext:
        """Change what the combiner has weighed the cells with; may communicate over all ranks."""
        return context

    def before_exchange(self, run: RoundRun, context: RoundContext) -> None:
        """Change what is sent, once it is known who contributes; may communicate within the cell."""

    def payload(self, crossing: Crossing) -> ExactValues | None:
        """Return what crosses in place of the values as they are."""
        return None

    def written(self, transfer: GroupTransfer, bucket: Bucket, new: torch.Tensor) -> None:
        """Note what a bucket has become, where it is written during the exchange (``atomic=False``)."""

    def write(self, run: RoundRun, context: RoundContext) -> Iterator[tuple[GroupTransfer, Bucket, torch.Tensor]]:
        """Yield what is written in place of the collected values, behind the second vote."""
        return iter(())

    def result(self, run: RoundRun) -> Mapping[str, Any]:
        """Return fields of this rank's status that tell of the combined values, for the second vote; local."""
        return {}

    def conclude(self, context: RoundContext, statuses: Sequence[RoundStatus]) -> RoundContext:
        """Return the context with what follows from everybody's :meth:`result`; pure, the same on all ranks."""
        return context

    def commit(self, run: RoundRun) -> None:
        """Conclude a round that was taken and written."""

    def report(self) -> Mapping[str, Any]:
        """Return fields of the round's report."""
        return {}

    def end(self) -> None:
        """Conclude a round, also one that moved nothing."""

    @property
    def is_over(self) -> bool:
        """Whether rounds no longer need this stage: it is taken out of their list."""
        return False

    def start_from_model(self) -> None:
        """Go on from the model as it stands, the same in all cells."""

    def forget(self) -> None:
        """Forget what may differ between ranks since a round tore the model."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs, of a stage that has a ``key``."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned."""

    def take_over(self, last: RoundStage) -> None:
        """Go on from what a stage of the same kind remembers of rounds with other cells."""


class PlanStage(RoundStage):
    """Decides in :meth:`read` what else moves in a round, before any other stage looks at that."""


class WeighedStage(RoundStage):
    """Combines some values by other weights than the cells' own."""
