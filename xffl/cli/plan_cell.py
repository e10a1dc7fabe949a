"""What ``xffl plan`` tells of the inside of a cell: its mesh, the memory of a rank and the traffic of a step."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

from jsonargparse import ArgumentParser, Namespace

from xffl.errors import ConfigError
from xffl.planning.text import bytes_text
from xffl.topology import Topology

if TYPE_CHECKING:
    from xffl.distributed.parameters import DeviceParameters
    from xffl.planning.memory import ModelSize, TrainingSize

__all__ = ["add_options", "bytes_of_dtype", "describe", "lay_out", "lines", "mesh_lines"]

_WORDS = (
    ("mesh", "AXES", "sizes of pp, cp, dp_replicate, dp_shard and tp: pp=2,dp_shard=auto,tp=2"),
    ("dtype", "DTYPE", "what weights and the optimizer's state are kept in (default: float32)"),
    ("param_dtype", "DTYPE", "what computation is done in (default: the same)"),
    ("optimizer", "NAME", "sgd, momentum, adamw or adafactor (default: adamw)"),
)
_COUNTS = (
    ("layers", "layers of the model, wrapped one by one (default: nothing is wrapped)"),
    ("width", "features between layers"),
    ("kv_width", "features of keys, and of values (default: the width)"),
    ("vocabulary", "rows of the embedding and of the head"),
    ("batch", "sequences of a forward and backward pass, on each rank with data of its own"),
    ("sequence", "tokens of a sequence"),
    ("micro_batches", "micro-batches of a pipeline (default: one for each stage)"),
    ("zero_stage", "what DeepSpeed cuts: 1, 2 or 3 (default: 2)"),
)
_COLUMNS = ("parameters", "gradients", "optimizer", "gathered", "round", "total", "sends")
_STRATEGIES = ("single", "ddp", "fsdp", "hsdp", "deepspeed")


def add_options(parser: ArgumentParser) -> None:
    """Add the options of a cell's inside."""
    group = parser.add_argument_group("inside a cell; with --params the memory of a rank and the traffic of a step")
    group.add_argument("--strategy", choices=_STRATEGIES, help="how the model is spread (default: as --mesh or --hsdp)")
    for name, metavar, told in _WORDS:
        group.add_argument(_option(name), type=str, metavar=metavar, help=told)
    for name, told in _COUNTS:
        group.add_argument(_option(name), type=int, metavar="N", help=told)
    group.add_argument("--keep-gathered", action="store_true", help="FSDP keeps layers whole for the backward pass")
    group.add_argument("--loss-parallel", action="store_true", help="tensor-parallel logits stay cut")


def bytes_of_dtype(options: Namespace) -> float:
    """Return the bytes of a weight as it is kept; also what a round sends of it."""
    from xffl.planning.memory import TrainingSize

    return float(TrainingSize(dtype=options.dtype or "float32").kept_bytes)


def lay_out(options: Namespace, plain: Topology, replica_size: int | None) -> Topology:
    """Return the federation with the mesh that is asked for in each cell."""
    parameters = _asked_mesh(options, replica_size)
    if parameters is None:
        return Topology(plain.world_size, plain.sizes, replica_size)
    mesh = parameters.resolve(plain.sizes)
    if replica_size not in (None, mesh.replica_size):
        knob = f"--mesh {options.mesh}" if options.mesh is not None else f"--strategy {options.strategy}"
        others = "which are whole cells" if mesh.replica_size is None else f"of {mesh.replica_size}"
        raise ConfigError(
            f"replicas of {replica_size} ranks (--hsdp) differ from those of {knob}, {others}; leave --hsdp out"
        )
    return Topology(plain.world_size, plain.sizes, mesh.replica_size, mesh.cell_shape)


def describe(options: Namespace, topology: Topology) -> dict[str, Any] | None:
    """Describe the smallest cell's mesh and what its ranks hold and send; ``None`` where no option asks for it.

    ``memory`` and ``traffic`` are lists of parts (``what``, ``bytes``, ``formula``); they and ``strategies``, the bytes
    of others for comparison, are ``None`` without ``--params``.
    """
    asked = [name for name, *_ in (*_WORDS, *_COUNTS) if options[name] is not None]
    asked += [name for name in ("strategy", "keep_gathered", "loss_parallel") if options[name]]
    if not asked:
        return None
    cell = topology.sizes.index(min(topology.sizes))
    axes = _axes(options, topology, cell)
    told = {"cell": cell, "ranks": topology.sizes[cell], "axes": axes, "first_rank": topology.offsets[cell]}
    told |= {"strategy": options.strategy or _name(axes), "zero_stage": _zero(options)}
    told |= dict.fromkeys(("memory", "total_bytes", "traffic", "strategies", "assumptions"))
    if options.params is not None:
        return told | _counted(options, topology, axes)
    if unread := [_option(name) for name in asked if name not in ("strategy", "mesh", "dtype", "zero_stage")]:
        raise ConfigError(f"no effect without --params: {', '.join(unread)}")
    return told


