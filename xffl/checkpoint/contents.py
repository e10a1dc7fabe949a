"""Contents of a checkpoint: tensors and plain values of its parts, and the state that each rank keeps for itself.

Those of parts have names that do not depend on the layout. What each rank keeps for itself is a file, for the
same layout only: the caller's objects, and the buffers that differ between the ranks of a cell (between rounds,
statistics that each has made of its own data).
"""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from xffl.checkpoint import composite
from xffl.checkpoint.format import INDEX_LIMIT, VALUES_DEPTH, CellIndex, Record, file_entry
from xffl.checkpoint.tables import FileEntry
from xffl.checkpoint.torch_files import load_archive
from xffl.checks import shown
from xffl.distributed.replicas.plain_values import Plain, from_plain, tensors_named, to_plain
from xffl.distributed.values.sharding import local_tensor, sharded_parameters
from xffl.errors import CheckpointError, ConfigError, OtherLayoutError
from xffl.files import create, naming_errors, sync
from xffl.json_text import parse_json
from xffl.topology import Topology

__all__ = ["Part"]

Part = nn.Module | torch.optim.Optimizer | Stateful
"""What a checkpoint keeps: a model, an optimizer of models among the parts, or what has ``state_dict`` and
``load_state_dict`` (a scheduler, a sampler)."""

UNNAMED = ("params", "param_names")  # entries of a parameter group that list its parameters, which are named here
EXTRA_STATE = "_extra_state"  # what torch calls a module's extra state in a state dict
LEFT_OUT = "/left_out/"  # marks what a checkpoint does not keep, though the part has it; no part's name is empty
COMPOSITE = "__composite__"  # stands among the values for a tensor that is kept in boxes
WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module")  # what it calls a module inside its wrappers; names leave it out


@dataclass(frozen=True)
class LeftOut:
    """An entry of a part's state that a checkpoint does not keep: what it is here, and why it is not kept."""

    value: Any
    reason: str
    is_skipped: bool  # by the caller, so that nobody is warned


