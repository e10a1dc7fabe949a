"""Loading: into models and optimizers however they are spread now, in the same cells."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import set_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor, Replicate

from xffl.checkpoint.contents import Contents, Part, check_parts, collect, parameter_names, saved_options
from xffl.checkpoint.folder import INDEX, Record, checksum, read_record, settle
from xffl.checkpoint.plain import from_plain, tensors_named
from xffl.checkpoint.steps import Cell, check_path, gather, this_cell, together
from xffl.checkpoint.storage import CellIndex, CellReader, read_index
from xffl.distributed.distributed_state import DistributedState
from xffl.errors import CheckpointError

__all__ = ["load_checkpoint"]

SHOWN = 4
"""Names that a message writes out."""
UNTOUCHED = "nothing was loaded; give what was saved, or another checkpoint"
TORN = "models and optimizers may be loaded in part: load another checkpoint before they are used"


@dataclass
class _Plan:
    """What is to be loaded: tensors to fill, what stands in the way, and what of the checkpoint nobody here wants."""

    folder: Path
    index: CellIndex
    targets: dict[str, torch.Tensor] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    unused: set[str] = field(default_factory=set)


def load_checkpoint(path: str | os.PathLike[str], parts: Mapping[str, Part], state: DistributedState) -> dict[str, Any]:
    """Load a checkpoint into the parts, in place, and return the values that were saved with it.

    Collective over the world. The parts may be spread otherwise than they were: another number of ranks in a cell or of
    replicas, plain, DDP, FSDP or HSDP; each rank reads from its cell's folder what it holds. The number of cells must
    be that of the checkpoint. All names, shapes and dtypes are compared before anything is changed. Tensors do not
    move between ranks.

    The files hold tensors, which torch reads with ``weights_only``, and JSON: reading them runs no code. The index of
    each cell is compared with its checksum, and the files with their sizes.

    :param path: The checkpoint's folder.
    :param parts: What to load into, under the names that were saved; see :func:`xffl.checkpoint.save_checkpoint`.
    :param state: The state that says where this rank stands.
    :return: The values.
    :raises ConfigError: if an argument cannot be meant, or the ranks were given different ones.
    :raises StateError: if the state does not fit torch.distributed.
    :raises CheckpointError: if the checkpoint cannot be trusted or does not fit; the same on all ranks.
    """

    def given() -> tuple[Path, Cell]:
        check_parts(parts)
        return check_path(path), this_cell(state)

    shown = Path(str(path))
    target, cell = together(
        "arguments", given, shown, UNTOUCHED, lambda found: f"path={found[0]} parts={sorted(parts)}"
    )
    folder = settle(target)
    record = together("record", lambda: _record(folder, parts, cell), target, UNTOUCHED, str)
    current = together("contents", lambda: collect(parts), target, UNTOUCHED)
    plan = together("comparing", lambda: _plan(folder, record, parts, current, cell), target, UNTOUCHED)
    together("comparing", lambda: _check_unused(plan, cell), target, UNTOUCHED)
    together("reading", lambda: _read(plan, cell), target, TORN)
    together("applying", lambda: _apply(plan, parts), target, TORN)
    return {name: from_plain(value, {}) for name, value in record.values.items()}


def _record(folder: Path, parts: Mapping[str, Part], cell: Cell) -> Record:
    """Read the record and see whether it fits the cells and parts of this run."""
    record = read_record(folder)
    if len(record.cells) != len(cell.sizes):
        raise CheckpointError(
            f"checkpoint {folder} is of {len(record.cells)} cells {record.cells}, this run has {len(cell.sizes)} "
            f"{cell.sizes}; each cell holds other weights, so start {len(record.cells)} cells (of any sizes)"
        )
    missing, extra = sorted(set(parts) - set(record.parts)), sorted(set(record.parts) - set(parts))
    if missing or extra:
        told = [f"it has no {missing}"] * bool(missing) + [f"{extra} were not asked for"] * bool(extra)
        raise CheckpointError(
            f"checkpoint {folder} has the parts {sorted(record.parts)}: {' and '.join(told)}; give the parts that were "
            "saved"
        )
    return record


def _plan(folder: Path, record: Record, parts: Mapping[str, Part], current: Contents, cell: Cell) -> _Plan:
    """Find a place for each tensor of the checkpoint that this rank wants, and compare."""
    home = folder / cell.name
    if checksum(home / INDEX) != record.indexes.get(cell.name):
        raise CheckpointError(
            f"{home / INDEX} is not the file that was saved (its checksum differs); load another checkpoint"
        )
    index = read_index(home)
    if cell.is_first:  # once for each cell: on a large world many looks at many files are slow
        _check_files(home, index)
    plan = _Plan(home, index)
    for name, part in parts.items():
        if isinstance(part, nn.Module):
            _want_model(name, current, plan)
        elif isinstance(part, torch.optim.Optimizer):
            _want_optimizer(name, part, parameter_names(name, part, parts), current, plan)
        elif name in index.values:
            for key in tensors_named(index.values[name]):
                plan.targets[key] = _target(index, key, current.tensors.get(key), None)
        else:
            plan.problems.append(f"nothing of part {name!r}")
    for key in plan.targets.keys() - index.tensors.keys():
        plan.problems.append(f"no tensor {key!r}, though it is named")
    if plan.problems:
        raise CheckpointError(f"checkpoint {home} does not fit: {_first(plan.problems)}; {UNTOUCHED}")
    return plan


def _want_model(name: str, current: Contents, plan: _Plan) -> None:
    """Compare a model's tensors and values with those saved."""
    index = plan.index
    wanted = {key: tensor for key, tensor in current.tensors.items() if key.startswith(f"{name}/")}
    others = {key for key in current.values if key.startswith(f"{name}/")}
    for key, tensor in wanted.items():
        saved = index.tensors.get(key)
        if saved is None:
            plan.problems.append(f"{key!r} is missing in it")
        elif saved.shape != tensor.shape or saved.dtype != tensor.dtype:
            plan.problems.append(
                f"{key!r} is {tuple(saved.shape)} {saved.dtype} in it, but {tuple(tensor.shape)} {tensor.dtype} here"
            )
        else:
            plan.targets[key] = tensor
    plan.problems += [f"{key!r} is missing in it" for key in sorted(others - index.values.keys())]
    for key in others & index.values.keys():
        for inner in tensors_named(index.values[key]):
            plan.targets[inner] = _target(index, inner, current.tensors.get(inner), None)
    known = wanted.keys() | others | plan.targets.keys()
    plan.unused |= {key for key in [*index.tensors, *index.values] if key.startswith(f"{name}/") and key not in known}