def mesh_lines(inside: dict[str, Any]) -> list[str]:
    """Draw the cell's mesh, and say what moves along its axes."""
    from xffl.planning.mesh import MOVES, mesh_text

    drawn = ["", mesh_text(inside["axes"], first_rank=inside["first_rank"], cell=inside["cell"])]
    return drawn + [f"  {axis:<12}  {told}" for axis, told in MOVES.items() if inside["axes"][axis] > 1]


def lines(inside: dict[str, Any]) -> list[str]:
    """Write the memory, the traffic and the comparison."""
    name = inside["strategy"] + (f", ZeRO {inside['zero_stage']}" if inside["zero_stage"] else "")
    found = ["", f"Memory of a rank in cell {inside['cell']} ({name}), beside activations:"]
    found += _part_lines(inside["memory"])
    found.append(f"  {'total':<12}  {_known(inside['total_bytes'])}")
    found += ["", "A rank sends inside the cell, in a forward and backward pass:"]
    found += _part_lines(inside["traffic"]) or ["  nothing"]
    found += [
        "",
        "With P parameters, U of them (P / pp / tp) on a stage, cut over n = dp_shard x cp ranks,",
    ]
    found += ["R = dp_replicate, t = tp, c = cp, tokens = batch x sequence / cp.", "", "Strategies for this cell:"]
    width = max(map(len, inside["strategies"]))
    columns = [name for name in _COLUMNS if any(name in row for row in inside["strategies"].values())]
    found.append("  " + " " * width + "".join(name.rjust(12) for name in columns))
    for label, row in inside["strategies"].items():
        found.append("  " + label.ljust(width) + "".join(_known(row[name]).rjust(12) for name in columns))
    return found


def _counted(options: Namespace, topology: Topology, axes: dict[str, int]) -> dict[str, Any]:
    """Count bytes, with what the options say of the model and the training."""
    from xffl.planning.memory import MEMORY_ASSUMPTIONS, ModelSize, TrainingSize, rank_memory, total_bytes
    from xffl.planning.traffic import TRAFFIC_ASSUMPTIONS, step_traffic

    sizes = ("layers", "width", "kv_width", "vocabulary")
    model = ModelSize(parameters=options.params, **{name: options[name] for name in sizes})
    names = ("dtype", "param_dtype", "optimizer", "batch", "sequence", "micro_batches")
    training = TrainingSize(
        reshard_after_forward=not options.keep_gathered,
        loss_parallel=options.loss_parallel,
        **{name: options[name] for name in names if options[name] is not None},
    )
    rounds = {
        "is_federated": topology.cells > 1,
        "atomic": not options.in_place,
        "codec": options.codec not in (None, "none"),
    }
    zero = _zero(options)
    memory = rank_memory(axes, model, training, zero=zero, **rounds)
    return {
        "memory": [part._asdict() for part in memory],
        "total_bytes": total_bytes(memory),
        "traffic": [part._asdict() for part in step_traffic(axes, model, training, zero=zero)],
        "strategies": _compare(axes, zero, model, training, rounds),
        "assumptions": [*MEMORY_ASSUMPTIONS, *TRAFFIC_ASSUMPTIONS],
    }


