"""Put together what rounds need: the model's manifest, compared over all ranks, the plan, and what walks it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from xffl.aggregation.axes import gather_axes
from xffl.aggregation.crossing import Crossing
from xffl.aggregation.entries import Entry, Facts
from xffl.aggregation.exchange import Exchange
from xffl.aggregation.feedback import Feedback
from xffl.aggregation.globals import GlobalState
from xffl.aggregation.layout import Layout
from xffl.aggregation.manifest import Manifest, describe_difference
from xffl.aggregation.mean import arithmetic_of
from xffl.aggregation.options import Options
from xffl.aggregation.placement import Holding, Spread, holding_of, spread_of
from xffl.aggregation.plan import Item, digest, plan_lanes
from xffl.aggregation.progress import Progress
from xffl.aggregation.protocol import Protocol
from xffl.aggregation.routes import Place, Routes, routes_of
from xffl.aggregation.secure import Masker, make_masker
from xffl.aggregation.starting import agree_start
from xffl.aggregation.tracks import Track, make_tracks
from xffl.aggregation.vote import next_number
from xffl.distributed.agreement import agree
from xffl.distributed.backends import transfer_device
from xffl.distributed.distributed_state import DistributedState
from xffl.errors import CheckpointError, ConfigError, XfflError

__all__ = ["Assembly", "assemble", "check_given"]


@dataclass(frozen=True)
class Assembly:
    """Everything that an aggregator works with.

    :param device: Where the groups' backend communicates from.
    :param options: What it was asked for.
    :param manifest: The tensors of the model.
    :param routes: This rank's process groups.
    :param exchange: What moves.
    :param protocol: The votes around it.
    :param plan: What lanes and buckets follow from, as text.
    :param cell: This rank's cell.
    :param arithmetic: What :func:`xffl.aggregation.mean.arithmetic_of` says here.
    :param has_codecs: Whether something is written by a lossy codec.
    :param layout: Where this rank's elements lie.
    :param tracks: Its lanes.
    :param feedback: What lossy codecs remember of them, by number.
    :param stream: What a round under way works on, of the state's; ``None`` where there is none.
    """

    device: torch.device
    options: Options
    manifest: Manifest
    routes: Routes
    exchange: Exchange
    protocol: Protocol
    plan: str
    cell: int
    arithmetic: float
    has_codecs: bool
    layout: Layout
    tracks: tuple[Track, ...]
    feedback: Mapping[int, Feedback]
    stream: torch.cuda.Stream | None

    def state_dict(self) -> dict[str, Any]:
        """Return what rounds remember: of lossy codecs, of privacy, and of the last agreed model; local.

        :return: Numbers, texts and copies of tensors.
        """
        state: dict[str, Any] = {}
        if self.has_codecs:
            state["codecs"] = self.exchange.memory.state_dict(self.plan)
        if self.exchange.accountant is not None:
            state["privacy"] = self.exchange.accountant.state_dict()
        if self.exchange.agreed is not None:
            state["agreed"] = self.exchange.agreed.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned; local.

        :param state: An aggregator's state that was checked.
        :raises CheckpointError: if it is that of another set-up.
        """
        if self.has_codecs:
            self.exchange.memory.load_state_dict(state["codecs"], self.plan)
        if self.exchange.accountant is not None:
            self.exchange.accountant.load_state_dict(state["privacy"])
        if self.exchange.agreed is not None:
            self.exchange.agreed.load_state_dict(state["agreed"])

    def check_saved(self, state: Mapping[str, Any]) -> None:
        """Raise where an aggregator's state has parts that this one would lose without a word, or lacks some; local.

        :param state: What :meth:`xffl.Aggregator.state_dict` returned.
        :raises CheckpointError: if it is that of another set-up.
        """
        if not isinstance(state, Mapping) or "rounds" not in state:
            raise CheckpointError(f"{type(state).__name__} is no aggregator's state; give what state_dict returned")
        fragments = state.get("fragments", self.options.fragments)
        if fragments != self.options.fragments:
            raise CheckpointError(
                f"the state is that of {fragments} fragments, and this aggregator has {self.options.fragments}; resume "
                "with the same"
            )
        for part, what, is_here in (
            ("codecs", "what lossy codecs remember", self.has_codecs),
            ("privacy", "what privacy has cost", self.exchange.accountant is not None),
            ("agreed", "the last agreed model of server, norms or privacy", self.exchange.agreed is not None),
            ("above", "levels above the lowest", False),
        ):
            if part in state and not is_here:
                raise CheckpointError(
                    f"the state holds {what}, which this aggregator was made without; resume with the same options"
                )
            if is_here and part not in state:
                raise CheckpointError(
                    f"the state has not {what}; it was saved without, so resume with the same options"
                )

    @torch.no_grad()
    def restart(self) -> None:
        """Let codecs and a server optimizer go on from the model as it stands; local, with the same in all cells."""
        self.layout.look_up()
        for track in self.tracks:
            if (feedback := self.feedback.get(track.number)) is not None:
                for bucket in track.buckets:
                    self.layout.pack(bucket, feedback.reference[bucket.start : bucket.stop])
        if self.exchange.agreed is not None:
            self.exchange.agreed.take()


