"""What is done once, when an aggregator is made: ranks are compared, and what each exchanges is planned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from xffl.aggregation.algorithms.combiners import WeightedCombiner
from xffl.aggregation.arithmetic import is_built_in
from xffl.aggregation.engine.arithmetic_check import compare_arithmetic, processor_number
from xffl.aggregation.engine.buffers import Copies, Layout
from xffl.aggregation.engine.equal_cells import check_start
from xffl.aggregation.engine.exchange import Exchange, Memory, Way
from xffl.aggregation.engine.global_model import GlobalModel
from xffl.aggregation.engine.gpu_memory import GpuMemory, HostCopies
from xffl.aggregation.engine.groups import RoundScope, select_groups
from xffl.aggregation.engine.planning.coverage import check_gradients
from xffl.aggregation.engine.planning.plan import digest, plan_groups, plan_transfers
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
from xffl.aggregation.engine.rank_differences import FORMAT_LINE, describe_models
from xffl.aggregation.engine.stages.agreed import AgreedModel
from xffl.aggregation.engine.stages.clip import Clip
from xffl.aggregation.engine.stages.codecs import Codecs
from xffl.aggregation.engine.stages.masks import Masks
from xffl.aggregation.engine.stages.norms import Norms
from xffl.aggregation.engine.stages.order import in_order
from xffl.aggregation.engine.stages.privacy import Protection
from xffl.aggregation.engine.stages.stage import RoundStage
from xffl.aggregation.engine.stages.told_weights import ToldWeights
from xffl.aggregation.engine.stages.whole_models import WholeModels
from xffl.aggregation.engine.transport import Link
from xffl.aggregation.options import Options
from xffl.aggregation.privacy import make_masker
from xffl.costs import EXCHANGE_FORMAT
from xffl.distributed.consistency import check_consistent, run_on_all_ranks
from xffl.distributed.distributed_state import DistributedState
from xffl.errors import ConfigError
from xffl.topology import Topology

__all__ = ["check_given", "compare_models", "compare_processors", "make_copies", "make_exchange"]


def compare_models(
    model: nn.Module,
    state: DistributedState | RoundScope,
    read: Callable[[], tuple[Options, Manifest]],
    *,
    is_reduced_by_caller: bool,
) -> tuple[RoundScope, Options, Manifest, Sequence[Sequence[Axis]], ReplicaTensors | None]:
    """Compare the ranks' models and options, and gather what they hold.

    Collective over the world: a few bytes a rank, with a mesh inside the cells some hundred for each of its tensors.
    Returns by cell the axes that tensors are cut along, and with a mesh the parts of all shards.
    """
    rank_tensors: RankTensors | None = None
    axes: tuple[Axis, ...] = ()
    group = state.cross_world if isinstance(state, RoundScope) else None
    with run_on_all_ranks(
        "models",
        group=group,
        convert=lambda wrong: ConfigError(f"the model or its policies cannot be read: {type(wrong).__name__}: {wrong}"),
        describe=describe_models,
    ) as share:
        check_given(model, state)
        scope = state if isinstance(state, RoundScope) else RoundScope(state, state.topology)
        topology, rank = scope.topology, scope.rank
        device = scope.device
        options, manifest = read()
        options.combiner.check(topology.cells)
        at = topology.coordinates(rank)
        text = f"{FORMAT_LINE}\t{EXCHANGE_FORMAT}\n(options)\t{options}\n"
        if topology.cell_shape is None:
            manifest.check_patterns()
            check_gradients(manifest.model, scope.state, is_reduced_by_caller=is_reduced_by_caller)
            axes = manifest.axes(topology, at)
            text += str(manifest)
        else:
            rank_tensors = describe_rank_tensors(manifest, topology, at, scope.first)
        options.check_model(manifest, scope.gpu or device)
        share(text)
    if rank_tensors is None:
        return scope, options, manifest, gather_axes(axes, topology, scope.world), None
    mesh = scope.state.hsdp_mesh
    assert mesh is not None, "a state with a cell shape has replicas"
    with run_on_all_ranks("models", group=group, describe=describe_models) as share:
        replica_tensors = gather_replica_tensors(rank_tensors, mesh.get_group(1))
        manifest.check_patterns(replica_tensors)
        check_gradients(
            manifest.model,
            scope.state,
            is_reduced_by_caller=is_reduced_by_caller,
            holders_of=partial(_holders_of, scope.state.topology, replica_tensors),
        )
        share(replica_tensors.text)
    return scope, options, manifest, (replica_tensors.axes,) * topology.cells, replica_tensors


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


def compare_processors(
    scope: RoundScope, options: Options, manifest: Manifest, replica_tensors: ReplicaTensors | None
) -> float:
    """Compare how the ranks compute, and return the number of this rank's kind of processor; collective."""
    server = options.server
    places = [scope.device]
    if server is not None and server.device is not None:
        places.append(torch.device(server.device))
    moving: Sequence[TensorInfo] = manifest.moving if replica_tensors is None else replica_tensors.moving
    compare_arithmetic(
        places,
        combiner=options.combiner,
        rule=None if server is None else server.rule,
        codecs=[one for one in manifest.codecs.values() if one is not None],
        cells=scope.topology.cells,
        has_fp64=any(tensor.dtype in (torch.float64, torch.complex128) for tensor in moving),
        group=scope.world,
    )
    return processor_number(*places)


