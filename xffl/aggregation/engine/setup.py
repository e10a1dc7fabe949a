"""What is done once, when an aggregator is made: ranks are compared, and what each exchanges is planned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from xffl.aggregation.algorithms.combiners import WeightedCombiner
from xffl.aggregation.arithmetic import is_built_in
from xffl.aggregation.engine.alike.arithmetic_check import Arithmetic, compare_arithmetic, processor_number
from xffl.aggregation.engine.alike.equal_cells import check_start
from xffl.aggregation.engine.alike.rank_differences import FORMAT_LINE, describe_models
from xffl.aggregation.engine.buffers import Copies, Layout
from xffl.aggregation.engine.exchange import Exchange, Memory, Way
from xffl.aggregation.engine.global_model import GlobalModel
from xffl.aggregation.engine.gpu_memory import GpuMemory, HostCopies
from xffl.aggregation.engine.groups import RoundScope, select_groups
from xffl.aggregation.engine.planning.coverage import check_gradients
from xffl.aggregation.engine.planning.plan import Item, digest, plan_groups, plan_transfers
from xffl.aggregation.engine.planning.replica_tensors import (
    RankTensors,
    ReplicaTensors,
    describe_rank_tensors,
    gather_replica_tensors,
)
from xffl.aggregation.engine.planning.tensors import (
    Axis,
    Manifest,
    ModelTensor,
    TensorInfo,
    gather_axes,
)
from xffl.aggregation.engine.stages.agreed import AgreedModel
from xffl.aggregation.engine.stages.codecs import Codecs
from xffl.aggregation.engine.stages.masks import Masks
from xffl.aggregation.engine.stages.norms import Norms
from xffl.aggregation.engine.stages.order import in_order
from xffl.aggregation.engine.stages.privacy import Protection
from xffl.aggregation.engine.stages.server_clip import ServerClip
from xffl.aggregation.engine.stages.stage import RoundStage
from xffl.aggregation.engine.stages.weighing import ToldWeights, Weighed
from xffl.aggregation.engine.stages.whole_models import WholeModels
from xffl.aggregation.engine.transport import Link
from xffl.aggregation.options import Options
from xffl.aggregation.privacy import make_masker
from xffl.costs import EXCHANGE_FORMAT
from xffl.distributed.agreement.consistency import (
    check_consistent,
    control_device,
    keep_error,
    run_on_all_ranks,
)
from xffl.distributed.collectives import Group, all_reduce
from xffl.distributed.distributed_state import DistributedState
from xffl.errors import ConfigError, XfflError
from xffl.topology import Topology

__all__ = [
    "ComparedModels",
    "Comparison",
    "RankModel",
    "agree_on_number",
    "arithmetic_of",
    "check_given",
    "compare_models",
    "compare_processors",
    "make_copies",
    "make_exchange",
    "plan_items",
]

MODELS = "models"
"""What ranks compare first."""


@dataclass(frozen=True)
class RankModel:
    """What one rank has to do with rounds, as it knows by itself."""

    scope: RoundScope
    options: Options
    manifest: Manifest
    axes: tuple[Axis, ...]  # that its tensors are cut along; none where cells have a mesh
    tensors: RankTensors | None  # its tensors and their parts, where cells have a mesh
    text: str  # what must be the same on all ranks


@dataclass(frozen=True)
class ComparedModels:
    """What the ranks have to do with rounds, after they have compared it."""

    scope: RoundScope
    options: Options
    manifest: Manifest
    axes: Sequence[Sequence[Axis]]  # by cell, that tensors are cut along
    replica_tensors: ReplicaTensors | None  # the parts of all shards, where cells have a mesh
    comparison: Comparison  # how the rest is compared that ranks must have in common

    @property
    def moving(self) -> Sequence[TensorInfo]:
        """The tensors that rounds move."""
        return self.manifest.moving if self.replica_tensors is None else self.replica_tensors.moving


class Comparison:
    """Compares what ranks must have in common before they make rounds together: here each thing by a call of its own.

    The ranks of one world may be in other calls, which comparisons of one size find out. All methods but
    :meth:`begin` are collective over the group. They raise the same error on all ranks where these differ.

    :param group: The ranks; ``None`` for the world.
    """

    def __init__(self, group: Group | None) -> None:
        self.group = group

    def begin(self, own: RankModel | None) -> None:
        """Take note of what this rank has to do with rounds, ``None`` if it has an error; some compare it at once."""

    def compare_models(self, text: str, error: XfflError | None) -> None:
        """Compare what ``text`` says of the ranks' models and options, or raise the error of one of them."""
        check_consistent(MODELS, text, error=error, describe=describe_models, group=self.group)

    def gather_axes(self, own: RankModel) -> Sequence[Sequence[Axis]]:
        """Return by cell the axes that its tensors are cut along."""
        return gather_axes(own.axes, own.scope.topology, own.scope.world)

    def compare_arithmetic(self, arithmetic: Arithmetic, world: Group | None) -> None:
        """Compare what the ranks compute of fixed values."""
        compare_arithmetic(arithmetic, group=world)

    def compare_plans(self, plan: str, world: Group | None) -> None:
        """Compare what the ranks are about to exchange."""
        check_consistent("exchange plans", plan, group=world)

    def agree_on_number(self, number: int, world: Group | None) -> int:
        """Return the highest number of any rank."""
        highest = torch.tensor(number, dtype=torch.int64, device=control_device(world))
        all_reduce(highest, dist.ReduceOp.MAX, world)
        return int(highest)


