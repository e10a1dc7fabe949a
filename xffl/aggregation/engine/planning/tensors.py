"""The tensors of a model: each once, with its name without wrappers and the module that holds it."""

from __future__ import annotations

import fnmatch
import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from math import prod
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Placement, Shard

from xffl.aggregation.compression import Codec, codec_of
from xffl.aggregation.engine.planning.mesh_cut import MeshCut
from xffl.aggregation.engine.planning.plan import Cut, Item
from xffl.checks import one_of
from xffl.compat.ddp import parameters_at_start
from xffl.costs import MOST_IN_TABLES
from xffl.distributed.agreement.consistency import compare_hashes, control_device, hash_of
from xffl.distributed.collectives import Group, all_gather_json
from xffl.distributed.values.sharding import WRAPPERS, local_tensor, reshard
from xffl.errors import ConfigError
from xffl.topology import Coordinates, Topology

if TYPE_CHECKING:
    from xffl.aggregation.engine.planning.replica_tensors import ReplicaTensors

__all__ = [
    "NUMBERS",
    "POLICIES",
    "Axis",
    "Division",
    "HeldTensors",
    "Manifest",
    "ModelTensor",
    "Pattern",
    "TensorInfo",
    "TensorsBeside",
    "canonical_axis",
    "choose_by_pattern",
    "chunk_numel",
    "cuts_of",
    "gather_axes",
    "kinds_of_moments",
    "owners_of",
    "tensors_of",
    "ties_of",
]


NUMBERS = "(numbers)"
"""The kind of what optimizers keep of a parameter that is one number; these move only to cells that are behind."""


class Division(str, Enum):
    """How the shards of a cell hold a tensor that is not cut along one axis; the values are what ranks exchange."""

    REPLICATED = "replicated"
    """Every shard holds the whole tensor."""
    BY_PARTS = "by parts"
    """The parts are not the chunks of one axis, or only some shards hold one."""


Axis = int | Division
"""The axis along which the shards of a cell cut a tensor, or how they hold it where there is no such axis."""


@dataclass(frozen=True)
class TensorInfo:
    """One tensor: its name without wrappers, its policy, and its codec.

    ``is_stepped`` says whether training changes it: it is an averaged parameter that is not frozen. Server optimizers,
    norms and distances apply to these tensors. A moment of an optimizer has the name of its kind, and that of the
    parameter that it lies beside.
    """

    name: str
    policy: str
    codec: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_buffer: bool
    is_stepped: bool
    moment: str = ""
    beside: str = ""

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


@dataclass(frozen=True, kw_only=True)
class ModelTensor(TensorInfo):
    """One tensor of this rank's model, and the module that holds it."""

    module: nn.Module = field(repr=False, compare=False)
    leaf: str = field(repr=False, compare=False)

    @property
    def facts(self) -> TensorInfo:
        """The same without the module, to send it to other ranks."""
        return TensorInfo(*(getattr(self, item.name) for item in fields(TensorInfo)))

    def tensor(self) -> torch.Tensor:
        """Return the tensor as the model holds it now."""
        tensor = getattr(self.module, self.leaf)
        if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != self.shape or tensor.dtype != self.dtype:
            got = f"{tuple(tensor.shape)} {tensor.dtype}" if isinstance(tensor, torch.Tensor) else repr(tensor)
            raise ConfigError(
                f"tensor {self.name!r} was {self.shape} {self.dtype} when the Aggregator was made and is {got} now; "
                "make a new Aggregator after changing the model"
            )
        return tensor

    @property
    def held(self) -> Mapping[str, torch.Tensor | None]:
        """The module's own dictionary that holds the tensor, to look it up without any check."""
        return self.module._buffers if self.is_buffer else self.module._parameters

    def elements(self, axis: Axis) -> torch.Tensor:
        """Return this rank's elements as a view in canonical order: the cut axis first, complex numbers as pairs."""
        local = local_tensor(self.tensor()).detach()
        local = torch.view_as_real(local) if local.is_complex() else local
        return local.movedim(axis, 0) if isinstance(axis, int) and axis > 0 else local