def make_copies(home_device: torch.device | None) -> Copies:
    """Return how values get between model and memory; ``home_device`` is where results are handed round, if apart."""
    return HostCopies() if home_device is not None or torch.cuda.is_available() else Copies()


def make_exchange(
    scope: RoundScope,
    options: Options,
    manifest: Manifest,
    axes: Sequence[Sequence[Axis]],
    replica_tensors: ReplicaTensors | None,
) -> Exchange:
    """Plan what this rank exchanges; make it and its groups."""
    topology = scope.topology
    rank = scope.rank
    least, fragments = options.bucket_bytes, options.fragments
    items = manifest.items(topology, axes, replica_tensors, least_bytes=least, fragments=fragments)
    plan = f"{digest(items, topology)}, {least} bytes a bucket, form={options.form_of_groups}, rails={options.rails}"
    check_consistent("exchange plans", plan, group=scope.world)
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
    moving: Sequence[TensorInfo] = manifest.moving if replica_tensors is None else replica_tensors.moving
    here = {entry.name: entry for entry in manifest.moving}
    entries: list[ModelTensor | None] = [here.get(tensor.name) for tensor in moving]
    reads_late = options.overlap or not options.atomic
    layout = Layout(entries, items, axes, topology.coordinates(rank), needs_memory_of_its_own=reads_late)
    model = GlobalModel(transfers, layout, options, link.device) if options.needs_agreed else None
    # On all ranks or on none, also on one that encodes nothing itself. A cell that is alone for now may be given what
    # codecs have left out in its rounds with others.
    has_codecs = any(manifest.codecs.values()) and (topology.cells > 1 or scope.is_elastic)
    codecs = Codecs(transfers, layout, link, plan) if has_codecs else None
    combiner = options.combiner
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
        way=WholeModels(combiner, link, codecs) if combiner.needs_distances else Way(combiner),
    )
    stages: list[RoundStage] = []
    if isinstance(combiner, WeightedCombiner) and not is_built_in(combiner):
        stages.append(ToldWeights())
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
        stages.append(Clip(options.server.clip, model, exchange.memory, cell=cell, cells=cells))
    if model is not None:
        stages.append(AgreedModel(model, exchange.memory, topology, is_encoded=has_codecs))
    exchange.stages = in_order(stages)
    if model is not None:
        if not scope.goes_on:
            model.reset_from_model()
        if not scope.is_elastic:  # else cells join in mid-training, and are told what was agreed
            check_start(moving, exchange.own_values(), scope)
    return exchange
