"""Loading of a checkpoint, into models and optimizers however they are spread now."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from xffl import checks
from xffl.checkpoint import composite, contents
from xffl.checkpoint import format as folders
from xffl.checkpoint.composite import Box
from xffl.checkpoint.contents import Contents, Part
from xffl.checkpoint.format import Cell, CellIndex, CellReader, OpenCheckpoint, Record, read_again_if_replaced
from xffl.checkpoint.generators import RandomState
from xffl.distributed.agreement.consistency import check_consistent, ranks_text
from xffl.distributed.distributed_state import DistributedState
from xffl.distributed.replicas.plain_values import from_plain, tensors_named
from xffl.distributed.values.sharding import bytes_of, sharded_parameters
from xffl.distributed.values.spread_like import load_optimizer, spread_whole
from xffl.errors import CheckpointError, ConfigError, ReplacedError, XfflError

__all__ = ["compare_cells", "load_checkpoint"]

T = TypeVar("T")

SHOWN = 4  # problems that a message writes out
NOTHING_LOADED = "nothing was loaded; give what was saved, or another checkpoint"
PARTLY_LOADED = "models and optimizers may be loaded in part: load another checkpoint before they are used"


@dataclass
class _LoadPlan:
    """What is to be loaded: tensors to fill, what stands in the way, and what of the checkpoint nobody here wants."""

    index: CellIndex
    targets: dict[str, torch.Tensor] = field(default_factory=dict)
    """Tensors that are read where they lie, and new ones of optimizers and other objects that have none yet"""
    boxes: dict[str, list[Box]] = field(default_factory=dict)
    """Boxes of the composite tensors that the checkpoint has"""
    likes: dict[str, tuple[torch.Tensor | None, torch.nn.Parameter | torch.Tensor | None]] = field(default_factory=dict)
    """Composite tensors to make, with the tensor to fill or to replace, if any, and the parameter it belongs to"""
    classes: dict[str, set[str | None]] = field(default_factory=dict)
    """Names of the classes of each optimizer's state here; ``None`` for plain tensors"""
    made: dict[str, torch.Tensor] = field(default_factory=dict)
    """Composite tensors, once they are made"""
    kept: dict[str, Any] = field(default_factory=dict)
    """Entries of models' state dicts that stay as they are, since a checkpoint does not keep them"""
    more: dict[str, set[str]] = field(default_factory=dict)
    """Entries of each model's state dict beside tensors and extra states"""
    devices: dict[str, torch.device] = field(default_factory=dict)
    """Tensors of the modules' extra states, with where they go"""
    models: dict[str, list[str]] = field(default_factory=dict)  # names of each model's state dict here
    values: dict[str, Any] = field(default_factory=dict)  # what the modules' extra states were, once they are read
    problems: list[str] = field(default_factory=list)
    unused: set[str] = field(default_factory=set)


def load_checkpoint(
    path: str | os.PathLike[str],
    parts: Mapping[str, Part],
    state: DistributedState,
    *,
    own: Mapping[str, Stateful] | None = None,
    reset: Collection[str] = (),
    local: Collection[str] = (),
) -> dict[str, Any]:
    """Load a checkpoint into the parts, in place, and return the values that were saved with it.

    Collective over the job. The parts may be spread in another way than when they were saved: another number of ranks
    in a cell or of replicas, plain, DDP, FSDP or HSDP; each rank reads from its cell's folder what it holds, and
    tensors do not move between ranks. Buffers that differed between the ranks of a cell come back as each had them, in
    another layout as the cell's first rank had them. All names, shapes, dtypes and checksums are compared before
    anything is changed. Extra states of modules come as they were saved, before any weight: where a module refuses its
    own, all get back what they had, and nothing was loaded. Reading the files (tensors, with ``weights_only``, and
    JSON) runs no code. All ranks read the files of one save: if another process replaces the checkpoint meanwhile, they
    go on with the files that they have opened, or begin again with the new ones.

    The number of cells must be that of the checkpoint, where it was not saved right after a round. Where it was, ``C``
    cells may load what ``S`` cells saved: cell ``c`` reads what cell ``c % S`` has written, and with it what differed
    between the cells (moments of optimizers, tensors with the policy ``local``). Everything that is trained in the
    models is compared over the saved cells first, bit for bit.

    :param path: The checkpoint's folder.
    :param parts: What to load into, under the names that were saved; see :func:`xffl.checkpoint.save_checkpoint`.
    :param state: The state that says where this rank stands.
    :param own: Objects that this rank has kept for itself, under the names that were saved; the layout (sizes of cells,
        replica size, mesh) must be the same then.
    :param reset: Names of own state that are left as they are, whatever the checkpoint holds of them; ``*`` for all.
    :param local: Names of trained tensors, such as ``model/head.weight``, that may differ between the saved cells.
    :return: The values.
    :raises ConfigError: if an argument is invalid, or the ranks were given different ones, or what each rank keeps for
        itself was saved in another layout.
    :raises StateError: if the state does not fit torch.distributed.
    :raises CheckpointError: if the checkpoint cannot be trusted or does not fit; the same on all ranks.
    """
    record = load_with_record(path, parts, state, own=own, reset=reset, local=local)
    return {name: from_plain(value, {}) for name, value in record.values.items()}