def compare_models(
    model: nn.Module,
    state: DistributedState | RoundScope,
    read: Callable[[], tuple[Options, Manifest]],
    *,
    is_reduced_by_caller: bool,
) -> ComparedModels:
    """Compare the ranks' models and options, and gather what they hold.

    Collective over the world: a few bytes a rank, with a mesh inside the cells some hundred for each of its tensors.
    """
    group = state.cross_world if isinstance(state, RoundScope) else None
    makes_comparison = state.compare if isinstance(state, RoundScope) else None
    comparison = (makes_comparison or Comparison)(group)
    own: RankModel | None = None
    with keep_error(
        lambda wrong: ConfigError(f"the model or its policies cannot be read: {type(wrong).__name__}: {wrong}")
    ) as failure:
        own = _read_model(model, state, read, is_reduced_by_caller=is_reduced_by_caller)
    comparison.begin(own)
    comparison.compare_models("" if own is None else own.text, failure.error)
    assert own is not None, "all ranks have raised the error"
    scope, options, manifest, rank_tensors = own.scope, own.options, own.manifest, own.tensors
    topology = scope.topology
    if rank_tensors is None:
        axes = comparison.gather_axes(own)
        return ComparedModels(scope, options, manifest, axes=axes, replica_tensors=None, comparison=comparison)
    mesh = scope.state.hsdp_mesh
    assert mesh is not None, "a state with a cell shape has replicas"
    with run_on_all_ranks(MODELS, group=group, describe=describe_models) as share:
        replica_tensors = gather_replica_tensors(rank_tensors, mesh.get_group(1))
        manifest.check_patterns(replica_tensors)
        check_gradients(
            manifest.model,
            scope.state,
            is_reduced_by_caller=is_reduced_by_caller,
            holders_of=partial(_holders_of, scope.state.topology, replica_tensors),
        )
        share(replica_tensors.text)
    axes = (replica_tensors.axes,) * topology.cells
    return ComparedModels(scope, options, manifest, axes=axes, replica_tensors=replica_tensors, comparison=comparison)