def tensors_of(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, torch.Tensor]]:
    """Yield each parameter and buffer once: its name without wrappers, the module that holds it, its key there."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel):
            raise ConfigError(
                f"module {prefix or 'model'!r} is wrapped by FSDP1, whose flat parameters hide the tensors; use "
                "xffl.shard"
            )
        for leaf, tensor in _tensors_in(module):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield _name(prefix, leaf), module, leaf, tensor


def ties_of(model: nn.Module) -> dict[int, list[str]]:
    """Return, by the id of each parameter and buffer, all names that it has, without wrappers."""
    names: dict[int, list[str]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for leaf, tensor in _tensors_in(module):
            names.setdefault(id(tensor), []).append(_name(prefix, leaf))
    return names


def _tensors_in(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return a module's parameters and buffers, not those of its children.

    Its private dictionaries are read directly, because torch's iterators are slower.
    """
    held = (*module._parameters.items(), *module._buffers.items())
    return [(leaf, tensor) for leaf, tensor in held if tensor is not None]


def _name(prefix: str, leaf: str) -> str:
    return ".".join(part for part in (*prefix.split("."), leaf) if part and part not in WRAPPERS)


def owners_of(model: nn.Module, name: str) -> list[nn.Module]:
    """Return the modules that contain a tensor, from the model inwards, including wrappers."""
    owners = [model]
    for part in (*name.split(".")[:-1], None):
        inside = owners[-1]._modules
        while part not in inside and (wrapped := [inside[key] for key in inside if key in WRAPPERS]):
            assert wrapped[0] is not None
            owners.append(wrapped[0])
            inside = wrapped[0]._modules
        child = None if part is None else inside[part]
        owners += [] if child is None else [child]
    return owners


class HeldTensors(NamedTuple):
    """The tensors that the modules of some models hold, in order."""

    tensors: list[torch.Tensor]
    """Kept alive: identities are compared, and a new tensor must not get the id of a deleted one"""
    trains: list[bool]
    places: list[tuple[int, str, bool, tuple[int, str]]]
    """The module and name of each, whether it trains, and the first place of a tied tensor"""
    names: dict[int, str]
    """Of the modules"""

    @classmethod
    def of(cls, roots: Sequence[nn.Module]) -> HeldTensors:
        """Look at the models; local."""
        tensors = [tensor for root in roots for module in root.modules() for _, tensor in _tensors_in(module)]
        return cls(
            tensors,
            trains=[tensor.requires_grad for tensor in tensors],
            places=[place for root in roots for place in _places(root)],
            names={id(module): name for root in roots for name, module in root.named_modules()},
        )


def _places(model: nn.Module) -> tuple[tuple[int, str, bool, tuple[int, str]], ...]:
    """Return the module and name of each tensor, in order, whether it trains, and the first place of a tied tensor."""
    first: dict[int, tuple[int, str]] = {}
    return tuple(
        (id(module), leaf, tensor.requires_grad, first.setdefault(id(tensor), (id(module), leaf)))
        for module in model.modules()
        for leaf, tensor in _tensors_in(module)
    )


def check_reduced(model: nn.Module) -> None:
    """Raise if DDP averages the gradients of parameters that the model no longer has."""
    for prefix, module in model.named_modules():
        # Nothing can be compared if DDP ignores some parameters, or torch does not say with which ones it was made.
        if not isinstance(module, nn.parallel.DistributedDataParallel) or module.parameters_to_ignore:
            continue
        made_with = parameters_at_start(module)
        if made_with is None:
            continue
        known = set(map(id, made_with))
        for name, parameter in module.module.named_parameters():
            if parameter.requires_grad and id(parameter) not in known:
                raise ConfigError(
                    f"parameter {_name(prefix, name)!r} is another object than when DDP was made, and DDP averages the "
                    "gradients of the old one; replace or add parameters before xffl.shard, or load with assign=False"
                )


