"""Which tensors of a model take part in a round, how, and where their elements lie.

The manifest is the part that must be the same on all ranks; the layout (along which axis a tensor is cut) may differ
from cell to cell.
"""

from __future__ import annotations

import fnmatch
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Shard

from xffl.aggregation.codec import Codec, codec_of
from xffl.aggregation.plan import Cut, Item
from xffl.errors import ConfigError
from xffl.topology import Coordinates, Topology

__all__ = ["POLICIES", "Entry", "Manifest", "describe_difference", "gather_axes", "reshard"]

POLICIES = ("average", "local", "first")
"""What a round may do with a tensor: average it over cells, leave it alone, take it from the first cell."""

WRAPPERS = frozenset({"module", "_orig_mod", "_checkpoint_wrapped_module"})
"""Parts of names that DDP, torch.compile and activation checkpointing put in."""

REPLICATED = -1
"""In a list of axes: every rank of the cell holds the whole tensor."""


@dataclass(frozen=True)
class Entry:
    """One tensor: its name without wrappers, what happens to it, how it is written on its way, and where it is kept."""

    name: str
    policy: str
    codec: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_buffer: bool
    module: nn.Module = field(repr=False, compare=False)
    leaf: str = field(repr=False, compare=False)

    def __str__(self) -> str:
        kind = "buffer" if self.is_buffer else "parameter"
        codec = "" if self.codec == "none" else f", {self.codec}"
        return f"{self.name}\t{self.shape} {str(self.dtype).removeprefix('torch.')} {kind}, {self.policy}{codec}"

    @property
    def real_shape(self) -> tuple[int, ...]:
        """The shape with complex numbers as pairs of real ones."""
        return (*self.shape, 2) if self.dtype.is_complex else self.shape

    @property
    def real_dtype(self) -> torch.dtype:
        """The data type with complex numbers as pairs of real ones."""
        return self.dtype.to_real() if self.dtype.is_complex else self.dtype

    def tensor(self) -> torch.Tensor:
        """Return the tensor as the model holds it now.

        :return: The parameter or buffer itself.
        :raises ConfigError: if its shape or data type is no longer that of the manifest.
        """
        tensor = getattr(self.module, self.leaf)
        if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != self.shape or tensor.dtype != self.dtype:
            got = f"{tuple(tensor.shape)} {tensor.dtype}" if isinstance(tensor, torch.Tensor) else repr(tensor)
            raise ConfigError(
                f"tensor {self.name!r} was {self.shape} {self.dtype} when the Aggregator was made and is {got} now; "
                "make a new Aggregator after changing the model"
            )
        return tensor

    @property
    def slot(self) -> tuple[Mapping[str, torch.Tensor | None], str]:
        """Where the module keeps the tensor, to look it up without any check."""
        return (self.module._buffers if self.is_buffer else self.module._parameters), self.leaf

    def elements(self, axis: int) -> torch.Tensor:
        """Return this rank's elements as a view in canonical order: the cut axis first, complex numbers as pairs."""
        tensor = self.tensor()
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        local = torch.view_as_real(local.detach()) if local.is_complex() else local.detach()
        return local.movedim(axis, 0) if axis > 0 else local


