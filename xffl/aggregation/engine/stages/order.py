"""The order of what features do to a round.

Stages are combined freely but for what :mod:`xffl.aggregation.options` refuses. The first round's comparison looks at
values before any other, and what moves is decided before it is read. What combines values by other weights encodes
them, too, where there are codecs, so it comes before these; codecs come before masks, which they never meet;
what leaves is clipped and noised once its masks are ready; the step is clipped before the server rule, which is last,
since it writes.
"""

from __future__ import annotations

from collections.abc import Iterable

from xffl.aggregation.engine.stages.agreed import AgreedModel
from xffl.aggregation.engine.stages.codecs import Codecs
from xffl.aggregation.engine.stages.first_round import FirstRound
from xffl.aggregation.engine.stages.masks import Masks
from xffl.aggregation.engine.stages.norms import Norms
from xffl.aggregation.engine.stages.privacy import Protection
from xffl.aggregation.engine.stages.server_clip import ServerClip
from xffl.aggregation.engine.stages.stage import PlanStage, RoundStage, WeighedStage
from xffl.aggregation.engine.stages.weighing import ToldWeights

__all__ = ["ORDER", "in_order"]

ORDER: tuple[type[RoundStage], ...] = (
    FirstRound,
    PlanStage,
    ToldWeights,
    WeighedStage,
    Codecs,
    Masks,
    Protection,
    Norms,
    ServerClip,
    AgreedModel,
)
"""The kinds of stages, as a round goes through them."""


def in_order(stages: Iterable[RoundStage]) -> tuple[RoundStage, ...]:
    """Return the stages of a round; each kind once, in the order of :data:`ORDER`."""
    found = tuple(stages)
    places = [next(place for place, kind in enumerate(ORDER) if isinstance(stage, kind)) for stage in found]
    assert places == sorted(set(places)), f"stages {[type(stage).__name__ for stage in found]} are out of order"
    return found