def default_policy(module: nn.Module, leaf: str, tensor: torch.Tensor) -> str:
    """Return what happens to a tensor that no pattern names."""
    if leaf in module._parameters:
        return "average" if tensor.requires_grad else "local"
    if leaf in module._non_persistent_buffers_set:
        return "local"
    return "average" if tensor.is_floating_point() or tensor.is_complex() else "first"


def check_tensor(name: str, policy: str, tensor: torch.Tensor) -> None:
    """Raise where a round cannot move a tensor as its policy says."""
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
            f"tensor {name!r} is expanded: its elements share memory; set its policy to 'local', or clone() it"
        )
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        raise ConfigError(
            f"tensor {name!r} was made inside torch.inference_mode(), so it can neither be trained nor written by a "
            "round outside of it; make and shard the model outside of inference mode, or set the tensor's policy to "
            "'local'"
        )
    if tensor.is_conj():
        raise ConfigError(f"tensor {name!r} is a conjugate view; resolve_conj() it")
    if tensor.is_neg():  # its memory has the opposite sign
        raise ConfigError(f"tensor {name!r} is a negated view; resolve_neg() it")
    if policy == "average" and not (tensor.is_floating_point() or tensor.is_complex()):
        raise ConfigError(f"tensor {name!r} is {tensor.dtype} and has no mean; set its policy to 'first' or 'local'")


def canonical_axis(entry: TensorInfo, axes: Sequence[Axis]) -> int | Literal[Division.BY_PARTS]:
    """Return the axis along which the cells cut a tensor; 0 where all of them replicate it."""
    cut = {axis for axis in axes if axis is not Division.REPLICATED}
    if len(cut) > 1:
        shown = ", ".join(str(axis.value if isinstance(axis, Division) else axis) for axis in axes)
        raise ConfigError(
            f"tensor {entry.name!r} is not cut along one axis in all cells (by cell: {shown}); use the same shard "
            "placement in every cell"
        )
    return cut.pop() if cut else 0


def gather_axes(axes: Sequence[Axis], topology: Topology, group: Group | None = None) -> tuple[tuple[Axis, ...], ...]:
    """Exchange along which axes the cells cut their tensors; collective over the topology's ranks, a few bytes each.

    Many ranks first compare whether all cells cut them alike, and gather nothing then.
    """
    if topology.world_size > MOST_IN_TABLES:
        [is_same] = compare_hashes([hash_of(axes)], group)
        if is_same:
            return (tuple(axes),) * topology.cells
    runs = [(axis, len(list(equal))) for axis, equal in itertools.groupby(axes)]
    gathered: list[list[tuple[int | str, int]]] = all_gather_json(runs, control_device(group), group)
    cells = []
    for cell in range(topology.cells):
        ranks = topology.federation(cell)
        if any(gathered[rank] != gathered[ranks[0]] for rank in ranks):
            raise ConfigError(f"the ranks of cell {cell} shard the model differently; shard it alike on all of them")
        cells.append(tuple(_read_axis(axis) for axis, count in gathered[ranks[0]] for _ in range(count)))
    return tuple(cells)


def _read_axis(axis: int | str) -> Axis:
    return Division(axis) if isinstance(axis, str) else axis


def cuts_of(tensor: DTensor) -> list[tuple[int, Placement]]:
    """Return the mesh dimensions along which a tensor is not replicated, with its placements."""
    cuts = [(dim, place) for dim, place in enumerate(tensor.placements) if not place.is_replicate()]
    return [(dim, place) for dim, place in cuts if place.is_partial() or tensor.device_mesh.size(dim) > 1]