def _want_optimizer(
    name: str, optimizer: torch.optim.Optimizer, names: list[list[str]], current: Contents, plan: _Plan
) -> None:
    """Compare an optimizer's parameters with those saved, and find a place for the state of each."""
    index = plan.index
    saved = saved_options(name, index.values)
    for group, members in zip(optimizer.param_groups, names, strict=True):
        options = {json.dumps(saved[member], sort_keys=True) for member in members if member in saved}
        if len(options) > 1:
            plan.problems.append(f"{name!r} has {members[0]!r} and others of its group in groups with other options")
        for parameter, member in zip(group["params"], members, strict=True):
            if member not in saved:
                plan.problems.append(f"{name!r} of {member!r} is missing in it")
            for key in tensors_named([saved.get(member), index.values.get(f"{name}/state/{member}")]):
                plan.targets[key] = _target(index, key, current.tensors.get(key), parameter)
    mine = {member for members in names for member in members}
    plan.unused |= {f"{name}/state/{member}" for member in saved.keys() - mine}


def _target(index: CellIndex, key: str, now: torch.Tensor | None, parameter: torch.Tensor | None) -> torch.Tensor:
    """Return the tensor to read into: the one that is there, else one that is spread like the parameter."""
    saved = index.tensors.get(key)
    if saved is None:
        return torch.empty(0)  # told as a problem
    if now is not None and now.shape == saved.shape and now.dtype == saved.dtype:
        return now
    if parameter is not None and parameter.shape == saved.shape and saved.shape:
        return torch.empty_like(parameter, dtype=saved.dtype, requires_grad=False)
    if not isinstance(parameter, DTensor) or not saved.shape:
        return torch.empty(saved.shape, dtype=saved.dtype)
    whole = torch.empty(saved.shape, dtype=saved.dtype, device=parameter.device)
    everywhere = [Replicate()] * parameter.device_mesh.ndim
    return DTensor.from_local(whole, parameter.device_mesh, everywhere, run_check=False)