def load_with_record(
    path: str | os.PathLike[str],
    parts: Mapping[str, Part],
    state: DistributedState,
    *,
    own: Mapping[str, Stateful] | None = None,
    reset: Collection[str] = (),
    local: Collection[str] = (),
    check: Callable[[Record], None] = lambda _: None,
) -> Record:
    """Load a checkpoint as :func:`load_checkpoint` does, and return the record of the save that was loaded.

    ``check`` may refuse a record before anything is read or changed.
    """

    def check_arguments() -> tuple[Path, Cell, Mapping[str, Stateful]]:
        contents.check_parts(parts)
        for knob, names in (("reset", reset), ("local", local)):
            if isinstance(names, str) or not all(isinstance(name, str) for name in names):
                raise ConfigError(f"{knob} is {names!r}; give a list of names")
        kept = contents.check_rank_state(own)
        return folders.check_path(path), folders.this_cell(state), kept

    def show(checked: tuple[Path, Cell, Mapping[str, Stateful]]) -> str:
        target, _, kept = checked
        names = f"own={sorted(kept)} reset={sorted(set(reset))} local={sorted(set(local))}"
        return f"path={target} parts={sorted(parts)} {names}"

    target, cell, kept = folders.run_collectively(
        "arguments",
        act=check_arguments,
        path=Path(str(path)),
        advice=NOTHING_LOADED,
        show=show,
        world=state.job_group,
    )

    has_begun: list[bool] = []

    def load_one_save() -> Record:
        with _outside_inference(parts), ExitStack() as stack:
            return _load(
                stack,
                target=target,
                parts=parts,
                kept=kept,
                asked=_Request(cell, reset=reset, local=local, check=check),
                has_begun=has_begun,
            )

    try:
        return read_again_if_replaced(load_one_save)
    except XfflError as error:
        if has_begun and PARTLY_LOADED not in str(error):
            raise type(error)(f"{error}; {PARTLY_LOADED}") from error
        raise


def _outside_inference(parts: Mapping[str, Part]) -> AbstractContextManager[object]:
    """Return the mode to load in: new tensors of optimizers and other objects outlive a caller's inference mode.

    Inside inference mode only models that were made there, too, can be filled.
    """
    models = [part for part in parts.values() if isinstance(part, nn.Module)]
    is_inside = any(one.is_inference() for model in models for one in sharded_parameters(model).values())
    return nullcontext() if is_inside else torch.inference_mode(False)


@dataclass(frozen=True)
class _Request:
    """What a load was asked for, beside what to load into."""

    cell: Cell
    reset: Collection[str]
    local: Collection[str]
    check: Callable[[Record], None]


