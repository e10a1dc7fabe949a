"""The random numbers of a rank as something that a checkpoint keeps."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from xffl.errors import CheckpointError, ConfigError

__all__ = ["RandomState"]


class RandomState:
    """The generators of Python, NumPy and torch of this process, and of its GPU; give it as ``own`` of a checkpoint.

    Loading sets them to what they were, so that the next numbers are those that would have followed. Generators of
    one's own (``torch.Generator``, ``numpy.random.Generator``) are not among them.

    :param device: The device of this rank; on a GPU its generator is kept, too.
    :raises ConfigError: if the device is none.
    """

    def __init__(self, device: torch.device | str | int | None = None) -> None:
        try:
            self._device = torch.device("cpu" if device is None else device)
        except (RuntimeError, TypeError) as error:
            raise ConfigError(f"device {device!r} is none: {error}; give this rank's device") from error

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each generator; local.

        :return: Plain values and tensors.
        """
        version, numbers, gauss = random.getstate()
        kind, keys, place, has_gauss, cached = np.random.get_state(legacy=True)
        return {
            "python": {"version": version, "numbers": torch.tensor(numbers, dtype=torch.int64), "gauss": gauss},
            "numpy": {
                "kind": str(kind),
                "keys": torch.from_numpy(np.asarray(keys).astype(np.int64)),
                "place": int(place),
                "has_gauss": int(has_gauss),
                "cached": float(cached),
            },
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set each generator to a state; local.

        :param state: What :meth:`state_dict` returned.
        :raises CheckpointError: if it is of a rank with a GPU and this one has none, or the other way round.
        """
        is_cuda = self._device.type == "cuda"
        if (state["cuda"] is not None) != is_cuda:
            was = "had none" if is_cuda else "had a GPU"
            raise CheckpointError(
                f"the random state was saved where a rank {was}, this one works on {self._device}; start on the same "
                "kind of device, or name the random state in reset"
            )
        python, numpy = state["python"], state["numpy"]
        random.setstate((python["version"], tuple(python["numbers"].tolist()), python["gauss"]))
        keys = numpy["keys"].numpy().astype(np.uint32)
        np.random.set_state((numpy["kind"], keys, numpy["place"], numpy["has_gauss"], numpy["cached"]))
        torch.set_rng_state(state["torch"])
        if is_cuda:
            torch.cuda.set_rng_state(state["cuda"], self._device)
