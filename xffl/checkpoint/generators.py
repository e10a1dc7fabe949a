"""Random generators of a process in a checkpoint: those of Python, NumPy and torch, and a program's own."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from xffl.checkpoint.contents import describe_difference
from xffl.errors import CheckpointError, ConfigError

__all__ = ["Generator", "RandomState"]

Generator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random
"""What a program may draw random numbers from."""


def _python_state(state: Any) -> dict[str, Any]:
    version, numbers, gauss = state
    return {"version": version, "numbers": torch.tensor(numbers, dtype=torch.int64, device="cpu"), "gauss": gauss}


def _python_state_from(state: Mapping[str, Any]) -> Any:
    return state["version"], tuple(state["numbers"].tolist()), state["gauss"]


def _numpy_state(state: Any) -> dict[str, Any]:
    kind, keys, place, has_gauss, cached = state
    return {
        "kind": str(kind),
        "keys": torch.from_numpy(np.asarray(keys).astype(np.int64)),
        "place": int(place),
        "has_gauss": int(has_gauss),
        "cached": float(cached),
    }


def _numpy_state_from(state: Mapping[str, Any]) -> Any:
    keys = state["keys"].numpy().astype(np.uint32)
    return state["kind"], keys, state["place"], state["has_gauss"], state["cached"]


def _kind_of(generator: Generator) -> str:
    """Name what a generator's state fits: its class, and the algorithm or kind of device."""
    if isinstance(generator, torch.Generator):
        return f"torch.Generator on {generator.device.type}"
    if isinstance(generator, np.random.Generator):
        return f"numpy.random.Generator of {type(generator.bit_generator).__name__}"
    if isinstance(generator, np.random.RandomState):
        return "numpy.random.RandomState"
    return "random.Random"


def _state_of(generator: Generator) -> dict[str, Any]:
    """Return the state of a program's generator as plain values and tensors."""
    state: Any
    if isinstance(generator, torch.Generator):
        state = generator.get_state()
    elif isinstance(generator, np.random.Generator):
        # Integers of 128 bits and arrays of them, which JSON keeps whole as decimal numbers.
        state = _plain_numbers(generator.bit_generator.state)
    elif isinstance(generator, np.random.RandomState):
        state = _numpy_state(generator.get_state(legacy=True))
    else:
        state = _python_state(generator.getstate())
    return {"kind": _kind_of(generator), "state": state}


def _set_state(generator: Generator, state: Any) -> None:
    """Set a program's generator to a state that :func:`_state_of` has returned."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(_numpy_state_from(state))
    else:
        generator.setstate(_python_state_from(state))


def _plain_numbers(value: Any) -> Any:
    """Return a state of NumPy with lists of Python's numbers in the place of arrays."""
    if isinstance(value, dict):
        return {key: _plain_numbers(one) for key, one in value.items()}
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value


class RandomState:
    """The generators of Python, NumPy and torch of this process, and of its GPU; give it as ``own`` of a checkpoint.

    Loading sets them to what they were, so that the next numbers are those that would have followed. Generators that a
    program makes are kept if they are given by name.

    :param device: The device of this rank; on a GPU its generator is kept, too.
    :param generators: A program's own generators by name: :class:`torch.Generator` of any device,
        :class:`numpy.random.Generator`, :class:`numpy.random.RandomState` or :class:`random.Random`. Loading sets these
        objects, so whatever draws from them (a sampler, a loader) goes on. The names are those that were saved.
    :raises ConfigError: if the device is invalid, or a generator is of another kind.
    """

    def __init__(
        self,
        device: torch.device | str | int | None = None,
        generators: Mapping[str, Generator] | None = None,
    ) -> None:
        try:
            self._device = torch.device("cpu" if device is None else device)
        except (RuntimeError, TypeError) as error:
            raise ConfigError(f"device must be this rank's device, got {device!r}: {error}") from error
        if not isinstance(generators, Mapping | None):
            raise ConfigError(f"generators is {type(generators).__name__}; give a mapping by name, as {{'data': it}}")
        self._generators = dict(generators or {})
        for name, generator in self._generators.items():
            if not isinstance(name, str) or not isinstance(generator, Generator):
                raise ConfigError(
                    f"generator {name!r} is {type(generator).__name__}; give a torch.Generator, "
                    "numpy.random.Generator, numpy.random.RandomState or random.Random by a name that is a string"
                )
            if isinstance(generator, random.SystemRandom):
                raise ConfigError(
                    f"generator {name!r} is {type(generator).__name__}, which has no state to keep; give a "
                    "random.Random, or leave it out"
                )

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each generator as plain values and tensors; local."""
        state: dict[str, Any] = {
            "python": _python_state(random.getstate()),
            "numpy": _numpy_state(np.random.get_state(legacy=True)),
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None,
        }
        if self._generators:
            state["generators"] = {name: _state_of(one) for name, one in self._generators.items()}
        return state

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise where a state does not fit the generators that are here; local, and nothing is changed.

        :param state: What :meth:`state_dict` has returned, on a device of the same kind.
        :raises CheckpointError: if the names or kinds of the generators are others, or the kind of the device.
        """
        is_cuda = self._device.type == "cuda"
        if (state["cuda"] is not None) != is_cuda:
            was = "had none" if is_cuda else "had a GPU"
            raise CheckpointError(
                f"the random state was saved where a rank {was}, this one works on {self._device}; start on the same "
                "kind of device, or name the random state in reset"
            )
        saved = state.get("generators", {})
        if difference := describe_difference(set(self._generators), set(saved)):
            raise CheckpointError(
                f"the random state has the generators {sorted(saved)}: {difference}; give RandomState(generators=...) "
                "the names that were saved, or name the random state in reset"
            )
        for name, generator in self._generators.items():
            if (kind := _kind_of(generator)) != saved[name]["kind"]:
                raise CheckpointError(
                    f"generator {name!r} was saved as {saved[name]['kind']} and is {kind} here; give one of the same "
                    "kind on the same kind of device, or name the random state in reset"
                )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set each generator to what :meth:`state_dict` returned, on a device of the same kind; local."""
        self.check_state(state)
        saved = state.get("generators", {})
        random.setstate(_python_state_from(state["python"]))
        np.random.set_state(_numpy_state_from(state["numpy"]))
        torch.set_rng_state(state["torch"])
        for name, generator in self._generators.items():
            _set_state(generator, saved[name]["state"])
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda"], self._device)