def _load(
    stack: ExitStack,
    target: Path,
    parts: Mapping[str, Part],
    kept: Mapping[str, Stateful],
    asked: _Request,
    has_begun: list[bool],
) -> Record:
    """Load the files of one save, which are held open until the end of ``stack``; collective over the job.

    ``has_begun`` gets an entry before the first tensor is overwritten.

    :raises ReplacedError: if another process has taken away files before they were opened; on all ranks.
    """
    cell = asked.cell

    def on_all_ranks(what: str, act: Callable[[], T], advice: str = NOTHING_LOADED) -> T:
        return folders.run_collectively(what, act, target, advice, world=cell.world)

    def open_and_check() -> tuple[OpenCheckpoint, Record, list[str]]:
        opened = stack.enter_context(OpenCheckpoint(target))
        record = opened.read_record()
        asked.check(record)
        return opened, record, _check_record(opened.path, record=record, parts=parts, own=kept, asked=asked)

    source, record, wanted = on_all_ranks("record", open_and_check)
    _check_same_save(target, source.path, record, cell)

    def reading(what: str, act: Callable[[], T], advice: str = NOTHING_LOADED) -> T:
        """Do a step that reads files, and say so where the checkpoint was replaced before they were opened."""

        def act_and_notice() -> T:
            with source.noticing_replacement():
                return act()

        return on_all_ranks(what, act_and_notice, advice)

    current = on_all_ranks("contents", lambda: contents.collect(parts))
    if len(record.cells) != len(cell.sizes):
        names = on_all_ranks("contents", lambda: contents.trained_names(parts))
        reading(
            "comparing cells", lambda: compare_cells(source, record=record, names=names, local=asked.local, cell=cell)
        )
    plan = reading("comparing", lambda: _plan(source, record=record, parts=parts, cell=cell, current=current))
    on_all_ranks("comparing", lambda: _check_unused(plan, cell))
    is_same = contents.is_same_layout(record, cell.topology)
    rank_state, buffers = reading(
        "own state", lambda: contents.read_rank_state(plan.index, cell.place, wanted, is_same=is_same)
    )
    on_all_ranks("own state", lambda: _check_generators(kept, rank_state))
    reading("reading extra states", lambda: _read_values(plan, buffers, current))
    # Extra states come before any weight is written: a module may refuse its own, and then all can be taken back.
    # From the step "reading" on tensors are overwritten, so every message says that the load is partial.
    undo: list[Callable[[], None]] = []
    try:
        on_all_ranks("giving extra states", lambda: _try_extra_states(plan, parts, current, undo))
    except XfflError:
        on_all_ranks("taking extra states back", lambda: [call() for call in reversed(undo)], PARTLY_LOADED)
        raise
    has_begun.append(True)
    reading("reading", lambda: _read(plan, cell, buffers), PARTLY_LOADED)
    on_all_ranks("applying", lambda: _apply(plan, parts, kept, rank_state), PARTLY_LOADED)
    return record


def _check_same_save(target: Path, folder: Path, record: Record, cell: Cell) -> None:
    """Raise if ranks have opened different saves; collective over the job."""

    def describe(by_rank: Mapping[int, str]) -> ReplacedError:
        ranks_of = checks.group((save, rank) for rank, save in by_rank.items())
        saves = "; ".join(f"{ranks_text(ranks)}: {save}" for save, ranks in ranks_of.items())
        return ReplacedError(
            f"ranks have read different saves of checkpoint {target}: {saves}; it is replaced while it is read, or the "
            f"ranks do not share the file system; {NOTHING_LOADED}"
        )

    save = f"number {record.save_number} of {record.saved_at}, {sorted(record.indexes.items())}"
    check_consistent("saves of a checkpoint", save, describe=describe, group=cell.world)