def check_given(model: object, state: object) -> None:
    """Raise where a model is none, or what describes the federation does not.

    :param model: A :class:`torch.nn.Module`.
    :param state: A :class:`~xffl.distributed.DistributedState`, or a place.
    :raises ConfigError: if they are something else.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{type(model).__name__} is no model; give a torch.nn.Module")
    if not isinstance(state, DistributedState | Place):
        raise ConfigError(
            f"{type(state).__name__} is no state; give the DistributedState of xffl.session() or a set-up"
        )


def assemble(
    model: nn.Module,
    state: DistributedState | Place,
    read: Callable[[], tuple[Options, Manifest]],
    check: Callable[[], None],
) -> Assembly:
    """Compare the ranks' models and options, and prepare rounds.

    Collective over the world: a few bytes a rank, with a mesh inside the cells some hundred for each of its tensors;
    and groups of its own where rounds overlap training, or where several shards but not all hold the same elements.

    :param model: The model.
    :param state: The state that describes the federation, or a part of the world, each rank its own at the same time.
    :param read: Reads options and model; what it raises is told to all ranks.
    :param check: Raises where the model cannot be used.
    :return: What was made.
    :raises ConfigError: if an argument or a tensor cannot be meant, or the ranks' models differ; on all ranks alike.
    """
    error: XfflError | None = None
    text, holding = "", None
    axes: tuple[int, ...] = ()
    try:
        check_given(model, state)
        place = state if isinstance(state, Place) else Place(state, state.topology)
        topology, rank = place.topology, place.rank
        device = transfer_device(place.state)
        check()
        options, manifest = read()
        options.combiner.check(topology.cells)
        at = topology.coordinates(rank)
        text = f"(options)\t{options}\n"
        if topology.cell_shape is None:
            manifest.check_patterns()
            axes = manifest.axes(topology, at)
            text += str(manifest)
        else:
            holding = holding_of(manifest.entries, manifest.is_used, topology, at, place.first)
        _check_protected(options, manifest)
        if options.overlap and device.type == "cuda" and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
            raise ConfigError(
                "CUDA_DEVICE_MAX_CONNECTIONS=1 lets a GPU begin one thing at a time, so that rounds behind local steps "
                "(overlap=True) and the steps would wait for each other; leave it out, or set 8 or more"
            )
    except XfflError as wrong:
        error = wrong
    except Exception as wrong:  # noqa: BLE001 - told to all ranks
        error = ConfigError(f"the model or its policies cannot be read: {type(wrong).__name__}: {wrong}")
    agree("models", text, error=error, describe=describe_difference)
    world = place.world
    spread = None if holding is None else _agreed_spread(holding, manifest, place)
    axes_of_cells = gather_axes(axes, topology, world) if spread is None else (spread.axes,) * topology.cells
    items = manifest.items(
        topology, axes_of_cells, least_bytes=options.bucket_bytes, fragments=options.fragments, spread=spread
    )
    plan = (
        f"{digest(items, topology)}, {options.bucket_bytes} bytes a bucket, form={options.form_of_lanes}, "
        f"rails={options.rails}"
    )
    agree("exchange plans", plan, group=world)
    masker = None
    if options.secure is not None:
        masker = make_masker(options.secure, rank, topology, context=plan, group=world)
    return _assemble(
        manifest, items, axes_of_cells, options, place=place, device=device, masker=masker, plan=plan, spread=spread
    )


def _agreed_spread(holding: Holding, manifest: Manifest, place: Place) -> Spread:
    """Put together what the shards hold, and compare it over all replicas and cells; collective over the world."""
    error: XfflError | None = None
    spread = None
    mesh = place.state.hsdp_mesh
    assert mesh is not None, "a state with a cell shape has replicas"
    try:
        spread = spread_of(holding, mesh.get_group(1))
        manifest.check_patterns(spread)
    except XfflError as wrong:
        error = wrong
    agree("models", "" if spread is None else spread.text, error=error, describe=describe_difference)
    assert spread is not None, "the ranks agree on errors only by raising one"
    return spread


def _check_protected(options: Options, manifest: Manifest) -> None:
    """Raise where something would leave a cell without the protection that was asked for."""
    if options.privacy is not None:
        bare = [entry.name for entry in manifest.moving if not entry.is_stepped]
        if bare:
            raise ConfigError(
                f"privacy is for trainable parameters, but {bare[:5]} would cross as they are; give them policy 'local'"
            )
    if options.secure is not None:
        bare = [entry.name for entry in manifest.moving if entry.policy == "first"]
        if bare:
            raise ConfigError(
                f"secure=True hides means, but {bare[:5]} are taken from cell 0; give them policy 'local'"
            )
        coded = sorted(name for name, codec in manifest.codecs.items() if codec is not None)
        if coded:
            raise ConfigError(f"secure=True adds up fixed-point numbers and goes with no codec such as {coded[0]!r}")


def _assemble(
    manifest: Manifest,
    items: Sequence[Item],
    axes: Sequence[Sequence[int]],
    options: Options,
    *,
    place: Place,
    device: torch.device,
    masker: Masker | None,
    plan: str,
    spread: Spread | None,
) -> Assembly:
    """Plan a rank's lanes and prepare what walks them; collective over the world."""
    topology, rank = place.topology, place.rank
    holders = () if spread is None else spread.holders
    routes = routes_of(place, is_railed=options.rails, is_own=options.overlap, holders=holders)
    tracks = _tracks(manifest, items, options, place, routes, device)
    progress = Progress(device, place.state._timeouts.across_s)
    crossing = Crossing(
        tracks, topology, rank, routes, device, combiner=options.combiner, progress=progress, masker=masker
    )
    at = topology.coordinates(rank)
    reads_late = options.overlap or not options.atomic
    layout = Layout(_entries(manifest, spread), items, axes, at, needs_memory_of_its_own=reads_late)
    exchange = Exchange(
        layout,
        tracks,
        crossing,
        topology=topology,
        rank=rank,
        routes=routes,
        device=device,
        options=options,
        agreed=GlobalState(tracks, layout, options.server, device) if options.needs_agreed else None,
        progress=progress,
        masker=masker,
    )
    if exchange.agreed is not None:
        exchange.agreed.take()
        agree_start(
            manifest.moving if spread is None else spread.moving, exchange, topology, rank, device, routes.world
        )
    number = next_number(routes.world)
    protocol = Protocol(exchange, place, device=device, routes=routes, options=options, number=number)
    return Assembly(
        device,
        options,
        manifest,
        routes,
        exchange,
        protocol,
        plan,
        cell=at.cell,
        arithmetic=arithmetic_of(device),
        has_codecs=any(manifest.codecs.values()) and topology.cells > 1,
        layout=layout,
        tracks=tracks,
        feedback=crossing.feedback,
        stream=_stream(place.state, device),
    )


def _stream(state: DistributedState, device: torch.device) -> torch.cuda.Stream | None:
    if device.type != "cuda":
        return None
    return state.streams[0] if state.streams else torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _entries(manifest: Manifest, spread: Spread | None) -> list[Entry | None]:
    """Return the moving tensors of all shards in the plan's order; ``None`` for one that this rank has not."""
    here = {entry.name: entry for entry in manifest.moving}
    tensors: Sequence[Facts] = manifest.moving if spread is None else spread.moving
    return [here.get(tensor.name) for tensor in tensors]


def _tracks(
    manifest: Manifest, items: Sequence[Item], options: Options, place: Place, routes: Routes, device: torch.device
) -> tuple[Track, ...]:
    return make_tracks(
        plan_lanes(items, place.topology, place.rank),
        topology=place.topology,
        rank=place.rank,
        routes=routes,
        bucket_bytes=options.bucket_bytes,
        form=options.form_of_lanes,
        codecs=manifest.codecs,
        device=device,
        combines_late=options.combines_late,
    )
