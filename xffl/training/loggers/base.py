"""Loggers: where the values of a run are written to, behind one interface."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from xffl.errors import ConfigError

__all__ = ["Logger", "check_value_name"]


class Logger:
    """Something that keeps values, pictures and texts of one cell, or of the federation.

    One process has it: a cell's first rank, or rank 0 for the federation. All methods are local; overload
    :meth:`log`, and what else it can.
    """

    def log(self, values: Mapping[str, float], *, step: int, epoch: int, samples: int, time_s: float) -> None:
        """Keep a record.

        :param values: Numbers by name, which need not be finite.
        :param step: Optimizer steps so far.
        :param epoch: The epoch, from 0.
        :param samples: Samples so far.
        :param time_s: When, in seconds since 1970.
        """
        raise NotImplementedError(f"{type(self).__name__} has no log; overload it")

    def log_image(self, name: str, images: Any, *, step: int) -> None:
        """Keep pictures, where the logger can.

        :param name: Their name.
        :param images: A picture, or some, as :func:`xffl.training.loggers.images.tiled` takes them.
        :param step: Optimizer steps so far.
        """

    def log_text(self, name: str, text: str, *, step: int) -> None:
        """Keep a text, where the logger can.

        :param name: Its name.
        :param text: The text.
        :param step: Optimizer steps so far.
        """

    def log_config(self, values: Mapping[str, Any]) -> None:
        """Keep the configuration, where the logger can.

        :param values: Plain values by their dotted names.
        """

    def cut_after(self, step: int | None) -> None:
        """Let go what belongs to later steps, as a run that is resumed asks for, where the logger can.

        :param step: The last step that stays; ``None`` where nothing does.
        """

    def close(self) -> None:
        """Write what is left, and give everything back."""


def check_value_name(name: object) -> None:
    """Refuse what is no name of a value.

    :param name: The name.
    :raises ConfigError: if it is no text, empty, or has characters that do not print.
    """
    if not isinstance(name, str) or not name or not name.isprintable():
        raise ConfigError(f"{name!r} is no name of a value; give a text such as 'train/loss'")