def _check_record(
    folder: Path, record: Record, parts: Mapping[str, Part], own: Collection[str], asked: _Request
) -> list[str]:
    """Check that a record fits cells and parts, and name the rank state to load."""
    sizes = asked.cell.topology.sizes
    if len(record.cells) != len(sizes) and not record.after_round:
        raise CheckpointError(
            f"checkpoint {folder} is of {len(record.cells)} cells {record.cells}, this run has {len(sizes)} {sizes}; "
            f"each cell holds other weights, so start {len(record.cells)} cells (of any sizes), or save right after a "
            "round (after_round=True)"
        )
    for name, value in record.values.items():
        try:
            from_plain(value, {})
        except ValueError as error:
            raise CheckpointError(
                f"checkpoint {folder} has the value {name!r}, but {error}; {NOTHING_LOADED}"
            ) from error
    if difference := contents.describe_difference(set(parts), set(record.parts)):
        raise CheckpointError(
            f"checkpoint {folder} has the parts {sorted(record.parts)}: {difference}; give the parts that were saved"
        )
    return sorted(
        contents.select_rank_state(folder, record=record, own=own, reset=asked.reset, topology=asked.cell.topology)
    )


def _plan(
    source: OpenCheckpoint, record: Record, parts: Mapping[str, Part], cell: Cell, current: Contents
) -> _LoadPlan:
    """Find a place for each tensor of the checkpoint that this rank wants, and compare."""
    index = folders.read_index(source, record, cell.number % len(record.cells))
    folders.check_data(index, cell.place, cell.sizes[cell.number])
    plan = _LoadPlan(index, boxes=composite.read_boxes(index.values))
    for name, part in parts.items():
        if isinstance(part, nn.Module):
            _want_model(name, current, plan)
        elif isinstance(part, torch.optim.Optimizer):
            _want_optimizer(
                name, optimizer=part, names=contents.parameter_names(name, part, parts), current=current, plan=plan
            )
        elif name in index.values:
            for key in tensors_named(index.values[name]):
                _want_tensor(plan, key, current.tensors.get(key), None)
        else:
            plan.problems.append(f"nothing of part {name!r}")
    for key in (plan.targets.keys() | plan.devices.keys()) - index.tensors.keys() - plan.boxes.keys():
        plan.problems.append(f"no tensor {key!r}, though it is named")
    if plan.problems:
        raise CheckpointError(
            f"checkpoint {index.folder} does not fit: {checks.shorten(plan.problems, SHOWN, '; ')}; {NOTHING_LOADED}"
        )
    return plan


def _want_model(name: str, current: Contents, plan: _LoadPlan) -> None:
    """Compare a model's tensors and values with those saved; an extra state is taken as it was, whatever is here."""
    index = plan.index
    there = set(contents.model_names(name, index.tensors, index.values))
    plan.models[name] = contents.model_names(name, current.tensors, current.values)
    for key in plan.models[name]:
        tensor, saved = current.tensors.get(key), index.tensors.get(key)
        if key in plan.boxes and tensor is not None:
            _want_composite(key, tensor, plan)
        elif f"{contents.LEFT_OUT}{key}" in index.values and key not in index.values and tensor is None:
            plan.kept[key] = from_plain(current.values[key], current.tensors)
        elif key not in there or (not contents.is_extra_state(key) and (tensor is None) != (saved is None)):
            plan.problems.append(f"{key!r} is missing in it")
        elif key in index.values:
            for inner in tensors_named(index.values[key]):
                plan.devices[inner] = _device_of(current.tensors.get(inner))
        elif contents.is_extra_state(key):
            plan.devices[key] = _device_of(tensor)
        elif tensor is not None and saved is not None:
            if saved.shape != tensor.shape or saved.dtype != tensor.dtype:
                plan.problems.append(
                    f"{key!r} is {tuple(saved.shape)} {saved.dtype} in it, here {tuple(tensor.shape)} {tensor.dtype}"
                )
            plan.targets[key] = tensor
    left_out = {key: one.value for key, one in current.left_out.items() if key.startswith(f"{name}/")}
    plan.kept |= left_out
    plan.models[name] += left_out
    plan.more[name] = {
        key for key in plan.models[name] if key not in current.tensors and not contents.is_extra_state(key)
    }
    plan.unused |= there - set(plan.models[name])


def _want_composite(key: str, tensor: torch.Tensor, plan: _LoadPlan) -> None:
    """Compare a composite tensor of a model with the boxes that were saved of it."""
    saved = plan.boxes[key][0]
    if saved.shape != tensor.shape or saved.dtype != tensor.dtype:
        plan.problems.append(
            f"{key!r} is {tuple(saved.shape)} {saved.dtype} in it, here {tuple(tensor.shape)} {tensor.dtype}"
        )
    else:
        plan.likes[key] = (tensor, None)


