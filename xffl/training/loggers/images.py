"""Pictures as arrays of bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from xffl.errors import ConfigError
from xffl.extras import optional_import

__all__ = ["tiled", "write_png"]

CHANNELS = (1, 3)


def tiled(images: Any) -> npt.NDArray[np.uint8]:
    """Return a picture, or several side by side, as bytes.

    :param images: A tensor or array (height, width), (channels, height, width) or (pictures, channels, height, width)
        of bytes, of truth values, or of fractions from 0 to 1; with 1 or 3 channels.
    :return: Shape (height, width, 3).
    :raises ConfigError: if it is none of these.
    """
    given: npt.NDArray[Any]
    if isinstance(images, torch.Tensor):
        values = images.detach().cpu()
        given = (values.float() if values.is_floating_point() else values).numpy()  # numpy has no bfloat16
    else:
        given = np.asarray(images)
    given = given[(None,) * (4 - given.ndim)] if 2 <= given.ndim < 4 else given
    if given.ndim != 4 or given.shape[1] not in CHANNELS or not given.size:
        raise ConfigError(
            f"a picture of shape {given.shape} is none; give (height, width), (channels, height, width) or (pictures, "
            "channels, height, width) with 1 or 3 channels"
        )
    if np.issubdtype(given.dtype, np.floating):
        low, high = float(given.min()), float(given.max())
        if not (low >= 0 and high <= 1):
            raise ConfigError(f"a picture has values from {low:g} to {high:g}; give fractions from 0 to 1, or bytes")
        given = np.round(given * 255).astype(np.uint8)
    elif given.dtype == np.bool_:
        given = given.astype(np.uint8) * 255
    elif given.dtype != np.uint8:
        raise ConfigError(f"a picture is of {given.dtype}; give uint8 from 0 to 255, or fractions from 0 to 1")
    row = np.concatenate(list(given), axis=2)  # (channels, height, pictures * width)
    return np.ascontiguousarray(np.broadcast_to(row, (3, *row.shape[1:])).transpose(1, 2, 0))


def write_png(path: Path, images: Any) -> None:
    """Write a picture, or several side by side, as a PNG file.

    :param path: The file.
    :param images: As :func:`tiled` takes them.
    :raises ConfigError: if it is no picture, or Pillow is not installed.
    """
    with optional_import("report", "log_image needs Pillow, a part of matplotlib's installation"):
        from PIL import Image
    Image.fromarray(tiled(images)).save(path)