def _read_model(
    model: nn.Module,
    state: DistributedState | RoundScope,
    read: Callable[[], tuple[Options, Manifest]],
    *,
    is_reduced_by_caller: bool,
) -> RankModel:
    """Read what this rank has to do with rounds; local. Raises where rounds cannot move its model."""
    check_given(model, state)
    scope = state if isinstance(state, RoundScope) else RoundScope(state, state.topology)
    topology = scope.topology
    device = scope.device
    options, manifest = read()
    if not options.is_mean:
        options.combiner.check(topology.cells)
    at = topology.coordinates(scope.rank)
    text = f"{FORMAT_LINE}\t{EXCHANGE_FORMAT}\n(options)\t{options}\n"
    axes: tuple[Axis, ...] = ()
    tensors: RankTensors | None = None
    if topology.cell_shape is None:
        manifest.check_patterns()
        check_gradients(manifest.model, scope.state, is_reduced_by_caller=is_reduced_by_caller)
        axes = manifest.axes(topology, at)
        text += str(manifest)
    else:
        tensors = describe_rank_tensors(manifest, topology, at, scope.first)
    options.check_model(manifest, scope.gpu or device)
    return RankModel(scope, options, manifest, axes=axes, tensors=tensors, text=text)


def _holders_of(topology: Topology, replica_tensors: ReplicaTensors, name: str) -> list[int]:
    """Return the ranks of this rank's cell that hold a tensor, or a part of it."""
    cell = topology.cell_of(dist.get_rank())
    replicas = range(topology.replicas(cell))
    return [topology.rank_of(cell, replica, shard) for replica in replicas for shard in replica_tensors.shards[name]]


def check_given(model: object, state: object) -> None:
    """Raise where the model is no module, or the state neither a state nor a part of the world."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(state, DistributedState | RoundScope):
        raise ConfigError(
            f"state must be the DistributedState of xffl.session() or a set-up, got {type(state).__name__}"
        )


def compare_processors(compared: ComparedModels) -> float:
    """Compare how the ranks compute, and return the number of this rank's kind of processor; collective."""
    arithmetic = arithmetic_of(compared)
    compared.comparison.compare_arithmetic(arithmetic, compared.scope.world)
    return processor_number(*arithmetic.devices)


def arithmetic_of(compared: ComparedModels) -> Arithmetic:
    """Return what rounds compute on this rank, and where; local."""
    server = compared.options.server
    devices = [compared.scope.device]
    if server is not None and server.device is not None:
        devices.append(torch.device(server.device))
    return Arithmetic(
        devices,
        combiner=compared.options.combiner,
        rule=None if server is None else server.rule,
        codecs=[codec for codec in compared.manifest.codecs.values() if codec is not None],
        cells=compared.scope.topology.cells,
        has_fp64=any(tensor.dtype in (torch.float64, torch.complex128) for tensor in compared.moving),
    )


def agree_on_number(compared: ComparedModels, world: Group | None) -> int:
    """Return what tells an aggregator from all others that its ranks have: the highest number of any rank.

    Collective over ``world``, the ranks that vote.
    """
    agree = partial(compared.comparison.agree_on_number, world=world)
    return compared.scope.state.activity.number_aggregator(agree)


def make_copies(home_device: torch.device | None) -> Copies:
    """Return how values get between model and memory; ``home_device`` is where results are handed round, if apart."""
    return HostCopies() if home_device is not None or torch.cuda.is_available() else Copies()


def plan_items(compared: ComparedModels) -> tuple[tuple[Item, ...], str]:
    """Return the items of the plan of rounds, and a text that is the same on all ranks if their plans are; local."""
    topology = compared.scope.topology
    options = compared.options
    least = options.bucket_bytes
    items = compared.manifest.items(
        topology, compared.axes, compared.replica_tensors, least_bytes=least, fragments=options.fragments
    )
    text = f"{digest(items, topology)}, {least} bytes a bucket, form={options.form_of_groups}, rails={options.rails}"
    return items, text