def _want_tensor(plan: _LoadPlan, key: str, now: torch.Tensor | None, parameter: torch.Tensor | None) -> None:
    """Find a place for a tensor of an optimizer or another object."""
    if key in plan.boxes:
        plan.likes[key] = (now, parameter)
    else:
        plan.targets[key] = _target(plan.index, key, now, parameter)


def _want_optimizer(
    name: str, optimizer: torch.optim.Optimizer, names: list[list[str]], current: Contents, plan: _LoadPlan
) -> None:
    """Compare an optimizer's parameters with those saved, and find a place for the state of each."""
    index = plan.index
    saved = contents.saved_options(name, index.values)
    states = f"{name}/state/"
    plan.classes[name] = {composite.class_name(one) for key, one in current.tensors.items() if key.startswith(states)}
    of_boxes = {box.class_name for key, boxes in plan.boxes.items() if key.startswith(states) for box in boxes}
    for group, members in zip(optimizer.param_groups, names, strict=True):
        options = {json.dumps(saved[member], sort_keys=True) for member in members if member in saved}
        if len(options) > 1:
            plan.problems.append(f"{name!r} has {members[0]!r} and others of its group in groups with other options")
        for parameter, member in zip(group["params"], members, strict=True):
            if member not in saved:
                plan.problems.append(f"{name!r} of {member!r} is missing in it")
            for key in tensors_named([saved.get(member), index.values.get(f"{name}/state/{member}")]):
                now = current.tensors.get(key)
                here = None if now is None else composite.class_name(now)
                if here is not None and key in index.tensors and here not in of_boxes:
                    plan.problems.append(f"{key!r} is a plain tensor in it, here {here}")
                _want_tensor(plan, key, now, parameter)
    mine = {member for members in names for member in members}
    plan.unused |= {f"{name}/state/{member}" for member in saved.keys() - mine}


def _target(index: CellIndex, key: str, now: torch.Tensor | None, parameter: torch.Tensor | None) -> torch.Tensor:
    """Return the tensor to read into: the one that is there, else one that is spread like the parameter."""
    saved = index.tensors.get(key)
    if saved is None:
        return torch.empty(0, dtype=torch.float32)  # _plan makes it a problem
    is_alike = now is not None and now.shape == saved.shape and now.dtype == saved.dtype
    # What is composite here and was a plain tensor there gets a new plain one: written into it would be rounded.
    if is_alike and now is not None and not contents.is_overlapping(now) and not composite.is_composite(now):
        return now
    if parameter is not None and parameter.shape == saved.shape and saved.shape:
        return torch.empty_like(parameter, dtype=saved.dtype, requires_grad=False)
    if not isinstance(parameter, DTensor) or not saved.shape:
        return torch.empty(saved.shape, dtype=saved.dtype)
    whole = torch.empty(saved.shape, dtype=saved.dtype, device=parameter.device)
    return spread_whole(whole, parameter)


def _device_of(tensor: torch.Tensor | None) -> torch.device:
    return torch.device("cpu") if tensor is None else tensor.device


def _check_unused(plan: _LoadPlan, cell: Cell) -> None:
    """Refuse what no rank of the cell wants; collective over the cell. Stages of a pipeline want a part each."""
    nobodys = set.intersection(*folders.gather_in_cell(plan.unused, cell))
    if nobodys:
        problems = checks.shorten([f"{key!r} has no place here" for key in sorted(nobodys)], SHOWN, "; ")
        raise CheckpointError(f"checkpoint {plan.index.folder} does not fit: {problems}; {NOTHING_LOADED}")


def _check_generators(own: Mapping[str, Stateful], rank_state: Mapping[str, Any]) -> None:
    """Refuse states of random generators that do not fit those here, before any weight is written; local."""
    for name, saved in rank_state.items():
        kept = own[name]
        if isinstance(kept, RandomState):
            try:
                kept.check_state(saved)
            except CheckpointError as error:
                raise CheckpointError(f"{error}; {NOTHING_LOADED}") from error


