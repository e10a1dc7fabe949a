"""Which tensors of a model take part in a round, how, and where their elements lie.

The manifest is the part that must be the same on all ranks; the layout (along which axis a tensor is cut) may differ
from cell to cell.
"""

from __future__ import annotations

import fnmatch
import operator
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import TypeVar

import torch
from torch import nn

from xffl.aggregation.axes import BY_PARTS, REPLICATED, axis_of, canonical_axis
from xffl.aggregation.codec import Codec, codec_of
from xffl.aggregation.entries import (
    WRAPPERS,
    Entry,
    Facts,
    check_reduced,
    check_tensor,
    default_policy,
    held,
    owners_of,
    places,
    tensors_of,
    ties_of,
)
from xffl.aggregation.placement import Spread
from xffl.aggregation.plan import Cut, Item, MeshCut
from xffl.distributed.sharding import reshard
from xffl.errors import ConfigError
from xffl.topology import Coordinates, Topology

__all__ = ["POLICIES", "Manifest", "Pattern", "describe_difference"]

T = TypeVar("T")

POLICIES = ("average", "local", "first")
"""What a round may do with a tensor: average it over cells, leave it alone, take it from the first cell."""

Pattern = str | type[nn.Module]
"""What a policy is for: a pattern of names (:mod:`fnmatch`), or all that lies in modules of a type."""