class Manifest:
    """The tensors of a model, sorted by name.

    :param model: The model; FSDP2 modules are put back into their sharded state first.
    :param policies: Patterns of names (as in :mod:`fnmatch`) and the policy of what they match; the first match wins.
    :param codec: How averaged values are written between cells: a codec for all trainable parameters, or patterns of
        names with theirs, the first match wins; what none matches is written as it is.
    :raises ConfigError: if a tensor, a pattern or a codec cannot be meant.
    """

    def __init__(
        self,
        model: nn.Module,
        policies: Mapping[str, str] | None = None,
        codec: str | Codec | Mapping[str, str | Codec] = "none",
    ) -> None:
        reshard(model)
        policies = dict(policies or {})
        self.codecs: dict[str, Codec | None] = {}
        codecs: dict[str, str] = {}
        for pattern, chosen in codec.items() if isinstance(codec, Mapping) else [("", codec)]:
            made = codec_of(chosen)
            codecs[pattern] = "none" if made is None else str(made)
            self.codecs[codecs[pattern]] = made
        for pattern, policy in policies.items():
            if policy not in POLICIES:
                raise ConfigError(f"policy {policy!r} for {pattern!r} is unknown; choose one of {', '.join(POLICIES)}")
        entries: dict[str, Entry] = {}
        used: set[str] = set()
        for name, module, leaf, tensor in _tensors(model):
            match = _match(name, policies, used)
            policy = _default_policy(module, leaf, tensor) if match is None else policies[match]
            _check(name, policy, tensor)
            if name in entries:
                raise ConfigError(
                    f"two tensors are called {name!r} once the wrappers {sorted(WRAPPERS)} are left out; rename one"
                )
            shape, is_buffer = tuple(tensor.shape), leaf in module._buffers
            # A plain codec is for what trains; a buffer has to be named.
            match = _match(name, codecs, used) if isinstance(codec, Mapping) else None if is_buffer else ""
            written = "none" if match is None or policy != "average" else codecs[match]
            entries[name] = Entry(name, policy, written, shape, tensor.dtype, is_buffer, module, leaf)
        for what, patterns in (("policies", policies), ("codecs", codecs)):
            _check_patterns(what, [pattern for pattern in patterns if pattern], used, entries)
        self.entries: tuple[Entry, ...] = tuple(entries[name] for name in sorted(entries))
        self._places = _places(model)
        # Kept alive, so that no other tensor can be taken for one of them.
        self._tensors = _held(model)
        self._trains = [tensor.requires_grad for tensor in self._tensors]
        self.moving: tuple[Entry, ...] = tuple(entry for entry in self.entries if entry.policy != "local")

    def __str__(self) -> str:
        return "\n".join(str(entry) for entry in self.entries)

    def check(self, model: nn.Module) -> None:
        """Raise where the model no longer has the tensors it had; local.

        :param model: The model that the manifest was made of.
        :raises ConfigError: if a tensor came, went, or was frozen or unfrozen.
        """
        tensors = _held(model)
        trains = [tensor.requires_grad for tensor in tensors]
        is_same = len(tensors) == len(self._tensors) and all(map(operator.is_, tensors, self._tensors))
        if is_same and trains == self._trains:
            return
        now = _places(model)
        if now == self._places:
            self._tensors, self._trains = tensors, trains
            return
        changed = sorted({leaf for _, leaf, _ in set(now) ^ set(self._places)})
        raise ConfigError(
            f"the model's tensors have changed since the Aggregator was made (look at {', '.join(changed[:5])}: "
            "replaced, added, removed, frozen or unfrozen); make a new Aggregator"
        )

    def axes(self, topology: Topology, at: Coordinates) -> tuple[int, ...]:
        """Return the axis along which this rank's cell cuts each moving tensor, ``REPLICATED`` for none.

        :param topology: The federation.
        :param at: This rank's place in it.
        :return: One axis for each moving tensor.
        :raises ConfigError: if a DTensor is not cut as the state says.
        """
        return tuple(_axis(entry, topology.shards(at.cell), at) for entry in self.moving)

    def items(
        self, topology: Topology, axes: Sequence[Sequence[int]], *, least_bytes: int = 1, fragments: int = 1
    ) -> tuple[Item, ...]:
        """Return the moving tensors as the plan sees them.

        :param topology: The federation.
        :param axes: For each cell, the axis of each moving tensor.
        :param least_bytes: What a sender gets of a replicated tensor at least, where it is shared out.
        :param fragments: Parts of about the same size that the tensors are dealt into.
        :return: The items, in the order of :attr:`moving`.
        :raises ConfigError: if two cells cut a tensor along different axes.
        """
        items = []
        dealt = _deal([prod(entry.real_shape) * entry.real_dtype.itemsize for entry in self.moving], fragments)
        for index, entry in enumerate(self.moving):
            by_cell = [cell[index] for cell in axes]
            canonical_axis(entry, by_cell)
            shape = entry.real_shape
            numel = prod(shape)
            least = max(1, least_bytes // entry.real_dtype.itemsize)
            cuts = tuple(
                # What is taken from one cell is taken from one rank, so that it stays of one piece.
                Cut.of_copy(numel, 1 if entry.policy == "first" else topology.shards(cell), least)
                if axis == REPLICATED
                else Cut.of_axis(shape[axis], numel // max(1, shape[axis]), topology.shards(cell))
                for cell, axis in enumerate(by_cell)
            )
            dtype = str(entry.real_dtype).removeprefix("torch.")
            is_mean_at_home = entry.is_buffer and entry.policy == "average"
            items.append(Item(index, dtype, entry.policy, is_mean_at_home, cuts, entry.codec, dealt[index]))
        return tuple(items)


def canonical_axis(entry: Entry, axes: Sequence[int]) -> int:
    """Return the one axis along which the cells cut a tensor; 0 where none does.

    :param entry: The tensor.
    :param axes: The axis of each cell, ``REPLICATED`` for none.
    :return: The axis that comes first in canonical order.
    :raises ConfigError: if they cut it along different axes.
    """
    cut = {axis for axis in axes if axis != REPLICATED}
    if len(cut) > 1:
        raise ConfigError(
            f"tensor {entry.name!r} is cut along axis {axes[0]} in cell 0 and along others elsewhere "
            f"({list(axes)}); use the same shard placement in every cell"
        )
    return cut.pop() if cut else 0


def gather_axes(axes: Sequence[int], topology: Topology) -> tuple[tuple[int, ...], ...]:
    """Exchange along which axes the cells cut their tensors.

    Collective over the world; a rank sends a few bytes (runs of equal axes are folded).

    :param axes: This rank's axes, from :meth:`Manifest.axes`.
    :param topology: The federation.
    :return: The axes of each cell.
    :raises ConfigError: if two ranks of a cell differ.
    """
    runs: list[tuple[int, int]] = []
    for axis in axes:
        count = runs.pop()[1] if runs and runs[-1][0] == axis else 0
        runs.append((axis, count + 1))
    gathered: list[list[tuple[int, int]]] = [[] for _ in range(topology.world_size)]
    dist.all_gather_object(gathered, runs)
    cells = []
    for cell in range(topology.cells):
        ranks = topology.federation(cell)
        if any(gathered[rank] != gathered[ranks[0]] for rank in ranks):
            raise ConfigError(f"the ranks of cell {cell} shard the model differently; shard it alike on all of them")
        cells.append(tuple(axis for axis, count in gathered[ranks[0]] for _ in range(count)))
    return tuple(cells)


def describe_difference(manifests: Mapping[int, str]) -> ConfigError:
    """Name the first tensor on which the ranks' manifests differ, and the ranks.

    :param manifests: The text of each rank's manifest.
    :return: The error that all ranks are to raise.
    """
    tables = {rank: dict(line.split("\t", 1) for line in text.splitlines()) for rank, text in manifests.items()}
    for name in sorted({name for table in tables.values() for name in table}):
        said: dict[str, list[int]] = {}
        for rank in sorted(tables):
            said.setdefault(tables[rank].get(name, "missing"), []).append(rank)
        if len(said) > 1:
            shown = "; ".join(f"{what} on ranks {', '.join(map(str, ranks))}" for what, ranks in said.items())
            return ConfigError(f"{name!r} differs: {shown}; give every rank the same model, policies and options")
    return ConfigError("the ranks' models differ in nothing but the order of their tensors; build them alike")


def reshard(model: nn.Module) -> None:
    """Put every FSDP2 module into its sharded state, so that no stale gathered copy outlives a round."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _tensors(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, torch.Tensor]]:
    """Yield each parameter and buffer once, with its name without wrappers and the module that holds it."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel):
            raise ConfigError(
                f"module {prefix or 'model'!r} is wrapped by FSDP1, whose flat parameters hide the tensors; use "
                "xffl.shard"
            )
        for leaf, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None or id(tensor) in seen:
                continue
            seen.add(id(tensor))
            path = [part for part in (*prefix.split("."), leaf) if part and part not in WRAPPERS]
            yield ".".join(path), module, leaf, tensor


def _match(name: str, patterns: Mapping[str, str], used: set[str]) -> str | None:
    """Return the first pattern that a name matches, and note that it is of use."""
    match = next((pattern for pattern in patterns if fnmatch.fnmatchcase(name, pattern)), None)
    used.update(() if match is None else (match,))
    return match


def _check_patterns(what: str, patterns: Sequence[str], used: set[str], names: Mapping[str, object]) -> None:
    if unused := sorted(set(patterns) - used):
        if any(fnmatch.fnmatchcase(name, pattern) for name in names for pattern in unused):
            raise ConfigError(f"{what} {unused} come after patterns that match the same; put the narrower first")
        raise ConfigError(f"{what} {unused} match no tensor; names look like {list(names)[:3]}")


def _deal(sizes: Sequence[int], fragments: int) -> list[int]:
    """Deal tensors into fragments of about the same size: the largest first, each to the one that has least."""
    if fragments > max(1, len(sizes)):
        raise ConfigError(f"{len(sizes)} tensors make no {fragments} fragments; give fragments={max(1, len(sizes))}")
    filled = [0] * fragments
    dealt = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        fragment = min(range(fragments), key=lambda fragment: filled[fragment])
        # Even an empty tensor takes its turn, so that no fragment stays empty.
        filled[fragment] += max(1, sizes[index])
        dealt[index] = fragment
    return dealt


def _held(model: nn.Module) -> list[torch.Tensor]:
    """Return the tensors that the model's modules hold, in order."""
    return [
        tensor
        for module in model.modules()
        for held in (module._parameters, module._buffers)
        for tensor in held.values()
        if tensor is not None
    ]


def _places(model: nn.Module) -> tuple[tuple[int, str, bool], ...]:
    """Return where the model keeps its tensors, in order, and which of them train."""
    return tuple(
        (id(module), leaf, tensor.requires_grad)
        for module in model.modules()
        for leaf, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None
    )


def _default_policy(module: nn.Module, leaf: str, tensor: torch.Tensor) -> str:
    if leaf in module._parameters:
        return "average" if tensor.requires_grad else "local"
    if leaf in module._non_persistent_buffers_set:
        return "local"
    return "average" if tensor.is_floating_point() or tensor.is_complex() else "first"


def _check(name: str, policy: str, tensor: torch.Tensor) -> None:
    if nn.parameter.is_lazy(tensor) or (tensor.is_meta and policy != "local"):
        raise ConfigError(f"tensor {name!r} has no values yet; initialize the model before making the Aggregator")
    if policy == "local":
        return
    if tensor.layout != torch.strided:
        raise ConfigError(
            f"tensor {name!r} is {tensor.layout}; only strided tensors are exchanged, set its policy to 'local'"
        )
    if any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        raise ConfigError(
            f"tensor {name!r} is expanded: several of its elements are one in memory; set its policy to 'local', or "
            "clone() it"
        )
    if tensor.is_conj():
        raise ConfigError(f"tensor {name!r} is a conjugate view; resolve_conj() it")
    if policy == "average" and not (tensor.is_floating_point() or tensor.is_complex()):
        raise ConfigError(f"tensor {name!r} is {tensor.dtype} and has no mean; set its policy to 'first' or 'local'")


def _axis(entry: Entry, shards: int, at: Coordinates) -> int:
    """Return the axis along which a rank's part of a tensor is cut, checked against the state's arithmetic."""
    tensor = entry.tensor()
    if not isinstance(tensor, DTensor):
        return REPLICATED
    knob = "shard it with xffl.shard, or over the state's own mesh"
    cuts = [(dim, place) for dim, place in enumerate(tensor.placements) if not place.is_replicate()]
    cuts = [(dim, place) for dim, place in cuts if place.is_partial() or tensor.device_mesh.size(dim) > 1]
    if not cuts:
        return REPLICATED
    dim, place = cuts[0]
    if len(cuts) > 1 or not isinstance(place, Shard) or type(place) is not Shard:
        raise ConfigError(
            f"tensor {entry.name!r} has placements {tensor.placements}; a round takes tensors cut along one axis of "
            f"one mesh dimension; {knob}"
        )
    parts, part = tensor.device_mesh.size(dim), tensor.device_mesh.get_local_rank(dim)
    if (parts, part) != (shards, at.shard):
        raise ConfigError(
            f"tensor {entry.name!r} is part {part} of {parts} here, but the state says shard {at.shard} of {shards}; "
            f"{knob}"
        )
    axis = place.dim
    length, inner = entry.real_shape[axis], prod(entry.real_shape) // max(1, entry.real_shape[axis])
    first, last = Cut.of_axis(length, inner, shards).bounds(at.shard)
    if entry.elements(axis).numel() != last - first:
        raise ConfigError(f"tensor {entry.name!r} is cut unevenly along axis {axis}, not as torch.chunk does; {knob}")
    return axis