def _read_values(plan: _LoadPlan, buffers: Mapping[str, torch.Tensor], current: Contents) -> None:
    """Read composite tensors and the modules' extra states into new tensors; local.

    Of extra states those of this rank alone count before the cell's.
    """

    def read(name: str) -> torch.Tensor:
        return folders.read_tensor(plan.index, name)

    for name, (now, parameter) in plan.likes.items():
        plan.made[name] = _make_composite(name, boxes=plan.boxes[name], now=now, parameter=parameter, read=read)
        is_filled = now is not None and any(name in keys for keys in plan.models.values())
        if is_filled and now is not None and (wrong := composite.difference(now, plan.made[name])):
            raise CheckpointError(f"{name!r} is {wrong}; {NOTHING_LOADED}")
        _check_kind(plan, name, now)
    tensors: dict[str, torch.Tensor] = {}
    for name, device in plan.devices.items():
        if name in plan.boxes:
            tensors[name] = composite.restore(
                name, boxes=plan.boxes[name], like=None, read=read, device=device, replaced=current.tensors.get(name)
            )
        else:
            tensors[name] = (buffers[name] if name in buffers else read(name)).to(device)
    special = plan.targets.keys() | plan.likes.keys() | plan.kept.keys()
    for key in (key for keys in plan.models.values() for key in keys if key not in special):
        saved = plan.index.values
        plan.values[key] = from_plain(saved[key], tensors) if key in saved else tensors[key]


def _check_kind(plan: _LoadPlan, name: str, now: torch.Tensor | None) -> None:
    """Refuse a state of a class that the optimizer, which has one already, does not use here; local."""
    made = composite.class_name(plan.made[name])
    for used in (used for optimizer, used in plan.classes.items() if name.startswith(f"{optimizer}/state/")):
        if now is not None and made is not None and made not in used:
            raise CheckpointError(
                f"{name!r} is {made} in it, here {composite.class_name(now) or 'a plain tensor'}, and no state of the "
                f"optimizer here is of that class: another kind of optimizer has saved it; {NOTHING_LOADED}"
            )


def _make_composite(
    name: str,
    boxes: list[Box],
    now: torch.Tensor | None,
    parameter: torch.Tensor | None,
    read: Callable[[str], torch.Tensor],
) -> torch.Tensor:
    """Make a composite tensor that is spread like the one that is there, else like the parameter; local."""
    shape = boxes[0].shape
    for like in (now, parameter):
        if like is not None and like.shape == shape:
            return composite.restore(name, boxes, like, read, replaced=now)
    if not isinstance(parameter, DTensor):
        return composite.restore(name, boxes, None, read, replaced=now)
    whole = composite.restore(name, boxes=boxes, like=None, read=read, device=parameter.device, replaced=now)
    return composite.spread_everywhere(whole, parameter)


def _try_extra_states(
    plan: _LoadPlan, parts: Mapping[str, Part], current: Contents, undo: list[Callable[[], None]]
) -> None:
    """Give modules their extra states before any weight is written; ``undo`` gets what takes them back. Local."""
    for name, part in parts.items():
        for key, module in contents.modules_with_extra_state(name, part) if isinstance(part, nn.Module) else ():
            if key in plan.values:
                had = {
                    one: current.tensors[one].clone()
                    for one in (key, *tensors_named(current.values.get(key)))
                    if one in current.tensors
                }
                before = from_plain(current.values[key], had) if key in current.values else had[key]
                undo.append(partial(module.set_extra_state, before))
                module.set_extra_state(plan.values[key])


def _read(plan: _LoadPlan, cell: Cell, buffers: Mapping[str, torch.Tensor]) -> None:
    """Fill the tensors, and those that each rank has kept for itself; collective over the cell."""
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load(plan.targets, storage_reader=CellReader(plan.index), planner=planner, process_group=cell.group)
    for name, kept in buffers.items():
        if name not in plan.devices:
            plan.targets[name].copy_(kept)


