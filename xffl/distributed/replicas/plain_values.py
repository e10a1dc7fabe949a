"""Values of states as what JSON can hold, with their tensors beside."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from numbers import Integral, Real
from typing import Any

import torch

from xffl.distributed.values.sharding import dtype_of
from xffl.errors import ConfigError

__all__ = [
    "Plain",
    "from_plain",
    "tensors_named",
    "to_plain",
]

Plain = None | bool | int | float | str | list[Any] | dict[str, Any]
"""What JSON can hold."""

# The only keys of a JSON object that stands for something that JSON does not have.
TAGS = ("__tensor__", "__tuple__", "__pairs__", "__counter__", "__float__", "__dtype__")


def to_plain(value: Any, path: str, tensors: dict[str, torch.Tensor] | None = None) -> Plain:
    """Write a value as what JSON can hold; its tensors are put aside and named by where they stand."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        number = float(value)
        return number if math.isfinite(number) else {"__float__": repr(number)}
    if isinstance(value, torch.dtype):
        return {"__dtype__": str(value).removeprefix("torch.")}
    if isinstance(value, torch.Tensor):
        if tensors is None:
            raise ConfigError(f"{path} is a tensor, but values are plain Python values; give tensors as a part")
        if path in tensors:
            raise ConfigError(f"two tensors are called {path!r}; rename one of them")
        tensors[path] = value
        return {"__tensor__": path}
    if isinstance(value, Mapping):
        pairs = [
            (to_plain(key, f"{path}/{key}"), to_plain(item, f"{path}/{key}", tensors)) for key, item in value.items()
        ]
        if isinstance(value, Counter):
            return {"__counter__": [list(pair) for pair in pairs]}
        if all(isinstance(key, str) and key not in TAGS for key, _ in pairs):
            return {str(key): item for key, item in pairs}
        return {"__pairs__": [list(pair) for pair in pairs]}
    if isinstance(value, (list, tuple)):
        items = [to_plain(item, f"{path}/{place}", tensors) for place, item in enumerate(value)]
        return items if isinstance(value, list) else {"__tuple__": items}
    raise ConfigError(
        f"{path} is {type(value).__name__}, which a checkpoint does not keep (it holds no pickled code); make it of "
        "numbers, strings, booleans, None, lists, tuples, dictionaries and tensors"
    )


def from_plain(plain: Plain, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Read what :func:`to_plain` has written; local.

    :param plain: The value, which somebody else may have written.
    :param tensors: Tensors by name, of those that the value refers to.
    :return: What was written.
    :raises ValueError: if the value is not of the form that is written; nothing in it is called or imported.
    """
    try:
        return _read_plain(plain, tensors)
    except (AttributeError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"it is no plain value as it is written ({type(error).__name__}: {error})") from error


def _read_plain(plain: Plain, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(plain, list):
        return [_read_plain(item, tensors) for item in plain]
    if not isinstance(plain, dict):
        return plain
    if len(plain) == 1:
        ((tag, content),) = plain.items()
        if tag == "__tensor__":
            return tensors[content]
        if tag == "__float__":
            return float(content)
        if tag == "__dtype__":
            return dtype_of(content)
        if tag == "__tuple__":
            return tuple([_read_plain(item, tensors) for item in content])
        if tag in ("__pairs__", "__counter__"):
            pairs = {_read_plain(key, tensors): _read_plain(item, tensors) for key, item in content}
            return Counter(pairs) if tag == "__counter__" else pairs
    return {key: _read_plain(item, tensors) for key, item in plain.items()}


def tensors_named(plain: Plain) -> Iterator[str]:
    """Yield the names of the tensors that a value refers to."""
    if isinstance(plain, dict) and plain.keys() == {"__tensor__"}:
        yield str(plain["__tensor__"])
    elif isinstance(plain, (list, dict)):
        for item in plain if isinstance(plain, list) else plain.values():
            yield from tensors_named(item)
