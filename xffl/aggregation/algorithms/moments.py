"""What rounds do with the moments of the cells' optimizers: nothing, their mean now and then, or a fresh start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from xffl.aggregation.algorithms.registry import read_spec
from xffl.checks import integer, one_of, real
from xffl.errors import ConfigError

__all__ = ["MODES", "Moments", "moments_of"]

MODES: Mapping[str, str] = {
    "local": "each cell keeps the moments of its own steps",
    "average": "rounds also take the mean of the cells' moments",
    "reset": "each cell's moments start anew after a round",
}
"""What may happen to moments, with a line about it."""


@dataclass(frozen=True)
class Moments:
    """What rounds do with the tensors that optimizers keep beside the parameters, such as Adam's moments.

    ``average`` moves them in the round that moves their parameters, with the weights of that round: Local Adam (Cheng
    and Glasgow, 2024, arXiv 2409.13155) in every round, DES-LOC (Iacob et al., 2025, arXiv 2505.22549) more rarely than
    the parameters, second moments more rarely than first. A period is a number of rounds that move the parameter:
    with fragments, of rounds of its fragment.

    :param mode: ``average`` or ``reset``, or ``local``, where nothing happens.
    :param every: The period of those that have none of their own, at least 1.
    :param periods: Periods by the name that the optimizer's state has for a tensor (``exp_avg``, ``exp_avg_sq``,
        ``momentum_buffer``). Not with ``reset``, which starts all of them anew, with the count of steps.
    :raises ConfigError: if an argument is invalid.
    """

    mode: str = "average"
    every: int = 1
    periods: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        one_of("moments", self.mode, MODES)
        hint = "give a number of rounds"
        object.__setattr__(self, "every", integer("every of moments", self.every, hint=hint))
        periods = {name: integer(f"{name} of moments", value, hint=hint) for name, value in self.periods.items()}
        object.__setattr__(self, "periods", periods)
        if self.mode == "local" and (periods or self.every != 1):
            raise ConfigError(f"moments 'local' stay where they are and have no period; got {self}")
        if self.mode == "reset" and periods:
            raise ConfigError(
                f"moments 'reset' start all anew together, since they share a count of steps, but {sorted(periods)} "
                "have periods; write reset:every=2"
            )

    def __str__(self) -> str:
        options = {"every": self.every, **self.periods} if self.every != 1 else dict(self.periods)
        return ":".join(
            [self.mode, *([",".join(f"{key}={value}" for key, value in options.items())] if options else [])]
        )

    def period(self, name: str) -> int:
        """Return in which rounds a tensor takes part: every so many.

        :param name: What the optimizer's state calls it.
        :return: The number of rounds.
        """
        return self.periods.get(name, self.every)


def moments_of(spec: object) -> Moments | None:
    """Read what is to happen to moments; local, without torch.

    :param spec: ``average``, ``reset`` or ``local``, with periods (``average:exp_avg=3,exp_avg_sq=6``), the same as a
        mapping with ``name``, or :class:`Moments`.
    :return: What it says; ``None`` for ``local`` and for ``None``.
    :raises ConfigError: if it cannot be read.
    """
    if spec is None:
        return None
    read = spec
    if not isinstance(spec, Moments):
        mode, options = read_spec("moments", spec)
        given = {name: _number(value) for name, value in options.items()}
        every = given.pop("every", 1)
        read = Moments(mode, every, given)  # type: ignore[arg-type]
    assert isinstance(read, Moments)
    return None if read.mode == "local" else read


def _number(value: object) -> object:
    """Return the number that a text of a spec is, or what was given."""
    number = real(value) if isinstance(value, str) else None
    return value if number is None or not number.is_integer() else int(number)