def make_exchange(compared: ComparedModels, rounds: Callable[[], int]) -> Exchange:
    """Plan what this rank exchanges; make it and its groups. ``rounds`` returns how many there were."""
    scope = compared.scope
    options = compared.options
    manifest = compared.manifest
    axes = compared.axes
    replica_tensors = compared.replica_tensors
    topology = scope.topology
    rank = scope.rank
    items, plan = plan_items(compared)
    compared.comparison.compare_plans(plan, scope.world)
    masker = None
    if options.secure is not None:
        masker = make_masker(options.secure, rank, topology, context=plan, group=scope.world)
    holders = () if replica_tensors is None else replica_tensors.holders
    round_groups = select_groups(scope, multi_rail=options.rails, is_own=options.overlap, holders=holders)
    groups = plan_groups(items, topology, rank)
    transfers = plan_transfers(
        groups,
        topology=topology,
        rank=rank,
        round_groups=round_groups,
        options=options,
        codecs=manifest.codecs,
        is_on_cpu=scope.device.type == "cpu",
        home_device=scope.home_device,
    )
    link = Link(
        transfers,
        scope=scope,
        round_groups=round_groups,
        combiner=options.combiner,
        copies=make_copies(scope.home_device),
    )
    # The moving tensors of all shards in the plan's order, and None for one that this rank has not.
    moving = compared.moving
    here = {entry.name: entry for entry in manifest.moving}
    entries: list[ModelTensor | None] = [here.get(tensor.name) for tensor in moving]
    reads_late = options.overlap or not options.atomic
    layout = Layout(entries, items, axes, topology.coordinates(rank), needs_memory_of_its_own=reads_late)
    model: GlobalModel | None = None
    if options.needs_agreed:
        model = GlobalModel(transfers, layout, options, link.device, arena=scope.arena)
    # On all ranks or on none, also on one that encodes nothing itself. A cell that is alone for now may be given what
    # codecs have left out in its rounds with others.
    has_codecs = any(manifest.codecs.values()) and (topology.cells > 1 or scope.is_elastic)
    codecs = Codecs(transfers, layout, link, plan) if has_codecs else None
    combiner = options.combiner
    way = Way() if options.is_mean else Weighed(combiner)
    if combiner.needs_distances:
        way = WholeModels(combiner, link, codecs)
    atomic = options.atomic
    memory: Memory
    if isinstance(link.copies, HostCopies):
        memory = GpuMemory(layout, transfers, link, atomic=atomic)
    else:
        memory = Memory(layout, transfers, link.device, copies=link.copies, atomic=atomic, arena=link.arena)
    exchange = Exchange(
        layout,
        transfers,
        link,
        memory,
        atomic=atomic,
        way=way,
    )
    stages: list[RoundStage] = []
    if manifest.moments is not None:
        from xffl.aggregation.engine.stages.moments import make_moments

        stages.append(make_moments(manifest.moments, exchange, moving, fragments=options.fragments, rounds=rounds))
    if isinstance(combiner, WeightedCombiner) and not is_built_in(combiner):
        stages.append(ToldWeights())
    if options.tensor_counts is not None:
        from xffl.aggregation.engine.stages.tensor_weights import WeighedTensors

        assert model is not None, "kept with counts"
        stages.append(WeighedTensors(options.tensor_counts, compared.moving, layout, model=model, codecs=codecs))
    if codecs is not None:
        stages.append(codecs)
    if masker is not None:
        stages.append(Masks(masker, transfers, link))
    if model is not None and options.privacy is not None:
        # Where cells are worlds of their own, ranks of these would have the same numbers.
        number = rank if scope.cross_world is not None else round_groups.first + rank
        stages.append(Protection(options.privacy, number, model, masker))
    if model is not None and options.has_norms:
        stages.append(Norms(model, topology))
    if model is not None and options.server is not None and options.server.clip is not None:
        cell, cells = topology.cell_of(rank), topology.cells
        stages.append(ServerClip(options.server.clip, model, exchange.memory, cell=cell, cells=cells))
    if model is not None:
        stages.append(AgreedModel(model, exchange.memory, topology, is_encoded=has_codecs))
    exchange.stages = in_order(stages)
    if model is not None:
        if not scope.goes_on:
            model.reset_from_model()
        if not scope.is_elastic:  # else cells join in mid-training, and are told what was agreed
            check_start(moving, exchange.own_values(), scope)
    return exchange