def axis_of(entry: ModelTensor, shards: int, at: Coordinates) -> int | Literal[Division.REPLICATED]:
    """Return the axis along which a rank's part of a tensor is cut, and check the part against the state."""
    tensor = entry.tensor()
    if not isinstance(tensor, DTensor):
        return Division.REPLICATED
    hint = "shard it with xffl.shard, or over the state's own mesh, or tell the state the cell_shape"
    cuts = cuts_of(tensor)
    if not cuts:
        return Division.REPLICATED
    dim, place = cuts[0]
    if len(cuts) > 1 or type(place) is not Shard:
        raise ConfigError(
            f"tensor {entry.name!r} has placements {tensor.placements}; a round takes tensors cut along one axis of "
            f"one mesh dimension; {hint}"
        )
    parts, part = tensor.device_mesh.size(dim), tensor.device_mesh.get_local_rank(dim)
    if (parts, part) != (shards, at.shard):
        raise ConfigError(
            f"tensor {entry.name!r} is part {part} of {parts} here, but the state says shard {at.shard} of {shards}; "
            f"{hint}"
        )
    axis = place.dim
    if entry.elements(axis).numel() != chunk_numel(entry, axis, shards, at.shard):
        raise ConfigError(f"tensor {entry.name!r} is cut unevenly along axis {axis}, not as torch.chunk does; {hint}")
    return axis