@dataclass
class Contents:
    """The tensors and values of all parts, by name."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    values: dict[str, Plain] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)
    """Tensors of a model that are another one of it, which comes first"""
    composites: set[str] = field(default_factory=set)
    """Tensors that are kept in boxes, see :mod:`xffl.checkpoint.composite`"""
    left_out: dict[str, LeftOut] = field(default_factory=dict)
    """What is not kept, by name"""

    def take_apart(self, names: Iterable[str]) -> None:
        """Put inner tensors and descriptions of boxes in the place of composite tensors; nothing moves.

        The names are those of all ranks of the cell: a rank with few elements may hold a plain part of such a tensor.
        """
        within = {inner for value in self.values.values() for inner in tensors_named(value)}
        for name in sorted(set(names) & self.tensors.keys()):
            inner, described = composite.take_apart(name, self.tensors.pop(name))
            self.tensors |= inner
            self.values |= described
            if name not in within:  # an entry of a model's state dict, and not a part of another value
                self.values[name] = {COMPOSITE: True}

    def mark_left_out(self) -> None:
        """Note among the values what is left out, so that a load leaves it as it is."""
        self.values |= dict.fromkeys((f"{LEFT_OUT}{name}" for name in self.left_out), True)

    def on_host(self) -> Contents:
        """Return a copy in the memory of the host, that nothing else changes; what lies on GPUs comes all together."""
        copies = {
            name: tensor.detach().to("cpu", copy=True, non_blocking=tensor.is_cuda)
            for name, tensor in self.tensors.items()
        }
        for device in {tensor.device for tensor in self.tensors.values() if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return replace(self, tensors=copies)


def check_parts(parts: Mapping[str, Part]) -> None:
    """Refuse parts that cannot be kept."""
    if not isinstance(parts, Mapping) or not parts:
        raise ConfigError(f"parts is {type(parts).__name__} of nothing; give a mapping such as {{'model': model}}")
    for name, part in parts.items():
        _check_name("part", name, "model")
        if not isinstance(part, (nn.Module, torch.optim.Optimizer, Stateful)):
            raise ConfigError(
                f"part {name!r} is {type(part).__name__}; give a module, an optimizer or an object with state_dict and "
                "load_state_dict, and plain values as values"
            )


def _check_name(what: str, name: object, example: str) -> None:
    if not isinstance(name, str) or not name or "/" in name:
        raise ConfigError(f"{what} name must be a string without '/', such as {example!r}, got {name!r}")


def check_skip(skip: Collection[str]) -> frozenset[str]:
    """Refuse what is no list of names."""
    if isinstance(skip, str) or not all(isinstance(name, str) for name in skip):
        raise ConfigError(f"skip is {skip!r}; give a list of names, such as ['model/_metadata']")
    return frozenset(skip)


def collect(parts: Mapping[str, Part], skip: Collection[str] = ()) -> Contents:
    """Take what the parts hold now. Nothing moves and nothing is copied.

    A model's tensor is ``part/layers.0.weight``, whatever wraps the model; an optimizer's names its parameter so.
    """
    contents = Contents()
    for name, part in parts.items():
        if isinstance(part, nn.Module):
            _collect_model(name, part, skip, contents)
        elif isinstance(part, torch.optim.Optimizer):
            _collect_optimizer(
                name, optimizer=part, names=parameter_names(name, part, parts), skip=skip, contents=contents
            )
        else:
            contents.values[name] = to_plain(part.state_dict(), name, contents.tensors)
    if unknown := sorted(set(skip) - contents.left_out.keys()):
        raise ConfigError(
            f"skip names {unknown[0]!r}, which is no entry that can be left out; tensors and extra states are always "
            "kept, so name what a model's state_dict has beside them (model/_metadata), or an option of an optimizer's "
            "group"
        )
    for name, tensor in contents.tensors.items():
        if tensor.layout != torch.strided:
            raise ConfigError(f"tensor {name!r} is {tensor.layout}; a checkpoint keeps strided ones, make it dense")
        if tensor.is_meta:
            raise ConfigError(f"tensor {name!r} is on the meta device and has no values; initialize the model first")
        if isinstance(tensor, DTensor) and any(placement.is_partial() for placement in tensor.placements):
            raise ConfigError(f"tensor {name!r} is a partial sum; redistribute it before it is kept")
    for name in (name for name, part in parts.items() if isinstance(part, nn.Module)):
        for key in model_names(name, contents.tensors, contents.values):
            if key in contents.tensors and not is_extra_state(key) and is_overlapping(contents.tensors[key]):
                raise ConfigError(
                    f"tensor {key!r} is expanded: several elements are one in memory, which cannot be loaded; clone it"
                )
    _find_composites(parts, contents)
    check_readable({key: one for key, one in contents.tensors.items() if key not in contents.composites})
    return contents


def _find_composites(parts: Mapping[str, Part], contents: Contents) -> None:
    """Note which tensors are kept in boxes: of models only those that torch itself does not read back."""
    models = tuple(f"{name}/" for name, part in parts.items() if isinstance(part, nn.Module))
    for key, tensor in contents.tensors.items():
        if composite.is_composite(tensor) and not (key.startswith(models) and _read_back(tensor) is None):
            contents.composites.add(key)


def _collect_model(name: str, model: nn.Module, skip: Collection[str], contents: Contents) -> None:
    """Take a model's state dict: tensors and extra states, and of the rest what a checkpoint can keep."""
    state = get_model_state_dict(model)
    contents.ties |= {f"{name}/{key}": f"{name}/{first}" for key, first in _ties(state).items()}
    for key, value in state.items():
        path = f"{name}/{key}"
        if isinstance(value, torch.Tensor):
            to_plain(value, path, contents.tensors)
        elif is_extra_state(path):
            contents.values[path] = to_plain(value, path, contents.tensors)
        elif (plain := _keep(path, value, skip, contents)) is not None:
            contents.values[path] = plain[0]


def _keep(path: str, value: Any, skip: Collection[str], contents: Contents) -> tuple[Plain] | None:
    """Return an entry that a load could do without as a plain value, or leave it out where it has none."""
    if path in skip:
        contents.left_out[path] = LeftOut(value, "skipped by name", is_skipped=True)
        return None
    tensors: dict[str, torch.Tensor] = {}
    try:
        plain = to_plain(value, path, tensors)
    except ConfigError as error:
        contents.left_out[path] = LeftOut(value, str(error).partition(", which")[0], is_skipped=False)
        return None
    contents.tensors |= tensors
    return (plain,)


def left_out_text(left_out: Mapping[str, str]) -> str:
    """Write which entries a checkpoint does not keep, with reasons; pure."""
    named = "; ".join(f"{name!r} ({reason})" for name, reason in sorted(left_out.items()))
    return (
        f"the checkpoint does not keep {named}: it holds no pickled code, so what is neither tensor nor plain value "
        "stays as it is in the program that loads it. Parameters, buffers and extra states are kept. Name these in "
        "save_checkpoint(skip=[...]) to leave them out without this warning"
    )


