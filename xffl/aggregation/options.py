"""What an aggregator may be asked for."""

from __future__ import annotations

from xffl.aggregation.plan import FORMS
from xffl.errors import ConfigError

__all__ = ["DEFAULT_BUCKET_BYTES", "check_merge", "check_options"]

NONFINITE = ("reject", "drop_cell")

DEFAULT_BUCKET_BYTES = 4 * 2**20
"""Bytes of a bucket where nothing is said: enough to hide a call's cost, few enough to overlap."""


def check_options(
    bucket_bytes: object,
    atomic: object,
    nonfinite: object,
    form: object,
    rails: object,
    fragments: object,
    overlap: object,
) -> str:
    """Check what :class:`xffl.Aggregator` was given; local.

    :param bucket_bytes: A positive whole number.
    :param atomic: True or False.
    :param nonfinite: ``reject`` or ``drop_cell``.
    :param form: One of :data:`xffl.aggregation.plan.FORMS`.
    :param rails: True or False.
    :param fragments: A positive whole number.
    :param overlap: True or False; needs ``atomic``.
    :return: All of it as text, to be compared over the ranks.
    :raises ConfigError: if one cannot be meant.
    """
    if isinstance(bucket_bytes, bool) or not isinstance(bucket_bytes, int) or bucket_bytes < 1:
        raise ConfigError(
            f"bucket_bytes {bucket_bytes!r} is no positive whole number; give bytes, such as {DEFAULT_BUCKET_BYTES}"
        )
    for what, switch in (("atomic", atomic), ("rails", rails), ("overlap", overlap)):
        if not isinstance(switch, bool):
            raise ConfigError(f"{what} {switch!r} is neither True nor False; give one of them")
    for what, choice, choices in (("nonfinite", nonfinite, NONFINITE), ("form", form, FORMS)):
        if choice not in choices:
            raise ConfigError(f"{what} {choice!r} is unknown; choose one of {', '.join(choices)}")
    if isinstance(fragments, bool) or not isinstance(fragments, int) or fragments < 1:
        raise ConfigError(f"fragments {fragments!r} is no positive whole number; give the parts to exchange in turn")
    if overlap and not atomic:
        raise ConfigError("overlap=True needs atomic=True: the model trains on while its mean is collected beside it")
    return (
        f"{bucket_bytes} bytes a bucket, atomic={atomic}, nonfinite={nonfinite}, form={form}, rails={rails}, "
        f"fragments={fragments}, overlap={overlap}"
    )


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
