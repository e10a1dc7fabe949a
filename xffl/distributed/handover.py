"""What one replica group hands over to another: states of parts, by name, as this rank's part of what is spread."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from xffl.distributed.collectives import bytes_of
from xffl.distributed.plain import to_plain
from xffl.distributed.sharding import load_optimizer, reshard, sharded_parameters, spread_as, spread_whole
from xffl.errors import ConfigError

__all__ = ["digest", "give", "local", "take"]


def take(part: Any) -> Any:
    """Return a part's state as tensors of this rank and plain values; nothing is copied.

    :param part: A model, an optimizer, or what has ``state_dict``.
    :return: The state.
    """
    if isinstance(part, nn.Module):
        reshard(part)
        return {name: local(value) for name, value in part.state_dict().items()}
    return _cut(part.state_dict())


def give(name: str, part: Any, saved: Any) -> None:
    """Give a part another group's state, in place; nothing moves between ranks.

    :param name: What the part is called, for messages.
    :param part: The part.
    :param saved: What :func:`take` returned for the same part of another group.
    :raises ConfigError: if the two do not go together.
    """
    if isinstance(part, nn.Module):
        _give_model(name, part, saved)
    elif isinstance(part, torch.optim.Optimizer):
        _give_optimizer(part, saved)
    else:
        part.load_state_dict(_spread_like(saved, part.state_dict(), name))


def _give_model(name: str, model: nn.Module, saved: Mapping[str, Any]) -> None:
    reshard(model)
    own = model.state_dict()
    different = sorted(own.keys() ^ saved.keys())
    if different:
        raise ConfigError(f"model {name!r} differs between the replica groups: {different[0]!r} is in one of them only")
    others: dict[str, Any] = {}
    with torch.no_grad():
        for key, value in own.items():
            place, given = local(value), saved[key]
            if not isinstance(place, torch.Tensor) or key.rpartition(".")[2] == "_extra_state":
                others[key] = given
            elif place.shape != given.shape or place.dtype != given.dtype:
                raise ConfigError(
                    f"{key!r} of model {name!r} is {tuple(given.shape)} {given.dtype} on this rank of another replica "
                    f"group, but {tuple(place.shape)} {place.dtype} here; give all groups the same number of ranks"
                )
            else:
                place.copy_(given)
    if others:
        model.load_state_dict(others, strict=False)


def _give_optimizer(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = {
        number: {key: _spread(value, parameters[number]) for key, value in values.items()}
        for number, values in saved["state"].items()
    }
    load_optimizer(optimizer, {"state": state, "param_groups": saved["param_groups"]})


def local(value: Any) -> Any:
    """Return this rank's part of a tensor, without gradient; what is no tensor as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    return (value.to_local() if isinstance(value, DTensor) else value).detach()


def _cut(value: Any) -> Any:
    """Return a state with this rank's part of what is spread, and its whole shape."""
    if isinstance(value, DTensor):
        return {"cut": local(value), "shape": list(value.shape)}
    if isinstance(value, Mapping) and not isinstance(value, Counter):
        return {key: _cut(one) for key, one in value.items()}
    return type(value)(map(_cut, value)) if type(value) in (list, tuple) else value


def _is_cut(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == {"cut", "shape"}


def _spread_like(value: Any, like: Any, where: str) -> Any:
    """Make of what :func:`_cut` gave what is spread like a state of the same form here."""
    if _is_cut(value):
        if not isinstance(like, DTensor) or local(like).shape != value["cut"].shape:
            raise ConfigError(f"{where} is spread in another replica group and not alike here; start all alike")
        return spread_as(value["cut"].to(local(like).device), like)
    if isinstance(value, dict):
        known = like if isinstance(like, Mapping) else {}
        return {key: _spread_like(one, known.get(key), f"{where}/{key}") for key, one in value.items()}
    if type(value) in (list, tuple):
        beside = like if type(like) is type(value) and len(like) == len(value) else [None] * len(value)
        return type(value)(
            _spread_like(*pair, f"{where}/{n}") for n, pair in enumerate(zip(value, beside, strict=True))
        )
    return value


def digest(part: Any) -> int:
    """Return a number of 40 bits of what must be the same in all groups of a part: buffers may differ.

    Of each tensor it is a sum of its memory, which is read once, where it lies.

    :param part: The part.
    :return: The number.
    """
    whole = hashlib.blake2b(digest_size=5)
    tensors: dict[str, torch.Tensor] = {}
    if isinstance(part, nn.Module):
        tensors = {name: local(one) for name, one in sharded_parameters(part).items()}
    else:
        whole.update(json.dumps(to_plain(take(part), "", tensors), sort_keys=True).encode())
    sums = []
    for tensor in tensors.values():
        data = bytes_of(tensor)
        words = data[: len(data) // 4 * 4].clone() if data.storage_offset() % 4 else data[: len(data) // 4 * 4]
        sums.append((words.view(torch.int32).sum(dtype=torch.int64) * 257 + data[len(data) // 4 * 4 :].sum()).cpu())
    whole.update(repr(list(zip(tensors, torch.stack(sums).tolist() if sums else [], strict=True))).encode())
    return int.from_bytes(whole.digest(), "little")


def _spread(value: Any, parameter: torch.Tensor) -> Any:
    """Make of what :func:`_cut` gave a tensor that goes with a parameter."""
    if not _is_cut(value):
        return value
    assert isinstance(parameter, DTensor), "cut alike in all groups, or the model was refused"
    values = value["cut"].to(parameter.device)
    is_alike = tuple(value["shape"]) == tuple(parameter.shape)
    return spread_as(values, parameter) if is_alike else spread_whole(values, parameter)