def _compare(
    axes: dict[str, int], zero: int, model: ModelSize, training: TrainingSize, rounds: dict[str, bool]
) -> dict[str, dict[str, float | None]]:
    """Count bytes of the plain strategies over as many ranks, and of the one that is asked for."""
    from xffl.planning.memory import rank_memory, total_bytes
    from xffl.planning.mesh import describe_mesh
    from xffl.planning.traffic import step_traffic

    ranks = prod(axes.values())
    choices: dict[str, tuple[dict[str, int], int]] = {"single": ({}, 0)}
    if ranks > 1:
        choices |= {"ddp": ({"dp_replicate": ranks}, 0), "fsdp": ({"dp_shard": ranks}, 0)}
    if ranks % 2 == 0 and ranks > 2:
        half = {"dp_replicate": 2, "dp_shard": ranks // 2}
        choices[f"hsdp, {describe_mesh(half)}"] = (half, 0)
    if ranks > 1:
        choices |= {f"deepspeed, ZeRO {stage}": ({"dp_shard": ranks}, stage) for stage in (1, 2, 3)}
    own = ({axis: size for axis, size in axes.items() if size > 1}, zero)
    if own not in choices.values():
        choices[f"this, {describe_mesh(axes)}"] = own
    if training.optimizer == "adafactor":  # which cannot take parameters that are cut
        choices = {name: choice for name, choice in choices.items() if name in ("single", "ddp") or choice == own}
    found = {}
    for name, (mesh, stage) in choices.items():
        memory = rank_memory(mesh, model, training, zero=stage, **rounds)
        sent = step_traffic(mesh, model, training, zero=stage)
        row = {part.what: part.bytes for part in memory}
        found[name] = {**row, "total": total_bytes(memory), "sends": total_bytes(sent)}
    return found


def _asked_mesh(options: Namespace, replica_size: int | None) -> DeviceParameters | None:
    """Return what the options ask for inside a cell; ``None`` where that is no more than ``--hsdp``."""
    from xffl.distributed.parameters import AXES, DeviceParameters

    strategy = options.strategy
    if options.zero_stage is not None and (strategy != "deepspeed" or options.zero_stage not in (1, 2, 3)):
        raise ConfigError(f"--zero-stage {options.zero_stage} is 1, 2 or 3, and DeepSpeed's; give --strategy deepspeed")
    others: dict[str, Any] = {} if options.param_dtype is None else {"param_dtype": options.param_dtype}
    if options.mesh is not None:
        sizes = _parse_mesh(options.mesh, AXES)
        parameters = DeviceParameters(**sizes, **others)
        if strategy not in (None, "hsdp", parameters.strategy):
            raise ConfigError(
                f"--strategy {strategy} does not do what --mesh {options.mesh} asks for; give --strategy "
                f"{parameters.strategy}, or leave it out"
            )
        return parameters
    if strategy is None:
        return None
    if strategy == "hsdp":
        if replica_size is None:
            raise ConfigError("--strategy hsdp needs to know the ranks of a replica; give --hsdp, or --mesh dp_shard=n")
        return DeviceParameters.HSDP(dp_shard=replica_size, **others)
    if strategy == "single":
        return DeviceParameters.SINGLE_DEVICE(**others)
    return DeviceParameters.DDP(**others) if strategy == "ddp" else DeviceParameters.FSDP(**others)


def _parse_mesh(text: str, axes: tuple[str, ...]) -> dict[str, Any]:
    sizes: dict[str, Any] = {}
    for word in text.split(","):
        axis, _, size = (part.strip() for part in word.partition("="))
        if axis not in axes or axis in sizes or not (size == "auto" or size.isdecimal()):
            raise ConfigError(
                f"--mesh {text!r} has {word!r}; give each of {', '.join(axes)} at most once with its ranks or auto, "
                "such as pp=2,dp_shard=auto"
            )
        sizes[axis] = size if size == "auto" else int(size)
    return sizes


def _axes(options: Namespace, topology: Topology, cell: int) -> dict[str, int]:
    """Return the ranks along each axis in a cell."""
    from xffl.distributed.parameters import AXES

    axes = dict.fromkeys(AXES, 1)
    if topology.cell_shape is not None:
        axes |= dict(topology.cell_shape)
    else:
        axes["dp_shard"] = topology.shards(cell)
    return axes | {"dp_replicate": topology.replicas(cell)}


def _name(axes: dict[str, int]) -> str:
    is_cut = any(size > 1 for axis, size in axes.items() if axis != "dp_replicate")
    if axes["dp_replicate"] > 1:
        return "hsdp" if is_cut else "ddp"
    return "fsdp" if is_cut else "single"


def _zero(options: Namespace) -> int:
    return (options.zero_stage or 2) if options.strategy == "deepspeed" else 0


def _part_lines(parts: list[dict[str, Any]]) -> list[str]:
    return [f"  {part['what']:<12}  {_known(part['bytes']):<8}  {part['formula']}" for part in parts]


def _known(count: float | None) -> str:
    return "?" if count is None else bytes_text(count)


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