class Manifest:
    """The tensors of a model, sorted by name.

    :param model: The model; FSDP2 modules are put back into their sharded state first.
    :param policies: Patterns of names (as in :mod:`fnmatch`) or types of modules, and the policy of the tensors that
        match or lie in such a module; the first match wins.
    :param codec: How averaged values are written between cells: a codec for all trainable parameters, or patterns of
        names with theirs, the first match wins; what none matches is written as it is.
    :param extra: Tensors that are averaged beside the model's, as they are; no pattern matches them.
    :raises ConfigError: if a tensor, a pattern or a codec cannot be meant.
    """

    def __init__(
        self,
        model: nn.Module,
        policies: Mapping[Pattern, str] | None = None,
        codec: str | Codec | Mapping[str, str | Codec] = "none",
        extra: nn.Module | None = None,
    ) -> None:
        reshard(model)
        check_reduced(model)
        if policies is not None and not isinstance(policies, Mapping):
            raise ConfigError(f"policies {policies!r} is no mapping; give one of name patterns or types to policies")
        policies = dict(policies or {})
        self.codecs: dict[str, Codec | None] = {}
        codecs: dict[Pattern, str] = {}
        for pattern, chosen in codec.items() if isinstance(codec, Mapping) else [("", codec)]:
            made = codec_of(chosen)
            codecs[pattern] = "none" if made is None else str(made)
            self.codecs[codecs[pattern]] = made
        for key, policy in policies.items():
            if policy not in POLICIES:
                raise ConfigError(f"policy {policy!r} for {key!r} is unknown; choose one of {', '.join(POLICIES)}")
        entries: dict[str, Entry] = {}
        used: set[Pattern] = set()
        ties = ties_of(model)
        for name, module, leaf, tensor in tensors_of(model):
            owners = {other: owners_of(model, other) for other in ties[id(tensor)]}
            policy = _choose("policies", owners, policies, used) or default_policy(module, leaf, tensor)
            if isinstance(codec, Mapping):
                written = _choose("codecs", owners, codecs, used) or "none"
            else:  # a plain codec is for what trains; a buffer has to be named
                written = "none" if leaf in module._buffers else codecs[""]
            written = written if policy == "average" else "none"
            _add(entries, name, policy, written, module, leaf, tensor)
        self._patterns = [
            (what, pattern) for what, given in (("policies", policies), ("codecs", codecs)) for pattern in given
        ]
        # On a stage of a pipeline a pattern may be for tensors of another one, so this is judged later.
        self.is_used = tuple(not pattern or pattern in used for _, pattern in self._patterns)
        for name, module, leaf, tensor in () if extra is None else tensors_of(extra):
            _add(entries, f"{name} (extra)", "average", "none", module, leaf, tensor, is_extra=True)
        self.entries: tuple[Entry, ...] = tuple(entries[name] for name in sorted(entries))
        self._roots = (model,) if extra is None else (model, extra)
        self._places = self._look(places)
        self._module_names = self._look_up_names()
        # Kept alive, so that no other tensor can be taken for one of them.
        self._tensors = self._look(held)
        self._trains = [tensor.requires_grad for tensor in self._tensors]
        self.moving: tuple[Entry, ...] = tuple(entry for entry in self.entries if entry.policy != "local")

    def __str__(self) -> str:
        return "\n".join(str(entry) for entry in self.entries)

    def check_patterns(self, spread: Spread | None = None) -> None:
        """Raise where a pattern was given for nothing; local.

        :param spread: What all shards hold, where they hold different tensors.
        :raises ConfigError: if a pattern matches no tensor, or comes after one that matches the same.
        """
        is_used = self.is_used if spread is None else spread.is_used
        names = [entry.name for entry in self.entries] if spread is None else spread.names
        for what in ("policies", "codecs"):
            patterns = zip(self._patterns, is_used, strict=True)
            _check_patterns(what, [pattern for (kind, pattern), used in patterns if kind == what and not used], names)

    def check(self) -> None:
        """Raise where the model no longer has the tensors it had; local.

        :raises ConfigError: if a tensor came, went, or was frozen or unfrozen, or a parameter that trains is another
            object.
        """
        tensors = self._look(held)
        trains = [tensor.requires_grad for tensor in tensors]
        is_same = len(tensors) == len(self._tensors) and all(map(operator.is_, tensors, self._tensors))
        if is_same and trains == self._trains:
            return
        now = self._look(places)
        if now == self._places:
            self._check_replaced(tensors)
            self._tensors, self._trains = tensors, trains
            return
        names = self._module_names | self._look_up_names()
        other = set(now) ^ set(self._places)
        changed = sorted({f"{names[module]}.{leaf}".removeprefix(".") for module, leaf, *_ in other})
        raise ConfigError(
            f"the model's tensors have changed since the Aggregator was made (look at {', '.join(changed[:5])}: "
            "replaced, added, removed, tied, untied, frozen or unfrozen); make a new Aggregator"
        )

    def _check_replaced(self, tensors: Sequence[torch.Tensor]) -> None:
        """Raise where a parameter that trains is another object: optimizers and DDP hold the one that was there."""
        pairs = zip(tensors, self._tensors, self._trains, strict=True)
        new = {id(now) for now, old, trains in pairs if now is not old and trains and isinstance(old, nn.Parameter)}
        if not new:
            return
        for entry in self.moving:
            entry.tensor()  # another shape or data type is told by itself
        names = sorted(entry.name for entry in self.entries if id(entry.tensor()) in new)
        raise ConfigError(
            f"parameters {', '.join(map(repr, names[:5]))} ({len(names)} in all) were replaced by other objects since "
            "the Aggregator was made, so an optimizer or DDP may go on training the old ones; load with assign=False, "
            "or replace parameters before xffl.shard and the optimizer, and make a new Aggregator"
        )

    def _look_up_names(self) -> dict[int, str]:
        return {id(module): name for root in self._roots for name, module in root.named_modules()}

    def _look(self, at: Callable[[nn.Module], Sequence[T]]) -> list[T]:
        return [found for root in self._roots for found in at(root)]

    def axes(self, topology: Topology, at: Coordinates) -> tuple[int, ...]:
        """Return the axis along which this rank's cell cuts each moving tensor, ``REPLICATED`` for none.

        :param topology: The federation.
        :param at: This rank's place in it.
        :return: One axis for each moving tensor.
        :raises ConfigError: if a DTensor is not cut as the state says.
        """
        return tuple(axis_of(entry, topology.shards(at.cell), at) for entry in self.moving)

    def items(
        self,
        topology: Topology,
        axes: Sequence[Sequence[int]],
        *,
        least_bytes: int = 1,
        fragments: int = 1,
        spread: Spread | None = None,
    ) -> tuple[Item, ...]:
        """Return the moving tensors as the plan sees them.

        :param topology: The federation.
        :param axes: For each cell, the axis of each moving tensor.
        :param least_bytes: What a sender gets of a replicated tensor at least, where it is shared out.
        :param fragments: Parts of about the same size that the tensors are dealt into.
        :param spread: What all shards hold, where a mesh inside the cells cuts the model; its tensors count then.
        :return: The items, in the order of the moving tensors.
        :raises ConfigError: if two cells cut a tensor along different axes.
        """
        items = []
        tensors: Sequence[Facts] = self.moving if spread is None else spread.moving
        dealt = _deal([prod(entry.real_shape) * entry.real_dtype.itemsize for entry in tensors], fragments)
        for index, entry in enumerate(tensors):
            by_cell = [cell[index] for cell in axes]
            axis = canonical_axis(entry, by_cell)
            numel = prod(entry.real_shape)
            least = max(1, least_bytes // entry.real_dtype.itemsize)
            # What is taken from one cell is taken from one rank, so that it stays of one piece.
            least = max(least, numel) if entry.policy == "first" else least
            cuts: tuple[Cut, ...] | tuple[MeshCut, ...]
            if axis == BY_PARTS:
                assert spread is not None, "only a spread has parts"
                cuts = (MeshCut.of_parts(spread.parts[index], least),) * topology.cells
            else:
                cuts = tuple(_cut_of(entry, axis, topology.shards(cell), least) for cell, axis in enumerate(by_cell))
            dtype = str(entry.real_dtype).removeprefix("torch.")
            is_mean_at_home = entry.is_buffer and entry.policy == "average"
            items.append(
                Item(index, dtype, entry.policy, is_mean_at_home, cuts, entry.codec, dealt[index], entry.is_stepped)
            )
        return tuple(items)


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


def _cut_of(entry: Facts, axis: int, shards: int, least: int) -> Cut:
    shape = entry.real_shape
    numel = prod(shape)
    if axis == REPLICATED:
        return Cut.of_copy(numel, shards, least)
    return Cut.of_axis(shape[axis], numel // max(1, shape[axis]), shards)


def _add(
    entries: dict[str, Entry],
    name: str,
    policy: str,
    codec: str,
    module: nn.Module,
    leaf: str,
    tensor: torch.Tensor,
    *,
    is_extra: bool = False,
) -> None:
    check_tensor(name, policy, tensor)
    if name in entries:
        raise ConfigError(
            f"two tensors are called {name!r} once the wrappers {sorted(WRAPPERS)} are left out; rename one"
        )
    is_buffer = leaf in module._buffers
    is_stepped = policy == "average" and tensor.requires_grad and not (is_buffer or is_extra)
    shape = tuple(tensor.shape)
    entries[name] = Entry(name, policy, codec, shape, tensor.dtype, is_buffer, is_stepped, module, leaf)


def _choose(
    what: str, owners: Mapping[str, Sequence[nn.Module]], patterns: Mapping[Pattern, str], used: set[Pattern]
) -> str | None:
    """Return what patterns say of a tensor, by whichever of its names and modules they match."""
    matches = [_match(name, modules, patterns, used) for name, modules in owners.items()]
    chosen = sorted({patterns[match] for match in matches if match is not None})
    if len(chosen) > 1:
        raise ConfigError(
            f"{what} {', '.join(map(repr, chosen))} match one tensor under its names {', '.join(owners)}; give these "
            "names one"
        )
    return chosen[0] if chosen else None


def _match(
    name: str, owners: Sequence[nn.Module], patterns: Mapping[Pattern, str], used: set[Pattern]
) -> Pattern | None:
    """Return the first pattern that a tensor matches, and note that it is of use."""
    for pattern in patterns:
        if isinstance(pattern, str):
            is_match = fnmatch.fnmatchcase(name, pattern)
        else:
            is_match = any(isinstance(owner, pattern) for owner in owners)
        if is_match:
            used.add(pattern)
            return pattern
    return None


def _check_patterns(what: str, unused: Sequence[Pattern], names: Sequence[str]) -> None:
    if not unused:
        return
    shown = sorted(pattern if isinstance(pattern, str) else pattern.__name__ for pattern in unused)
    texts = [pattern for pattern in unused if isinstance(pattern, str)]
    if any(fnmatch.fnmatchcase(name, pattern) for name in names for pattern in texts):
        raise ConfigError(f"{what} {shown} come after patterns that match the same; put the narrower first")
    raise ConfigError(f"{what} {shown} match no tensor; names look like {names[:3]}")


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
