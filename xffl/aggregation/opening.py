"""What a rank opens a round with: it reads the model and says what it found."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from xffl.aggregation.assembly import Assembly
from xffl.aggregation.entries import reshard
from xffl.aggregation.exchange import Findings
from xffl.aggregation.protocol import Opening
from xffl.aggregation.vote import AT_ONCE, NO_ALPHA, Ballot, checked_weight
from xffl.errors import ConfigError, RoundError, XfflError

__all__ = ["open_round"]


def open_round(
    made: Assembly,
    model: nn.Module,
    number: int,
    fragment: int,
    *,
    weight: float | Callable[[], float] | None,
    is_absent: bool = False,
    is_finished: bool = False,
    merging: float = AT_ONCE,
    steps: float = 1.0,
    seconds: float = 0.0,
    prepare: Callable[[], None] | None = None,
) -> Opening:
    """Read the model and fill in this rank's ballot; local. What goes wrong is told to all ranks by the vote.

    :param made: What the aggregator works with.
    :param model: The model.
    :param number: The round's number.
    :param fragment: The part of the model that takes part.
    :param weight: This rank's count, or what returns it; ``None`` where cells count alike.
    :param is_absent: Whether this rank has nothing to contribute.
    :param is_finished: Whether it makes no further step.
    :param merging: As in :class:`~xffl.aggregation.vote.Ballot`; where training goes on meanwhile, all is copied now.
    :param steps: Effective number of this cell's local steps since the last round.
    :param seconds: Seconds of a local step here.
    :param prepare: Called before the model is read.
    :return: The ballot, and what belongs to it.
    """
    error: XfflError | None = None
    count, findings = 0.0, Findings([], False)
    try:
        reshard(model)
        made.manifest.check()
        if made.exchange.agreed is not None:
            made.exchange.agreed.check()
        if prepare is not None:
            prepare()
        if made.options.privacy is not None and weight is not None:
            raise ConfigError("privacy counts all cells alike, since weights tell about the data; give no weight")
        if not is_absent:
            count = 1.0 if weight is None else checked_weight(weight() if callable(weight) else weight)
        findings = made.exchange.look(fragment, is_snapshot=merging != AT_ONCE, keeps_snapshot=merging == NO_ALPHA)
    except XfflError as wrong:
        error = wrong
    except Exception as wrong:  # noqa: BLE001 - told to all ranks
        error = RoundError(f"the round could not be opened: {type(wrong).__name__}: {wrong}")
    masker = made.exchange.masker
    ballot = Ballot(
        round=number,
        weight=count,
        is_uniform=weight is None,
        is_absent=is_absent,
        is_finished=is_finished,
        is_nonfinite=bool(findings.nonfinite),
        is_failed=error is not None,
        is_encoding=made.has_codecs and made.exchange.memory.is_encoding(fragment),
        is_moderate=findings.is_moderate,
        arithmetic=made.arithmetic,
        merging=merging,
        norm=findings.norm,
        steps=steps,
        seconds=seconds,
        attempt=0.0 if masker is None else masker.next_attempt,
    )
    return Opening(ballot, findings.nonfinite, error)
