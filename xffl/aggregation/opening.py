"""What a rank opens a round with: it reads the model and says what it found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from xffl.aggregation.assembly import Assembly
from xffl.aggregation.looks import Findings
from xffl.aggregation.protocol import Opening
from xffl.aggregation.vote import AT_ONCE, NO_ALPHA, Ballot, checked_number, checked_weight
from xffl.distributed.sharding import reshard
from xffl.errors import ConfigError, RoundError, XfflError
from xffl.parallel.zero import refresh_view

__all__ = ["Contribution", "open_round"]


@dataclass(frozen=True)
class Contribution:
    """What a rank gives to a round, and what it says of itself.

    :param weight: Its own count since the last round (samples, tokens), or a function that returns it; not read where
        ``is_absent``. ``None`` on all ranks: every cell counts 1.
    :param is_absent: Count as 0: the round's result is taken over, nothing is contributed.
    :param is_finished: Say that this rank makes no further step; the report's ``is_last`` tells that all have.
    :param steps: Effective number of this cell's local steps since the last round, for combiners that ask for it.
    :param seconds: Seconds of a local step here, told to all in the report; 0 where nobody has measured.
    :param prepare: Called before the model is read; what it raises is told to all ranks.
    """

    weight: float | Callable[[], float] | None = None
    is_absent: bool = False
    is_finished: bool = False
    steps: float = 1.0
    seconds: float = 0.0
    prepare: Callable[[], None] | None = None


def open_round(
    made: Assembly, model: nn.Module, number: int, fragment: int, given: Contribution, merging: float = AT_ONCE
) -> Opening:
    """Read the model and fill in this rank's ballot; local. What goes wrong is told to all ranks by the vote.

    :param made: What the aggregator works with.
    :param model: The model.
    :param number: The round's number.
    :param fragment: The part of the model that takes part.
    :param given: What this rank gives.
    :param merging: As in :class:`~xffl.aggregation.vote.Ballot`; where training goes on meanwhile, all is copied now.
    :return: The ballot, and what belongs to it.
    """
    error: XfflError | None = None
    count = steps = seconds = 0.0
    findings = Findings([], False)
    try:
        reshard(model)
        refresh_view(model)
        made.manifest.check()
        if made.exchange.agreed is not None:
            made.exchange.agreed.check(fragment)
        if given.prepare is not None:
            given.prepare()
        steps = checked_number("steps", given.steps, "give the effective number of local steps")
        seconds = checked_number("seconds", given.seconds, "give those of a local step, or 0")
        if made.options.privacy is not None and given.weight is not None:
            raise ConfigError("privacy counts all cells alike, since weights tell about the data; give no weight")
        if not given.is_absent:
            weight = given.weight
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
        is_uniform=given.weight is None,
        is_absent=given.is_absent,
        is_finished=given.is_finished,
        is_nonfinite=bool(findings.nonfinite),
        is_failed=error is not None,
        is_encoding=made.has_codecs and made.exchange.memory.is_encoding(fragment),
        is_moderate=findings.is_moderate,
        arithmetic=made.arithmetic,
        merging=merging if error is None else AT_ONCE,
        norm=findings.norm,
        steps=steps,
        seconds=seconds,
        attempt=0.0 if masker is None else masker.next_attempt,
    )
    return Opening(ballot, findings.nonfinite, error)
