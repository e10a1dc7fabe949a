"""Options of an aggregator, and which of them go together."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch

from xffl.aggregation.algorithms.combiners import Combiner, Coordinatewise, Mean, WeightedCombiner
from xffl.aggregation.algorithms.registry import make
from xffl.aggregation.algorithms.server_optimizer import ServerOptimizer, server_of
from xffl.aggregation.privacy import Privacy, SecureSum
from xffl.checks import integer, number, one_of
from xffl.costs import FORMS
from xffl.errors import ConfigError
from xffl.naming import Writer

if TYPE_CHECKING:
    from xffl.aggregation.algorithms.tensor_weights import TensorCounts, TensorWeights
    from xffl.aggregation.engine.planning.tensors import Manifest

__all__ = ["DEFAULT_BUCKET_BYTES", "REMOVED", "Options", "check_merge", "refuse_removed"]


NONFINITE = ("reject", "drop_cell")

REMOVED = {
    "server_step": "each rank takes the server's step of what it holds now, with equal bits on all ranks; leave it out"
}
"""Options that there were once, and what has come in their place"""

DEFAULT_BUCKET_BYTES = 4 * 2**20
"""Bytes of a bucket where nothing is said: enough to hide a call's cost, few enough to overlap."""


@dataclass(frozen=True)
class Options:
    """The options of :class:`xffl.Aggregator`, checked; their text is the same on ranks that were given the same."""

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
    tensor_counts: TensorCounts | None = None

    def __str__(self) -> str:
        return ", ".join(f"{one.name}={_text(getattr(self, one.name))}" for one in fields(self))

    @property
    def is_mean(self) -> bool:
        """Whether rounds take the plain mean, which is one of any number of cells."""
        return type(self.combiner) is Mean

    @property
    def has_norms(self) -> bool:
        """Whether each cell measures its update."""
        return self.norms or self.combiner.needs_norms

    @property
    def needs_agreed(self) -> bool:
        """Whether the last agreed model is kept."""
        kept_by = (self.server, self.privacy, self.tensor_counts)
        return self.has_norms or self.combiner.has_scale or any(one is not None for one in kept_by)

    @classmethod
    def of(
        cls,
        *,
        combine: object,
        server: object,
        privacy: object,
        secure: object,
        tensor_weights: TensorWeights | None = None,
        **plain: Any,
    ) -> Options:
        """Read the options of an aggregator; raise ConfigError if one is invalid, or two do not go together; local."""
        hint = f"give bytes, such as {DEFAULT_BUCKET_BYTES}"
        plain["bucket_bytes"] = integer("bucket_bytes", plain["bucket_bytes"], hint=hint)
        plain["fragments"] = integer("fragments", plain["fragments"], hint="give the parts to exchange in turn")
        for switch in ("atomic", "rails", "overlap", "norms"):
            one_of(switch, plain[switch], (True, False))
        one_of("nonfinite", plain["nonfinite"], NONFINITE)
        one_of("form", plain["form"], FORMS)
        if inspect.isclass(combine):
            raise ConfigError(
                f"combine {combine.__module__}.{combine.__qualname__} is a class; give an object of it: write "
                f"{combine.__name__}()"
            )
        combiner = Mean() if combine == "mean" else make("combine", combine, writer=Writer.USER)
        if not isinstance(combiner, Coordinatewise | WeightedCombiner):
            raise ConfigError(
                f"combine must be a Combiner (derive it from Coordinatewise or WeightedCombiner), got {combine!r}"
            )
        optimizer = None if server is None else server_of(server, writer=Writer.USER)
        private = None if privacy is None else make("privacy", privacy, writer=Writer.USER)
        if not isinstance(private, Privacy | None):
            raise ConfigError(f"privacy must be a xffl.aggregation.privacy.Privacy, got {privacy!r}")
        sums = (
            None if secure is False else SecureSum() if secure is True else make("privacy", secure, writer=Writer.USER)
        )
        if not isinstance(sums, SecureSum | None):
            raise ConfigError(f"secure must be True, False or a SecureSum, got {secure!r}")
        counts = None
        if tensor_weights is not None:
            from xffl.aggregation.algorithms.tensor_weights import TensorCounts

            counts = TensorCounts(tensor_weights, plain["fragments"])
        options = cls(**plain, combiner=combiner, server=optimizer, privacy=private, secure=sums, tensor_counts=counts)
        options._check_together()
        return options

    def _check_together(self) -> None:
        """Raise where two options exclude each other."""
        if self.overlap and not self.atomic:
            raise ConfigError(
                "overlap=True needs atomic=True: the model trains on while its mean is collected beside it"
            )
        if not self.is_mean or self.needs_agreed or self.secure is not None:
            from xffl.aggregation.algorithms.combinations import check_features

            check_features(self, _text(self.combiner))

    def check_model(self, manifest: Manifest, device: torch.device) -> None:
        """Raise where an option does not go with the model or the device."""
        if self.privacy is not None or self.secure is not None:
            from xffl.aggregation.algorithms.combinations import check_protected

            check_protected(self, manifest)
        if self.overlap and device.type == "cuda" and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
            raise ConfigError(
                "CUDA_DEVICE_MAX_CONNECTIONS=1 lets a GPU begin one thing at a time, so that rounds behind local steps "
                "(overlap=True) and the steps would wait for each other; leave it out, or set 8 or more"
            )

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


def refuse_removed(names: Iterable[str]) -> None:
    """Raise ConfigError where one is the name of an option that there is no more, TypeError for any other; local."""
    for name in names:
        if name not in REMOVED:
            raise TypeError(f"Aggregator() got an unexpected keyword argument {name!r}")
        raise ConfigError(f"aggregator option {name!r} is gone: {REMOVED[name]}")


def check_merge(alpha: object) -> None:
    """Raise ConfigError unless the part of a local value that stays is ``None`` or a number in [0, 1); local."""
    if alpha is not None:
        hint = "give the part of the local value that stays, or None to keep the steps made meanwhile"
        number("alpha", alpha, 0.0, below=1.0, hint=hint)