def _apply(
    plan: _LoadPlan, parts: Mapping[str, Part], own: Mapping[str, Stateful], rank_state: Mapping[str, Any]
) -> None:
    """Give the parts and what this rank keeps for itself what was read. Nothing moves."""
    held = plan.targets | plan.made | plan.values | plan.kept
    try:
        for name, part in parts.items():
            if isinstance(part, nn.Module):
                filled = [key for key in plan.models[name] if key in plan.likes]
                for key in filled:
                    _fill_composite(plan, key)
                # Into the model itself: of a wrapper torch would not call a load_state_dict of the model's own.
                model = contents.unwrap(part)
                left = {*filled, *(() if contents.takes_more(model) else plan.more[name])}
                given = {key.removeprefix(f"{name}/"): held[key] for key in plan.models[name] if key not in left}
                set_model_state_dict(model, given, options=StateDictOptions(strict=not filled))
            elif isinstance(part, torch.optim.Optimizer):
                _apply_optimizer(name, part, contents.parameter_names(name, part, parts), plan)
            else:
                part.load_state_dict(from_plain(plan.index.values[name], held))
        for name, saved in rank_state.items():
            own[name].load_state_dict(saved)
    except XfflError as error:  # say of these, too, that tensors have been written before
        raise type(error)(f"{error}; {PARTLY_LOADED}") from error


def _fill_composite(plan: _LoadPlan, key: str) -> None:
    """Write what was made into a model's composite tensor; a class need not say how it is copied."""
    tensor, _ = plan.likes[key]
    assert tensor is not None, "a model's tensors are there"
    with torch.no_grad():
        composite.copy_inner(tensor, plan.made[key])


def _apply_optimizer(name: str, optimizer: torch.optim.Optimizer, names: list[list[str]], plan: _LoadPlan) -> None:
    """Give an optimizer its state and options; an empty group keeps its options."""
    values = plan.index.values
    held = plan.targets | plan.made
    options = contents.saved_options(name, values)
    groups = optimizer.state_dict()["param_groups"]
    for group, members in zip(groups, names, strict=True):
        if members:
            group |= from_plain(options[members[0]], held)
    state = {
        number: from_plain(values[key], held)
        for number, key in enumerate(f"{name}/state/{member}" for members in names for member in members)
        if key in values
    }
    load_optimizer(optimizer, {"state": state, "param_groups": groups})


def compare_cells(
    source: OpenCheckpoint, record: Record, names: Collection[str], local: Collection[str], cell: Cell
) -> None:
    """Refuse a checkpoint whose cells hold different weights; collective over the cell."""
    # All ranks of the world share the tensors out; each reads whole ones, two at a time.
    # Stages of a pipeline know other names, and each name must have one rank that reads it.
    mine = sorted(set().union(*folders.gather_in_cell(set(names), cell)) - set(local))[cell.rank :: sum(cell.sizes)]
    head = folders.read_index(source, record)
    # Of a composite tensor the inner ones are compared, box by box.
    boxes = {
        name: [inner for box in of_tensor for inner in box.tensor_names]
        for name, of_tensor in composite.read_boxes(head.values).items()
    }
    for number in range(1, len(record.cells)):
        index = folders.read_index(source, record, number)
        for name in (inner for trained in mine for inner in boxes.get(trained, (trained,))):
            if name not in head.tensors:
                continue  # a problem where the parts are compared
            # Bits are compared: equal NaNs are the same.
            is_same = name in index.tensors and head.tensors[name].shape == index.tensors[name].shape
            is_same = is_same and head.tensors[name].dtype == index.tensors[name].dtype
            if not is_same or not torch.equal(*(bytes_of(folders.read_tensor(one, name)) for one in (head, index))):
                places = sorted({chunk.relative_path for chunk in head.tensors[name].chunks})
                raise CheckpointError(
                    f"checkpoint {source.path} was saved as right after a round, but {name!r} is not the same in "
                    f"{index.folder} as in {head.folder} (files {', '.join(places)}); start {len(record.cells)} cells, "
                    f"or give local=[{name!r}] where its policy is local"
                )
