"""What an aggregator may be asked for."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from xffl.aggregation.algorithms.combiners import Combiner, Coordinatewise, Mean, WeightedCombiner
from xffl.aggregation.algorithms.registry import make
from xffl.aggregation.algorithms.server import ServerOptimizer, server_of
from xffl.aggregation.privacy.differential import Privacy
from xffl.aggregation.privacy.secure_sum import SecureSum
from xffl.checks import integer
from xffl.costs import FORMS
from xffl.errors import ConfigError

__all__ = ["DEFAULT_BUCKET_BYTES", "Options", "check_merge"]


NONFINITE = ("reject", "drop_cell")

DEFAULT_BUCKET_BYTES = 4 * 2**20
"""Bytes of a bucket where nothing is said: enough to hide a call's cost, few enough to overlap."""


@dataclass(frozen=True)
class Options:
    """The options of :class:`xffl.Aggregator`, which describes them, checked.

    Their text is the same on ranks that were given the same.
    """

    bucket_bytes: int
    atomic: bool
    nonfinite: str
    form: str
    rails: bool
    fragments: int
    overlap: bool
    combiner: Combiner
    server: ServerOptimizer | None
    privacy: Privacy | None
    secure: SecureSum | None
    norms: bool

    def __str__(self) -> str:
        return ", ".join(f"{one.name}={_text(getattr(self, one.name))}" for one in fields(self))

    @property
    def has_norms(self) -> bool:
        """Whether each cell measures its update."""
        return self.norms or (isinstance(self.combiner, WeightedCombiner) and self.combiner.needs_norms)

    @property
    def needs_agreed(self) -> bool:
        """Whether the last agreed model is kept."""
        has_scale = isinstance(self.combiner, WeightedCombiner) and self.combiner.has_scale
        return self.has_norms or has_scale or self.server is not None or self.privacy is not None

    @classmethod
    def of(cls, *, combine: object, server: object, privacy: object, secure: object, **plain: Any) -> Options:
        """Read and check the options of an aggregator; local.

        Raises ConfigError if one is invalid, or two do not go together.
        """
        plain |= _check_plain(**plain)
        combiner = make("combine", combine)
        if not isinstance(combiner, Coordinatewise | WeightedCombiner):
            raise ConfigError(f"combine {combine!r} is no Combiner; derive it from Coordinatewise or WeightedCombiner")
        optimizer = server_of(server)
        private = None if privacy is None else make("privacy", privacy)
        if not isinstance(private, Privacy | None):
            raise ConfigError(
                f"privacy {privacy!r} is no Privacy; give xffl.aggregation.privacy.differential.Privacy(clip, noise)"
            )
        sums = None if secure is False else SecureSum() if secure is True else make("privacy", secure)
        if not isinstance(sums, SecureSum | None):
            raise ConfigError(f"secure {secure!r} is neither True nor False, nor a SecureSum; give one of them")
        options = cls(**plain, combiner=combiner, server=optimizer, privacy=private, secure=sums)
        options._check_together()
        return options

    def _check_together(self) -> None:
        """Raise where two options exclude each other."""
        compares = isinstance(self.combiner, WeightedCombiner) and self.combiner.needs_distances
        if self.overlap and not self.atomic:
            raise ConfigError(
                "overlap=True needs atomic=True: the model trains on while its mean is collected beside it"
            )
        if self.needs_agreed and not self.atomic:
            raise ConfigError(
                "atomic=False does not go with a server optimizer, privacy, norms, or a combiner that scales steps: "
                "they need the mean beside the model; leave atomic=True"
            )
        if self.form == "two_hop" and compares:
            raise ConfigError(f"form='two_hop' does not go with {_text(self.combiner)}, which compares whole models")
        if self.privacy is not None:
            self.privacy.check(is_secure=self.secure is not None)
            if self.privacy.where == "sum" and not isinstance(self.combiner, Mean):
                raise ConfigError(
                    f"privacy's where='sum' adds its noise up over cells that count alike, and {_text(self.combiner)} "
                    "may let one count for more; use combine='mean', or where='cell'"
                )
            if self.fragments > 1:
                raise ConfigError("privacy clips whole updates, so it needs fragments=1")
        if self.has_norms and (self.privacy is not None or self.secure is not None):
            raise ConfigError(
                "the norm of a cell's update is told to all cells, which privacy and secure=True are to prevent; leave "
                f"out norms=True, rounds that need it, and combiners such as {_text(self.combiner)} that ask for it"
            )
        if self.secure is not None and (compares or not isinstance(self.combiner, WeightedCombiner)):
            raise ConfigError(
                f"secure=True shows only a sum, and {_text(self.combiner)} looks at each cell's values; take one"
            )

    @property
    def allow_deferred_mean(self) -> bool:
        """Whether the mean may be taken when it is written, after the last vote: nothing else reads or changes it."""
        is_plain = self.atomic and not self.overlap and self.nonfinite == "reject" and self.secure is None
        is_mean = isinstance(self.combiner, WeightedCombiner) and not self.combiner.needs_distances
        return is_plain and is_mean and not self.needs_agreed

    @property
    def form_of_groups(self) -> str:
        """How values reach all cells: all of them to all cells, where each cell is to judge them by itself."""
        is_mean = isinstance(self.combiner, WeightedCombiner) and not self.combiner.needs_distances
        return "all_gather" if self.form == "auto" and not is_mean else self.form


def _text(value: object) -> str:
    """Return a text that is the same on all ranks for the same value."""
    if type(value).__repr__ is object.__repr__:
        return f"{type(value).__module__}.{type(value).__qualname__}({vars(value)})"
    return str(value)


def _check_plain(
    *,
    bucket_bytes: object,
    atomic: object,
    nonfinite: object,
    form: object,
    rails: object,
    fragments: object,
    overlap: object,
    norms: object,
) -> dict[str, int]:
    """Check the options that are numbers, switches and names; return the numbers as plain ones."""
    numbers = {
        "bucket_bytes": integer("bucket_bytes", bucket_bytes, hint=f"give bytes, such as {DEFAULT_BUCKET_BYTES}"),
        "fragments": integer("fragments", fragments, hint="give the parts to exchange in turn"),
    }
    for what, switch in (("atomic", atomic), ("rails", rails), ("overlap", overlap), ("norms", norms)):
        if not isinstance(switch, bool):
            raise ConfigError(f"{what} {switch!r} is neither True nor False; give one of them")
    for what, choice, choices in (("nonfinite", nonfinite, NONFINITE), ("form", form, FORMS)):
        if choice not in choices:
            raise ConfigError(f"{what} {choice!r} is unknown; choose one of {', '.join(choices)}")
    return numbers


def check_merge(alpha: object) -> None:
    """Check how a delayed mean is to be merged; local.

    :param alpha: ``None``, or the part of a local value that stays.
    :raises ConfigError: if it is no number from 0 to 1, 1 excluded.
    """
    if alpha is None:
        return
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not 0.0 <= alpha < 1.0:
        raise ConfigError(
            f"alpha {alpha!r} is no number from 0 to below 1; give the part of the local value that stays, or None to "
            "keep the steps made meanwhile"
        )