def chunk_numel(entry: ModelTensor, axis: int, shards: int, shard: int) -> int:
    """Return how many elements a shard has of a tensor that is cut as :func:`torch.chunk` does."""
    length = entry.real_shape[axis]
    first, last = Cut.of_axis(length, prod(entry.real_shape) // max(1, length), shards).bounds(shard)
    return last - first


POLICIES = ("average", "local", "first")
"""What a round may do with a tensor: average it over the cells, leave it unchanged, or copy it from the first cell."""

Pattern = str | type[nn.Module]
"""What a policy applies to: names that match a pattern (:mod:`fnmatch`), or all tensors in modules of a type."""


class TensorsBeside(Protocol):
    """What lies beside the parameters of a model, and is written as text for comparisons."""

    def tensors_beside(self, entries: Sequence[ModelTensor]) -> Iterable[ModelTensor]:
        """Return what rounds move beside these parameters; local."""

    def __str__(self) -> str:
        """Return what is the same on all ranks that move the same."""


class Manifest:
    """The tensors of a model, sorted by name."""

    def __init__(
        self,
        model: nn.Module,
        policies: Mapping[Pattern, str] | None = None,
        codec: str | Codec | Mapping[str, str | Codec] = "none",
        extra: nn.Module | None = None,
        moments: TensorsBeside | None = None,
    ) -> None:
        reshard(model)
        check_reduced(model)
        if policies is not None and not isinstance(policies, Mapping):
            raise ConfigError(f"policies must be a mapping of name patterns or types to policies, got {policies!r}")
        policies = dict(policies or {})
        self.codecs: dict[str, Codec | None] = {}
        codecs: dict[Pattern, str] = {}
        for pattern, chosen in codec.items() if isinstance(codec, Mapping) else [("", codec)]:
            made = None if chosen == "none" else codec_of(chosen)
            codecs[pattern] = "none" if made is None else str(made)
            self.codecs[codecs[pattern]] = made
        for key, policy in policies.items():
            one_of(f"policy for {key!r}", policy, POLICIES)
        entries: list[ModelTensor] = []
        used: set[Pattern] = set()
        ties = ties_of(model)
        for name, module, leaf, tensor in tensors_of(model):
            owners = {other: owners_of(model, other) for other in ties[id(tensor)]}
            policy = choose_by_pattern("policies", owners, policies, used) or default_policy(module, leaf, tensor)
            if isinstance(codec, Mapping):
                codec_name = choose_by_pattern("codecs", owners, codecs, used) or "none"
            else:  # a plain codec applies to parameters; buffers need a pattern
                codec_name = "none" if leaf in module._buffers else codecs[""]
            codec_name = codec_name if policy == "average" else "none"
            entries.append(_entry(name, policy=policy, codec=codec_name, module=module, leaf=leaf, tensor=tensor))
        self._patterns = [("policies", pattern) for pattern in policies] + [("codecs", pattern) for pattern in codecs]
        # In pipeline parallelism a pattern may match tensors of another stage only: check_patterns() decides.
        self.is_used = tuple(not pattern or pattern in used for _, pattern in self._patterns)
        for name, module, leaf, tensor in () if extra is None else tensors_of(extra):
            entries.append(
                _entry(
                    f"{name} (extra)",
                    policy="average",
                    codec="none",
                    module=module,
                    leaf=leaf,
                    tensor=tensor,
                    is_extra=True,
                )
            )
        if moments is not None:
            entries += moments.tensors_beside([entry for entry in entries if entry.is_stepped])
        self.moments = moments
        self.entries = tuple(sorted(entries, key=operator.attrgetter("name")))
        for entry, other in itertools.pairwise(self.entries):
            if entry.name == other.name:
                raise ConfigError(
                    f"two tensors are called {entry.name!r} without the wrappers {sorted(WRAPPERS)}; rename one"
                )
        self.model = model
        self.roots = (model,) if extra is None else (model, extra)
        self._held = HeldTensors.of(self.roots)
        self.moving: tuple[ModelTensor, ...] = tuple(entry for entry in self.entries if entry.policy != "local")

    def __str__(self) -> str:
        rows = [str(entry) for entry in self.entries]
        return "\n".join(rows if self.moments is None else [*rows, f"(moments)\t{self.moments}"])

    def check_patterns(self, replica_tensors: ReplicaTensors | None = None) -> None:
        """Raise if a pattern matches no tensor, or only tensors that an earlier pattern matches; local."""
        is_used = self.is_used if replica_tensors is None else replica_tensors.is_used
        names = [entry.name for entry in self.entries] if replica_tensors is None else replica_tensors.names
        for what in ("policies", "codecs"):
            patterns = zip(self._patterns, is_used, strict=True)
            unused = [pattern for (kind, pattern), used in patterns if kind == what and not used]
            if not unused:
                continue
            shown = sorted(pattern if isinstance(pattern, str) else pattern.__name__ for pattern in unused)
            texts = [pattern for pattern in unused if isinstance(pattern, str)]
            if any(fnmatch.fnmatchcase(name, pattern) for name in names for pattern in texts):
                raise ConfigError(f"{what} {shown} come after patterns that match the same; put the narrower first")
            raise ConfigError(f"{what} {shown} match no tensor; names look like {names[:3]}")

    def check(self) -> None:
        """Raise if the model no longer has the tensors that it had; local."""
        from xffl.aggregation.engine.planning.changed_tensors import check_tensors

        self._held = check_tensors(self, self._held)

    def axes(self, topology: Topology, at: Coordinates) -> tuple[Axis, ...]:
        """Return the axis along which this rank's cell cuts each moving tensor."""
        return tuple(axis_of(entry, topology.shards(at.cell), at) for entry in self.moving)

    def items(
        self,
        topology: Topology,
        axes: Sequence[Sequence[Axis]],
        replica_tensors: ReplicaTensors | None = None,
        *,
        least_bytes: int = 1,
        fragments: int = 1,
    ) -> tuple[Item, ...]:
        """Return the moving tensors as items of the plan."""
        items = []
        tensors: Sequence[TensorInfo] = self.moving if replica_tensors is None else replica_tensors.moving
        dealt = _fragments_of(tensors, fragments)
        for index, entry in enumerate(tensors):
            by_cell = [cell[index] for cell in axes]
            axis = canonical_axis(entry, by_cell)
            numel = prod(entry.real_shape)
            least = max(1, least_bytes // entry.real_dtype.itemsize)
            # A tensor that is copied from one cell is not cut, so that it is copied from a single rank.
            least = max(least, numel) if entry.policy == "first" else least
            cuts: tuple[Cut, ...] | tuple[MeshCut, ...]
            if axis is Division.BY_PARTS:
                assert replica_tensors is not None, "only replicas with a mesh have parts"
                cuts = (MeshCut.of_parts(replica_tensors.parts[index], least),) * topology.cells
            else:
                length = entry.real_shape[axis] if entry.real_shape else 1
                cuts = tuple(
                    Cut.of_copy(numel, topology.shards(cell), least)
                    if of_cell is Division.REPLICATED
                    else Cut.of_axis(length, numel // max(1, length), topology.shards(cell))
                    for cell, of_cell in enumerate(by_cell)
                )
            dtype = str(entry.real_dtype).removeprefix("torch.")
            is_mean_in_cell = entry.is_buffer and entry.policy == "average"
            items.append(
                Item(
                    index,
                    dtype=dtype,
                    rule=entry.policy,
                    is_mean_in_cell=is_mean_in_cell,
                    cuts=cuts,
                    codec=entry.codec,
                    fragment=dealt[index],
                    is_stepped=entry.is_stepped,
                )
            )
        return tuple(items)


def _entry(
    name: str, policy: str, codec: str, module: nn.Module, leaf: str, tensor: torch.Tensor, *, is_extra: bool = False
) -> ModelTensor:
    check_tensor(name, policy, tensor)
    is_buffer = leaf in module._buffers
    is_stepped = policy == "average" and tensor.requires_grad and not (is_buffer or is_extra)
    return ModelTensor(
        name,
        policy=policy,
        codec=codec,
        shape=tuple(tensor.shape),
        dtype=tensor.dtype,
        is_buffer=is_buffer,
        is_stepped=is_stepped,
        module=module,
        leaf=leaf,
    )


def choose_by_pattern(
    what: str, owners: Mapping[str, Sequence[nn.Module]], patterns: Mapping[Pattern, str], used: set[Pattern]
) -> str | None:
    """Return the value of the patterns that match a tensor under one of its names, and add them to ``used``."""
    matches = (_match(name, modules, patterns) for name, modules in owners.items())
    matched = {pattern for pattern in matches if pattern is not None}
    used |= matched
    chosen = sorted({patterns[pattern] for pattern in matched})
    if len(chosen) > 1:
        raise ConfigError(
            f"{what} {', '.join(map(repr, chosen))} match one tensor under its names {', '.join(owners)}; give these "
            "names the same"
        )
    return chosen[0] if chosen else None


def _match(name: str, owners: Sequence[nn.Module], patterns: Iterable[Pattern]) -> Pattern | None:
    """Return the first pattern that matches a tensor's name or a module that contains it."""
    for pattern in patterns:
        if isinstance(pattern, str):
            is_match = fnmatch.fnmatchcase(name, pattern)
        else:
            is_match = any(isinstance(owner, pattern) for owner in owners)
        if is_match:
            return pattern
    return None


def kinds_of_moments(tensors: Iterable[TensorInfo]) -> list[str]:
    """Return the kinds of moments that there are, in the order of their fragments."""
    return sorted({tensor.moment for tensor in tensors} - {""})


def _fragments_of(tensors: Sequence[TensorInfo], fragments: int) -> list[int]:
    """Return the fragment of each tensor: of the model, and behind these for each kind of moment as many again."""
    sizes = {one.name: prod(one.real_shape) * one.real_dtype.itemsize for one in tensors if not one.moment}
    dealt = dict(zip(sizes, _deal(list(sizes.values()), fragments), strict=True))
    places = {kind: place * fragments for place, kind in enumerate(kinds_of_moments(tensors), 1)}
    return [places[one.moment] + dealt[one.beside] if one.moment else dealt[one.name] for one in tensors]


def _deal(sizes: Sequence[int], fragments: int) -> list[int]:
    """Divide tensors into fragments of about the same size: the largest first, each into the smallest fragment."""
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
