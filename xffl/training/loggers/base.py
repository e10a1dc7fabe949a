"""Interface of loggers, which write the values of a run, and pictures as arrays of bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from xffl.errors import ConfigError

__all__ = ["Logger", "check_value_name", "tiled"]


class Logger:
    """Something that keeps values, pictures and texts of one cell, or of the federation.

    One process has it: a cell's first rank, or rank 0 for the federation. All methods are local; overload
    :meth:`log`, and what else it can. ``step`` counts optimizer steps so far, ``samples`` those of the cell, ``epoch``
    is counted from 0, and ``time_s`` is in seconds since 1970.
    """

    def log(self, values: Mapping[str, float], *, step: int, epoch: int, samples: int, time_s: float) -> None:
        """Keep a record of numbers by name, which need not be finite."""
        raise NotImplementedError(f"{type(self).__name__} has no log; overload it")

    def log_image(self, name: str, images: Any, *, step: int) -> None:
        """Keep a picture, or some, as :func:`xffl.training.loggers.base.tiled` takes them, where the logger can."""

    def log_text(self, name: str, text: str, *, step: int) -> None:
        """Keep a text, where the logger can."""

    def log_config(self, values: Mapping[str, Any]) -> None:
        """Keep the configuration, plain values by their dotted names, where the logger can."""

    def cut_after(self, step: int | None) -> None:
        """Let go what belongs to later steps, as a run that is resumed there asks for; ``None``: of all steps."""

    def close(self) -> None:
        """Write what is left, and give everything back."""


def check_value_name(name: object) -> None:
    """Refuse what is not a name of a value: a text that prints."""
    if not isinstance(name, str) or not name or not name.isprintable():
        raise ConfigError(f"the name of a value must be a text such as 'train/loss', got {name!r}")


def tiled(images: Any) -> npt.NDArray[np.uint8]:
    """Return a picture, or several side by side, as bytes of shape (height, width, 3).

    :param images: A tensor or array (height, width), (channels, height, width) or (pictures, channels, height, width)
        of bytes, of truth values, or of fractions from 0 to 1; with 1 or 3 channels.
    :return: The bytes.
    :raises ConfigError: if it is none of these.
    """
    pixels: npt.NDArray[Any]
    if isinstance(images, torch.Tensor):
        values = images.detach().cpu()
        pixels = (values.float() if values.is_floating_point() else values).numpy()  # numpy has no bfloat16
    else:
        pixels = np.asarray(images)
    pixels = pixels[(None,) * (4 - pixels.ndim)] if 2 <= pixels.ndim < 4 else pixels
    if pixels.ndim != 4 or pixels.shape[1] not in (1, 3) or not pixels.size:
        raise ConfigError(
            "a picture must have shape (height, width), (channels, height, width) or (pictures, channels, height, "
            f"width) with 1 or 3 channels, got {pixels.shape}"
        )
    if np.issubdtype(pixels.dtype, np.floating):
        low, high = float(pixels.min()), float(pixels.max())
        if not (low >= 0 and high <= 1):
            raise ConfigError(f"a picture has values from {low:g} to {high:g}; give fractions from 0 to 1, or bytes")
        pixels = np.round(pixels * 255).astype(np.uint8)
    elif pixels.dtype == np.bool_:
        pixels = pixels.astype(np.uint8) * 255
    elif pixels.dtype != np.uint8:
        raise ConfigError(f"a picture is of {pixels.dtype}; give uint8 from 0 to 255, or fractions from 0 to 1")
    row = np.concatenate(list(pixels), axis=2)  # (channels, height, pictures * width)
    return np.ascontiguousarray(np.broadcast_to(row, (3, *row.shape[1:])).transpose(1, 2, 0))