def _check_files(folder: Path, index: CellIndex) -> None:
    for name, size in index.files().items():
        file = folder / name
        found = file.stat().st_size if file.is_file() else None
        if found != size:
            told = "is missing" if found is None else f"has {found} bytes in place of {size}"
            raise CheckpointError(f"{file} {told}; the checkpoint is damaged, load another one")


def _check_unused(plan: _Plan, cell: Cell) -> None:
    """Refuse what no rank of the cell wants; collective over the cell. Stages of a pipeline want a part each."""
    nobodys = set.intersection(*gather(plan.unused, cell))
    if nobodys:
        told = _first([f"{key!r} has no place here" for key in sorted(nobodys)])
        raise CheckpointError(f"checkpoint {plan.folder} does not fit: {told}; {UNTOUCHED}")


def _read(plan: _Plan, cell: Cell) -> None:
    """Fill the tensors; collective over the cell."""
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load(
            plan.targets,
            storage_reader=CellReader(plan.folder, plan.index),
            planner=planner,
            process_group=cell.group,
        )


def _apply(plan: _Plan, parts: Mapping[str, Part]) -> None:
    """Give the parts what was read. Nothing moves."""
    values = plan.index.values
    for name, part in parts.items():
        if isinstance(part, nn.Module):
            keys = {key: key.removeprefix(f"{name}/") for key in [*plan.targets, *values] if key.startswith(f"{name}/")}
            held = {
                key: from_plain(values[full], plan.targets) if full in values else plan.targets[full]
                for full, key in keys.items()
            }
            set_model_state_dict(part, held)
        elif isinstance(part, torch.optim.Optimizer):
            _apply_optimizer(name, part, parameter_names(name, part, parts), plan)
        else:
            part.load_state_dict(from_plain(values[name], plan.targets))


def _apply_optimizer(name: str, optimizer: torch.optim.Optimizer, names: list[list[str]], plan: _Plan) -> None:
    """Give an optimizer its state and options; an empty group keeps its options."""
    values = plan.index.values
    options = saved_options(name, values)
    groups = optimizer.state_dict()["param_groups"]
    for group, members in zip(groups, names, strict=True):
        if members:
            group |= from_plain(options[members[0]], plan.targets)
    state = {
        number: from_plain(values[key], plan.targets)
        for number, key in enumerate(f"{name}/state/{member}" for members in names for member in members)
        if key in values
    }
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, kept in state.items():
        # torch casts a state to its parameter's dtype, which would round an fp32 state of bf16 weights.
        for key, value in _tensors(kept):
            cast = optimizer.state[parameters[number]][key]
            if cast.dtype != value.dtype:
                optimizer.state[parameters[number]][key] = value.to(device=cast.device)


def _tensors(kept: Any) -> Iterable[tuple[Any, torch.Tensor]]:
    return [(key, value) for key, value in kept.items() if isinstance(value, torch.Tensor)]


def _first(problems: list[str]) -> str:
    more = [f"and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
    return "; ".join(problems[:SHOWN] + more)
