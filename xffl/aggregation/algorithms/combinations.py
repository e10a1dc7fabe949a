"""Which features of a round go together, and with which models; read where one of them is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xffl.aggregation.algorithms.combiners import Mean, WeightedCombiner
from xffl.errors import ConfigError

if TYPE_CHECKING:
    from xffl.aggregation.engine.planning.tensors import Manifest
    from xffl.aggregation.options import Options

__all__ = ["check_features", "check_protected"]


def check_features(options: Options, combiner: str) -> None:
    """Raise ConfigError where two options exclude each other; local.

    ``combiner`` is the text of the combiner.
    """
    compares = options.combiner.needs_distances
    if options.needs_agreed and not options.atomic:
        raise ConfigError(
            "atomic=False does not go with a server optimizer, privacy, norms, tensor_weights, or a combiner that "
            "scales steps: they need the mean beside the model; leave atomic=True"
        )
    if options.form == "two_hop" and compares:
        raise ConfigError(f"form='two_hop' does not go with {combiner}, which compares whole models")
    if options.privacy is not None:
        if options.privacy.where == "sum" and options.secure is None:
            raise ConfigError(
                "privacy's where='sum' gives a cell's own values too little noise to be seen; use secure sums with "
                "it, or where='cell'"
            )
        if options.privacy.where == "sum" and not isinstance(options.combiner, Mean):
            raise ConfigError(
                f"privacy's where='sum' adds its noise up over cells that count alike, and {combiner} "
                "may let one count for more; use combine='mean', or where='cell'"
            )
        if options.fragments > 1:
            raise ConfigError("privacy clips whole updates, so it needs fragments=1")
    if options.has_norms and (options.privacy is not None or options.secure is not None):
        hint = "leave out norms=True, and rounds that need it"
        if options.combiner.needs_norms:
            hint = f"{combiner} needs it, so give another combiner"
        raise ConfigError(
            f"all cells learn the norm of a cell's update, which privacy and secure=True are to prevent; {hint}"
        )
    if options.tensor_counts is not None and not isinstance(options.combiner, Mean):
        raise ConfigError(
            f"tensor_weights take the place of the cells' weights in the mean, and {combiner} combines "
            "otherwise; leave one of them out"
        )
    if options.tensor_counts is not None and (options.privacy is not None or options.secure is not None):
        raise ConfigError(
            "tensor_weights tell all cells what each has counted, and privacy and secure sums are to hide what a "
            "cell's data are like; leave one of them out"
        )
    if options.secure is not None and (compares or not isinstance(options.combiner, WeightedCombiner)):
        raise ConfigError(f"secure=True shows only a sum, and {combiner} looks at each cell's values; take one")


def check_protected(options: Options, manifest: Manifest) -> None:
    """Raise ConfigError where privacy or secure sums do not go with the model; local."""
    moving = manifest.moving
    if (options.privacy is not None or options.secure is not None) and any(entry.moment for entry in moving):
        raise ConfigError(
            "moments tell of a cell's gradients, and privacy and secure sums are about updates of the model; leave "
            "moments out, or give moments='reset'"
        )
    if options.privacy is not None and (bare := [entry.name for entry in moving if not entry.is_stepped]):
        raise ConfigError(
            f"privacy is for trainable parameters, but {bare[:5]} would cross as they are; give them policy 'local'"
        )
    if options.secure is not None and (bare := [entry.name for entry in moving if entry.policy == "first"]):
        raise ConfigError(f"secure=True hides means, but {bare[:5]} are taken from cell 0; give them policy 'local'")
    encoded = sorted(name for name, codec in manifest.codecs.items() if codec is not None)
    if options.secure is not None and encoded:
        raise ConfigError(f"secure=True adds up fixed-point numbers and goes with no codec such as {encoded[0]!r}")
