"""Python values as JSON and back: the same value comes out, tensors are only named, and nothing is ever pickled."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from numbers import Integral, Real
from typing import Any

import torch

from xffl.errors import ConfigError

__all__ = ["Plain", "from_plain", "tensors_named", "to_plain"]

Plain = None | bool | int | float | str | list[Any] | dict[str, Any]
"""What JSON can hold."""

TAGS = ("__tensor__", "__tuple__", "__pairs__", "__counter__", "__float__")
"""The only keys of a JSON object that stands for something that JSON does not have."""


def to_plain(value: Any, path: str, tensors: dict[str, torch.Tensor] | None = None) -> Plain:
    """Write a value as what JSON can hold; its tensors are put aside and named by where they stand.

    :param value: Numbers, strings, booleans, ``None``, and lists, tuples, dictionaries and counters of them.
    :param path: Where the value stands: for messages, and the beginning of the names of its tensors.
    :param tensors: Takes the tensors by name; ``None`` where there must be none.
    :return: What :func:`from_plain` reads.
    :raises ConfigError: if something cannot be kept this way.
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        number = float(value)
        return number if math.isfinite(number) else {"__float__": repr(number)}
    if isinstance(value, torch.Tensor):
        if tensors is None:
            raise ConfigError(f"{path} is a tensor, but values are plain Python values; give tensors as a part")
        if path in tensors:
            raise ConfigError(f"two tensors are called {path!r}; rename one of them")
        tensors[path] = value
        return {"__tensor__": path}
    if isinstance(value, Mapping):
        pairs = [
            (to_plain(key, f"{path}/{key}"), to_plain(kept, f"{path}/{key}", tensors)) for key, kept in value.items()
        ]
        if isinstance(value, Counter):
            return {"__counter__": [list(pair) for pair in pairs]}
        if all(isinstance(key, str) and key not in TAGS for key, _ in pairs):
            return {str(key): kept for key, kept in pairs}
        return {"__pairs__": [list(pair) for pair in pairs]}
    if isinstance(value, (list, tuple)):
        items = [to_plain(item, f"{path}/{place}", tensors) for place, item in enumerate(value)]
        return items if isinstance(value, list) else {"__tuple__": items}
    raise ConfigError(
        f"{path} is {type(value).__name__}, which a checkpoint does not keep (it holds no pickled code); make it of "
        "numbers, strings, booleans, None, lists, tuples, dictionaries and tensors"
    )


def from_plain(plain: Plain, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Read what :func:`to_plain` has written.

    :param plain: What it gave.
    :param tensors: The tensors by name.
    :return: The value.
    """
    if isinstance(plain, list):
        return [from_plain(item, tensors) for item in plain]
    if not isinstance(plain, dict):
        return plain
    if len(plain) == 1:
        ((tag, kept),) = plain.items()
        if tag == "__tensor__":
            return tensors[kept]
        if tag == "__float__":
            return float(kept)
        if tag == "__tuple__":
            return tuple(from_plain(item, tensors) for item in kept)
        if tag in ("__pairs__", "__counter__"):
            pairs = {from_plain(key, tensors): from_plain(item, tensors) for key, item in kept}
            return Counter(pairs) if tag == "__counter__" else pairs
    return {key: from_plain(item, tensors) for key, item in plain.items()}


def tensors_named(plain: Plain) -> Iterator[str]:
    """Yield the names of the tensors that a value refers to.

    :param plain: What :func:`to_plain` gave.
    :yield: Each name.
    """
    if isinstance(plain, list):
        for item in plain:
            yield from tensors_named(item)
    elif isinstance(plain, dict):
        if plain.keys() == {"__tensor__"}:
            yield str(plain["__tensor__"])
        else:
            for item in plain.values():
                yield from tensors_named(item)
