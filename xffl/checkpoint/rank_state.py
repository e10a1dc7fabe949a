"""State that each rank keeps for itself: one file for each rank, for the same layout only.

Beside the caller's objects these are the buffers that differ between the ranks of a cell: between rounds, statistics
that each has made of its own data.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from xffl.checkpoint.contents import check_readable
from xffl.checkpoint.format import FileEntry, Record, check_file, file_entry
from xffl.distributed.collectives import bytes_of
from xffl.distributed.sharding import Plain, from_plain, to_plain
from xffl.errors import CheckpointError, ConfigError
from xffl.topology import Topology

__all__ = [
    "RandomState",
    "RankState",
    "check_rank_state",
    "collect_rank_state",
    "describe_difference",
    "differing_names",
    "hash_buffers",
    "is_same_layout",
    "own_file",
    "read_rank_state",
    "select_rank_state",
    "write_rank_state",
]


@dataclass(frozen=True)
class RankState:
    """Values and tensors of this rank, by name, and buffers of models that differ between the ranks of its cell."""

    values: dict[str, Plain]
    tensors: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)


def own_file(place: int) -> str:
    """Return the name of the file of a rank of the cell."""
    return f"own_{place}.pt"


def check_rank_state(own: Mapping[str, Stateful] | None) -> Mapping[str, Stateful]:
    """Refuse what cannot be kept."""
    if own is None:
        return {}
    if not isinstance(own, Mapping):
        raise ConfigError(f"own is {type(own).__name__}; give a mapping such as {{'random': RandomState()}}")
    for name, kept in own.items():
        if not isinstance(name, str) or not name or "/" in name:
            raise ConfigError(f"own name must be a string without '/', such as 'random', got {name!r}")
        if not isinstance(kept, Stateful) or isinstance(kept, (torch.nn.Module, torch.optim.Optimizer)):
            raise ConfigError(
                f"own {name!r} is {type(kept).__name__}; give an object with state_dict and load_state_dict, and "
                "models and optimizers as parts"
            )
    return own


def collect_rank_state(own: Mapping[str, Stateful]) -> RankState:
    """Take a copy of what this rank keeps for itself. Nothing moves between ranks."""
    tensors: dict[str, torch.Tensor] = {}
    values = {name: to_plain(kept.state_dict(), name, tensors) for name, kept in own.items()}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor) or tensor.layout != torch.strided or tensor.is_meta:
            kind = type(tensor).__name__ if isinstance(tensor, DTensor) else f"{tensor.layout} on {tensor.device}"
            raise ConfigError(
                f"own tensor {name!r} is {kind}; a rank keeps dense tensors of its own, give what is spread over ranks "
                "as a part"
            )
    check_readable(tensors)
    copies = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    return RankState(values, copies)


def hash_buffers(buffers: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return a digest of each buffer's bytes; local."""
    return {name: hashlib.sha256(bytes_of(tensor.cpu()).numpy().data).hexdigest() for name, tensor in buffers.items()}


def differing_names(digests: Sequence[Mapping[str, str]]) -> set[str]:
    """Return the names of what differs between the ranks of a cell; pure."""
    by_name: dict[str, set[str]] = {}
    for of_rank in digests:
        for name, digest in of_rank.items():
            by_name.setdefault(name, set()).add(digest)
    return {name for name, kinds in by_name.items() if len(kinds) > 1}


def write_rank_state(folder: Path, place: int, own: RankState) -> dict[str, FileEntry]:
    """Write this rank's file, where it keeps anything."""
    if not own.values and not own.buffers:
        return {}
    file = folder / own_file(place)
    content = {"values": json.dumps(own.values, allow_nan=False), "tensors": own.tensors, "buffers": own.buffers}
    with file.open("wb") as stream:
        torch.save(content, stream)
        stream.flush()
        os.fsync(stream.fileno())
    return {file.name: file_entry(file)}


def select_rank_state(
    folder: Path, record: Record, own: Collection[str], reset: Collection[str], topology: Topology
) -> set[str]:
    """Return the names to load; local."""
    if "*" in reset:
        return set()
    if unknown := sorted(set(reset) - set(own) - set(record.own)):
        raise CheckpointError(f"reset names {unknown}, which neither this run nor checkpoint {folder} has as own state")
    wanted = set(own) - set(reset)
    if difference := describe_difference(wanted, set(record.own) - set(reset)):
        raise CheckpointError(
            f"checkpoint {folder} has the own state {sorted(record.own)}: {difference}; give what was saved, or name "
            "in reset what shall start anew"
        )
    saved, here = _layout(record.cells, record), _layout(topology.sizes, topology)
    if wanted and saved != here:
        raise CheckpointError(
            f"checkpoint {folder} was saved by {saved}, this run is {here}: what each rank keeps for itself, "
            f"{sorted(wanted)}, fits that layout only; start in it, or give reset={sorted(wanted)} (a trainer's "
            "experiment.reset: true) to leave these as they are"
        )
    return wanted


def is_same_layout(record: Record, topology: Topology) -> bool:
    """Tell whether each rank finds here what it has kept for itself; pure."""
    return _layout(record.cells, record) == _layout(topology.sizes, topology)


def read_rank_state(
    folder: Path, place: int, files: Mapping[str, FileEntry], wanted: Collection[str], *, is_same: bool
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Read this rank's file and compare it with its checksum; nothing is changed yet, and no code of it is run."""
    file = folder / own_file(place)
    if not wanted and not (is_same and file.name in files):
        return {}, {}
    if file.name not in files:
        raise CheckpointError(f"{file} is in no index; the checkpoint is damaged, load another one")
    check_file(file, files[file.name])
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
        values = json.loads(content["values"])
        states = {name: from_plain(values[name], content["tensors"]) for name in sorted(wanted)}
        return states, content.get("buffers", {}) if is_same else {}
    except (OSError, RuntimeError, ValueError, TypeError, KeyError, pickle.UnpicklingError) as error:
        raise CheckpointError(
            f"{file} holds no own state: {type(error).__name__}; the checkpoint is damaged, load another one"
        ) from error


def _layout(sizes: Sequence[int], of: Record | Topology) -> str:
    """Write the layout that saved a checkpoint, or that of this run."""
    text = f"cells {tuple(sizes)}, replica size {of.replica_size}"
    if of.cell_shape is None:
        return text
    return f"{text}, mesh {', '.join(f'{name} {size}' for name, size in dict(of.cell_shape).items())}"


def describe_difference(wanted: set[str], saved: set[str]) -> str:
    """Write which names were asked for in vain, and which not asked for; empty where they are the same."""
    missing, extra = sorted(wanted - saved), sorted(saved - wanted)
    texts = [f"it has no {missing}"] * bool(missing) + [f"{extra} were not asked for"] * bool(extra)
    return " and ".join(texts)


class RandomState:
    """The generators of Python, NumPy and torch of this process, and of its GPU; give it as ``own`` of a checkpoint.

    Loading sets them to what they were, so that the next numbers are those that would have followed. Generators of
    one's own (``torch.Generator``, ``numpy.random.Generator``) are not among them.

    :param device: The device of this rank; on a GPU its generator is kept, too.
    :raises ConfigError: if the device is invalid.
    """

    def __init__(self, device: torch.device | str | int | None = None) -> None:
        try:
            self._device = torch.device("cpu" if device is None else device)
        except (RuntimeError, TypeError) as error:
            raise ConfigError(f"device must be this rank's device, got {device!r}: {error}") from error

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