def model_names(name: str, tensors: Iterable[str], values: Mapping[str, Plain]) -> list[str]:
    """Return the names of a model's state dict among those of tensors and values, without what values hold; pure."""
    own = {key: value for key, value in values.items() if key.startswith(f"{name}/")}
    inner = {key for value in own.values() for key in tensors_named(value)}
    return [key for key in tensors if key.startswith(f"{name}/") and key not in inner] + list(own)


def is_extra_state(key: str) -> bool:
    """Tell whether an entry of a model's state dict is what ``get_extra_state`` of a module returned; pure."""
    return key.replace("/", ".").rpartition(".")[2] == EXTRA_STATE


def modules_with_extra_state(name: str, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of a part that have an extra state, by its name among what the part holds; local."""

    def walk(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield f"{prefix}{EXTRA_STATE}", module
        for leaf, child in module._modules.items():
            is_wrapped = leaf in WRAPPED or (leaf == "module" and isinstance(module, DistributedDataParallel))
            if child is not None:
                yield from walk(child, prefix if is_wrapped else f"{prefix}{leaf}.")

    yield from walk(model, f"{name}/")


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside DDP and ``torch.compile``; local."""
    while True:
        inner = model.module if isinstance(model, DistributedDataParallel) else model._modules.get("_orig_mod")
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def takes_more(model: nn.Module) -> bool:
    """Tell whether a model's loading may want what its state dict has beside tensors and extra states; local.

    ``load_state_dict`` of :class:`torch.nn.Module` refuses such entries as unexpected, unless a hook takes them out.
    """
    is_own = type(model).load_state_dict is not nn.Module.load_state_dict or "load_state_dict" in vars(model)
    return is_own or any(module._load_state_dict_pre_hooks for module in model.modules())


def is_overlapping(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is expanded, so that torch does not write to it."""
    local = local_tensor(tensor)
    return any(size > 1 and stride == 0 for size, stride in zip(local.shape, local.stride(), strict=True))


def check_readable(tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse tensors that torch would write to a file and not read again without running code of it; local."""
    seen: set[tuple[type, torch.dtype]] = set()
    for name, tensor in tensors.items():
        local = local_tensor(tensor).detach()
        kind = (type(local), local.dtype)
        if kind in seen or (kind[0] is torch.Tensor and not local.is_quantized):
            continue
        seen.add(kind)
        if (error := _read_back(tensor)) is not None:
            raise ConfigError(_unreadable(name, local, error)) from error


def _read_back(tensor: torch.Tensor) -> Exception | None:
    """Write this rank's part of a tensor to memory and read it again; return what torch raises, if it does."""
    sample = local_tensor(tensor).detach().cpu()
    stream = io.BytesIO()
    try:
        torch.save(sample, stream)
        stream.seek(0)
        torch.empty_like(sample).copy_(torch.load(stream, weights_only=True))
    except Exception as error:  # noqa: BLE001 - torch and the classes of tensors raise many kinds
        return error
    return None


def _unreadable(name: str, local: torch.Tensor, error: Exception) -> str:
    """Write why a tensor cannot be kept, and what helps, which depends on what torch has refused."""
    title = f"tensor {name!r} is {type(local).__name__} of {local.dtype}"
    unread = "which torch.load(weights_only=True) does not read"
    if type(local) is torch.Tensor:
        return f"{title}, {unread} ({type(error).__name__}); dequantize it before it is saved"
    inside = "let the class have __tensor_flatten__ and __tensor_unflatten__, so that the tensors in it are kept"
    if isinstance(error, pickle.UnpicklingError):  # torch's own text advises to run what the file holds
        return (
            f"{title}, {unread}, since it does not know the class; make it a plain tensor, give the class to "
            f"torch.serialization.add_safe_globals, or {inside}"
        )
    reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return (
        f"{title}, whose values torch does not read from a file into a new one ({reason}); make it plain, or {inside}"
    )


def find_buffers(parts: Mapping[str, Part], contents: Contents) -> dict[str, torch.Tensor]:
    """Return the models' buffers among what the parts hold, but for those that are spread over ranks; local."""
    buffers: dict[str, torch.Tensor] = {}
    for name, part in parts.items():
        if isinstance(part, nn.Module):
            # A state dict mixes buffers and parameters; its tensors share the memory of the parameters.
            plain = {p.data_ptr() for p in sharded_parameters(part).values() if type(p.detach()) is torch.Tensor}
            for key, tensor in contents.tensors.items():
                if key.startswith(f"{name}/") and type(tensor) is torch.Tensor and tensor.data_ptr() not in plain:
                    buffers[key] = tensor
    return buffers


def parameter_names(name: str, optimizer: torch.optim.Optimizer, parts: Mapping[str, Part]) -> list[list[str]]:
    """Name an optimizer's parameters by the models that hold them, group by group."""
    names: dict[int, str] = {}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for home, model in parts.items():
        if not isinstance(model, nn.Module):
            continue
        wanted = set(map(id, sharded_parameters(model).values())) - names.keys()
        own = [parameter for parameter in held if id(parameter) in wanted]
        if not own:
            continue
        # torch names what an optimizer holds, and fills one without state by stepping it: this one has a state and is
        # thrown away, so that the user's is left alone.
        probe = torch.optim.Optimizer(own, {})
        probe.state[own[0]] = {}
        groups: Any = get_optimizer_state_dict(model, probe)["param_groups"]
        names |= {id(parameter): f"{home}/{key}" for parameter, key in zip(own, groups[0]["params"], strict=True)}
    for parameter in held:
        if id(parameter) not in names:
            raise ConfigError(
                f"optimizer {name!r} holds a parameter of shape {tuple(parameter.shape)} that no model among the parts "
                f"{sorted(parts)} has; give its model as a part, too, and make the optimizer after the model is sharded"
            )
    return [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


def saved_options(name: str, values: Mapping[str, Plain]) -> dict[str, Plain]:
    """Return the options of an optimizer's parameters."""
    options: dict[str, Plain] = {}
    for key, group in values.items():
        if key.startswith(f"{name}/group/") and isinstance(group, dict):
            options |= dict.fromkeys(group["params"], group["options"])
    return options


def trained_names(parts: Mapping[str, Part]) -> list[str]:
    """Return the names of what is trained in the models among the parts."""
    models = [part for part in parts.values() if isinstance(part, nn.Module)]
    trained = {id(p): p for model in models for p in sharded_parameters(model).values() if p.requires_grad}
    if not trained:
        return []
    return parameter_names("", torch.optim.Optimizer(list(trained.values()), {}), parts)[0]


def _ties(state: Mapping[str, Any]) -> dict[str, str]:
    """Return the names under which a tensor comes again, with the first one."""
    first: dict[tuple[Any, ...], str] = {}
    ties = {}
    for key, value in state.items():
        local = local_tensor(value)
        if not isinstance(local, torch.Tensor) or local.layout != torch.strided or local.is_meta or not local.numel():
            continue
        try:
            address = local.data_ptr()
        except RuntimeError:  # a tensor made of others, such as a quantized one
            continue
        place = (address, local.device, local.dtype, value.shape, local.stride())
        if address and first.setdefault(place, key) != key:
            ties[key] = first[place]
    return ties


def _collect_optimizer(
    name: str,
    optimizer: torch.optim.Optimizer,
    names: list[list[str]],
    skip: Collection[str],
    contents: Contents,
) -> None:
    state = optimizer.state_dict()
    flat = [member for members in names for member in members]
    unknown = list(state.keys() - {"state", "param_groups"})
    unknown += [key for key in state["state"] if key not in range(len(flat))]
    if unknown:
        raise ConfigError(
            f"optimizer {name!r} ({type(optimizer).__name__}) keeps {unknown[0]!r} beside its parameters' state, which "
            "cannot be cut anew for other ranks; keep that in a part of its own"
        )
    for group, members in zip(state["param_groups"], names, strict=True):
        if members:  # an empty group has no name, and its options touch nothing
            key = f"{name}/group/{members[0]}"
            options: dict[str, Plain] = {}
            for option, value in group.items():
                if option not in UNNAMED and (plain := _keep(f"{key}/{option}", value, skip, contents)) is not None:
                    options[option] = plain[0]
            contents.values[key] = {"params": members, "options": options}
    for number, of_parameter in state["state"].items():
        key = f"{name}/state/{flat[number]}"
        contents.values[key] = to_plain(of_parameter, key, contents.tensors)


# What each rank keeps for itself --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankState:
    """Values and tensors of this rank, by name, and buffers of models that differ between the ranks of its cell."""

    values: dict[str, Plain]
    tensors: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    boxes: dict[str, Plain] = field(default_factory=dict)
    """Composite tensors of this rank, whose inner ones are among the tensors"""


def check_rank_state(own: Mapping[str, Stateful] | None) -> Mapping[str, Stateful]:
    """Refuse what cannot be kept."""
    from xffl.checkpoint.generators import Generator  # which needs this module

    if own is None:
        return {}
    if not isinstance(own, Mapping):
        raise ConfigError(f"own is {type(own).__name__}; give a mapping such as {{'random': RandomState()}}")
    for name, kept in own.items():
        _check_name("own", name, "random")
        if isinstance(kept, Generator):
            raise ConfigError(
                f"own {name!r} is a random generator, {type(kept).__module__}.{type(kept).__name__}; give "
                f"RandomState(state.current_device, generators={{{name!r}: ...}})"
            )
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
                f"own tensor {name!r} is {kind}; a rank keeps dense ones, give what is spread over ranks as a part"
            )
    boxes: dict[str, Plain] = {}
    for name in [name for name, tensor in tensors.items() if composite.is_composite(tensor)]:
        inner, described = composite.take_apart(name, tensors.pop(name))
        tensors |= inner
        boxes |= described
    check_readable(tensors)
    copies = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    return RankState(values, copies, boxes=boxes)


def write_rank_state(folder: Path, place: int, own: RankState) -> dict[str, FileEntry]:
    """Write this rank's file, where it keeps anything."""
    if not own.values and not own.buffers:
        return {}
    file = folder / f"own_{place}.pt"
    content = {"values": json.dumps(own.values, allow_nan=False), "tensors": own.tensors, "buffers": own.buffers}
    if own.boxes:
        content["boxes"] = json.dumps(own.boxes, allow_nan=False)
    with naming_errors(file), create(file, "replace") as stream:
        torch.save(content, stream)
    sync(file)
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
        raise OtherLayoutError(
            f"checkpoint {folder} was saved by {saved}, this run is {here}: what each rank keeps for itself, "
            f"{sorted(wanted)}, fits that layout only; start in it, or give reset={sorted(wanted)} (a trainer's "
            "experiment.reset: true) to leave these as they are"
        )
    return wanted


def is_same_layout(record: Record, topology: Topology) -> bool:
    """Tell whether each rank finds here what it has kept for itself; pure."""
    return _layout(record.cells, record) == _layout(topology.sizes, topology)


def read_rank_state(
    index: CellIndex, place: int, wanted: Collection[str], *, is_same: bool
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Read this rank's file and compare it with its checksum; nothing is changed yet, and no code of it is run."""
    file = index.folder / f"own_{place}.pt"
    if not wanted and not (is_same and file.name in index.files):
        return {}, {}
    if file.name not in index.files:
        raise CheckpointError(f"{file} is in no index; the checkpoint is damaged, load another one")
    index.check_file(file.name)
    try:
        with index.open(file.name) as stream:
            content = load_archive(stream)
        values, tensors, buffers, described = _read_rank_content(content)
        for name, boxes in composite.read_boxes(described).items():
            tensors[name] = composite.restore(name, boxes, None, tensors.__getitem__)
        states = {name: from_plain(values[name], tensors) for name in sorted(wanted)}
        return states, buffers if is_same else {}
    except CheckpointError:  # of a class that nobody vouches for; it is a RuntimeError, too
        raise
    except (OSError, RuntimeError, ValueError, TypeError, KeyError) as error:
        reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise CheckpointError(
            f"{file} holds no own state: {reason}; the checkpoint is damaged, load another one"
        ) from error


def _read_rank_content(
    content: Any,
) -> tuple[dict[str, Plain], dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, Plain]]:
    """Return values, tensors, buffers and boxes of a rank's file, each of the type that is written."""
    if not isinstance(content, dict):
        raise ValueError(f"it holds a {type(content).__name__}, not a mapping")
    told: list[dict[str, Plain]] = []
    for name in ("values", "boxes"):
        text = content.get(name, "{}")
        read = parse_json(text, limit=INDEX_LIMIT, depth=VALUES_DEPTH) if isinstance(text, str) else None
        if not isinstance(read, dict):
            raise ValueError(f"its {name} are {shown(text)}, not a mapping in JSON")
        told.append(read)
    held: list[dict[str, torch.Tensor]] = []
    for name in ("tensors", "buffers"):
        tensors = content.get(name, {})
        if not isinstance(tensors, dict) or not all(isinstance(one, torch.Tensor) for one in tensors.values()):
            raise ValueError(f"its {name} are {shown(tensors)}, not a mapping of tensors")
        held.append(tensors)
    return told[0], held[0], held[1], told[1]


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
