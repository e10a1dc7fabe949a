"""Exports: the files with which a cell that is a separate job takes part in rounds without a network.

Each cell trains by itself and writes an export, in the format of a checkpoint. ``xffl aggregate`` makes the round
(:mod:`xffl.aggregation.offline`), and each cell continues from its result.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from xffl import __version__
from xffl.aggregation.algorithms.combiners import Combiner
from xffl.aggregation.algorithms.registry import find_algorithm, is_builtin, make, parts_of_algorithm, read_spec
from xffl.aggregation.algorithms.server_optimizer import PLAIN_MEAN
from xffl.aggregation.arithmetic import weighted_mean
from xffl.aggregation.engine.decision.consensus import checked_number, checked_weight
from xffl.aggregation.engine.planning.tensors import Manifest, Pattern
from xffl.checkpoint.format import (
    OpenCheckpoint,
    Record,
    check_data,
    check_path,
    read_again_if_replaced,
    read_index,
    read_record,
)
from xffl.checkpoint.load import load_with_record
from xffl.checkpoint.save import save_checkpoint
from xffl.checkpoint.tables import read_counts
from xffl.checks import integer, shown
from xffl.costs import EXPORT_FORMAT, format_refusal
from xffl.distributed.agreement.consistency import run_on_all_ranks
from xffl.distributed.distributed_state import DistributedState
from xffl.distributed.values.sharding import bytes_of, dtype_of, from_bytes, local_tensor
from xffl.errors import CheckpointError, ConfigError
from xffl.naming import Writer
from xffl.reading import Fields

__all__ = [
    "RoundPlan",
    "agreed_global",
    "check_folder",
    "export_cell",
    "is_exported",
    "is_written",
    "load_global",
    "read_global",
    "read_told",
]

PART = "round"  # the only part of an export, and of the result of a round
CELL_FOLDER = "cell_0"  # the folder of the tensors in both, whichever cell an export is of
_CROSSING = ("atomic", "bucket_bytes", "form", "gradients_reduced_by_caller", "norms", "overlap", "rails")
"""Keywords of an aggregator that change no bit of a round, such as how it crosses a network."""


PLANNED = ("combine", "server")
"""The options of a round in a plan."""


@dataclass(frozen=True)
class RoundPlan:
    """How exports are combined, with the options of rounds over a network; plain values.

    :param algorithm: An algorithm by name, with options.
    :param options: ``server`` and ``combine``, as for :class:`xffl.Aggregator`.
    :param writer: Who wrote the plan: the user, or the writer of an export, whose names are not imported.
    """

    algorithm: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)
    writer: Writer = Writer.USER

    def plain(self) -> dict[str, Any]:
        """Return the plan as it is written into an export, without options that change no bit."""
        options = {name: option for name, option in self.options.items() if name in PLANNED}
        return {"algorithm": self.algorithm, "options": options}

    def read(self, given: Mapping[str, Any] | None = None) -> tuple[Any, Any]:
        """Return the specs of the combiner and of the server optimizer, without making these.

        A spec that is ``given``, and not ``None``, replaces that of the plan, whose names are not looked up then.
        """
        given = {kind: spec for kind, spec in (given or {}).items() if spec is not None}
        parts: dict[str, Any] = {"combine": "mean", "server": None}
        if self.algorithm is not None:
            parts |= parts_of_algorithm(self.algorithm, writer=self.writer, replaced=given)[1]
        parts |= {**self.options, **given}
        for kind in PLANNED:
            if kind not in given and self.writer is not Writer.USER:
                self._check_builtin(kind, parts[kind])
        return parts["combine"], parts["server"]

    def compare(self, given: Mapping[str, Any]) -> list[str]:
        """Return how given specs differ from the names of the user's classes in the plan; nothing is made."""
        differences = []
        algorithm = {} if self.algorithm is None else find_algorithm(self.algorithm)[1]
        for kind, mine in given.items():
            theirs = self.options.get(kind, algorithm.get(kind))
            if mine is None or not isinstance(theirs, (str, Mapping)):
                continue
            name, options = read_spec(kind, theirs)
            my_name, my_options = read_spec(kind, mine) if isinstance(mine, (str, Mapping)) else (repr(mine), {})
            if not is_builtin(kind, name) and (name, _texts(options)) != (my_name, _texts(my_options)):
                differences.append(
                    f"the exports ask for {kind} {shown(theirs)}, and this round is made with {shown(mine)}"
                )
        return differences

    def own_words(self) -> tuple[str, ...]:
        """Return the options of ``xffl aggregate`` that name the user's classes; exports cannot give these."""
        words: list[str] = []
        for kind, spec in zip(PLANNED, self.read(), strict=True):
            if isinstance(spec, (str, Mapping)):
                name, options = read_spec(kind, spec)
                if name not in PLAIN_MEAN and not is_builtin(kind, name):
                    written = ",".join(f"{key}={_option_text(option)}" for key, option in options.items())
                    words += [f"--{kind}", f"{name}:{written}" if written else name]
        return tuple(words)

    def _check_builtin(self, kind: str, spec: Any) -> None:
        """Refuse a name in a file that is not a built-in one."""
        if spec is None:
            return
        if not isinstance(spec, (str, Mapping)):
            raise CheckpointError(f"the exports ask for {kind} {shown(spec)}, which is not a name; export them again")
        name, _ = read_spec(kind, spec)
        if name not in PLAIN_MEAN and not is_builtin(kind, name):
            raise CheckpointError(
                f"the exports ask for {kind} {shown(name)}, which is not xffl's own, and what a file names is not "
                f"imported; if this name is yours or you trust it, give it yourself, with its options: --{kind} NAME"
            )

    def check(self) -> None:
        """Refuse options that rounds over files do not have."""
        options = dict(self.options)
        if self.algorithm is not None:
            entry, given = find_algorithm(self.algorithm)
            of_training = ("client", "privacy", "fragments", "delay")
            options |= {**entry.aggregator, **entry.scaling}
            options |= {name: option for name, option in given.items() if name in of_training}
        if options.get("nonfinite") == "reject":
            del options["nonfinite"]
        for name in sorted(options.keys() - {"server", "combine", "every", *_CROSSING}):
            raise ConfigError(
                f"{name} {options[name]!r} is not supported in rounds over files, only server and combine; leave it out"
            )
        check_combiner(make("combine", self.read()[0], writer=self.writer))
        try:
            json.dumps(self.plain())
        except TypeError as error:
            raise ConfigError(
                f"exports hold options as JSON, which {self.options} are not; give server and combine by name"
            ) from error


def _option_text(value: Any) -> str:
    """Return an option as it is written on a command line."""
    return f"({','.join(map(str, value))})" if isinstance(value, list | tuple) else str(value)


def _texts(options: Mapping[str, Any]) -> dict[str, str]:
    """Return options as texts, as a command line has them; a tuple has the text of an equal list."""
    return {name: str(list(value) if isinstance(value, tuple) else value) for name, value in options.items()}


def check_combiner(combiner: Combiner) -> None:
    """Refuse a combiner that needs more than exports hold."""
    if combiner.needs_distances or combiner.needs_norms or combiner.has_scale:
        raise ConfigError(
            f"combine {type(combiner).__name__} needs more than the exports hold (distances, norms or the model "
            "before); give mean, or a combiner that treats each element by itself"
        )


def export_cell(
    path: str | os.PathLike[str],
    model: nn.Module,
    state: DistributedState,
    *,
    cell: int,
    cells: int,
    weight: float | None = None,
    steps: float = 1.0,
    round: int = 1,  # noqa: A002 - as in a report
    policies: Mapping[Pattern, str] | None = None,
    start: str | None = None,
    plan: RoundPlan | None = None,
    sizes: Sequence[int] | None = None,
) -> None:
    """Write what this cell contributes to a round: the tensors that rounds move, and the cell's weight.

    Collective over the world, which is the cell: its ranks write their shards, once for all replicas, in the format of
    a checkpoint. Averaged buffers are first averaged over the cell's ranks, as in a round. Optimizers, frozen
    parameters and whatever else stays in a cell are not written: save them with
    :func:`xffl.checkpoint.save_checkpoint`.

    :param path: The folder to create, on a file system that all ranks share.
    :param model: The model, as :func:`xffl.shard` returned it.
    :param state: The state of this job.
    :param cell: Number of this job's cell, from 0.
    :param cells: Number of cells.
    :param weight: This rank's count since the last global model (samples, tokens); a cell's weight is the sum over its
        ranks. ``None`` on all ranks: every cell counts 1.
    :param steps: Effective number of local steps since then, the same on all ranks.
    :param round: Number of the round to which this is a contribution, from 1, the same in all cells. 0 for the model
        from which all cells start, which a server optimizer needs.
    :param policies: As for :class:`xffl.Aggregator`, the same in all cells.
    :param start: The digest of the global model from which this cell started, as :func:`read_global` returns it; so
        exports that started from different models are not combined.
    :param plan: How ``xffl aggregate`` combines the exports unless its options say otherwise.
    :param sizes: The numbers of ranks of all cells, by which samples were dealt out; the same in all exports of a
        round.
    :raises ConfigError: if an argument is invalid, or differs between the ranks.
    :raises CheckpointError: if the export could not be written; on all ranks.
    """
    with run_on_all_ranks("exports") as tell:
        if state.topology.cells != 1:
            raise ConfigError(
                f"this job has {state.topology.cells} cells, which average by themselves; export from a job of one"
            )
        count = integer("cells", cells)
        values: dict[str, Any] = {
            "format": EXPORT_FORMAT,
            "cell": integer("cell", cell, 0, count - 1, hint="count from 0"),
            "cells": count,
            "round": integer("round", round, 0),
            "steps": checked_number("steps", steps, "give this cell's local steps"),
            "start": start,
            "plan": None if plan is None else plan.plain(),
            "sizes": None if sizes is None else list(sizes),
        }
        manifest = _read_manifest(model, policies)
        tell(f"{values}\n{manifest}")
        own_weight = None if weight is None else checked_weight(weight)
    weights: list[float | None] = [own_weight]
    if dist.is_initialized():
        weights = [None] * dist.get_world_size()
        dist.all_gather_object(weights, own_weight)
    if len({count is None for count in weights}) > 1:
        raise ConfigError("some ranks were given a weight and others none; give all a weight, or none")
    # Added in the order of the ranks, as in a round over a network: another order may give other bits.
    values["weight"] = 1.0 if own_weight is None else sum(count for count in weights if count is not None)
    values["tensors"] = _describe_tensors(manifest)
    save_checkpoint(path, {PART: _MovingTensors(manifest, is_export=True)}, state, values={"export": values})
    state.activity.note_round()


def load_global(
    path: str | os.PathLike[str],
    model: nn.Module,
    state: DistributedState,
    *,
    policies: Mapping[Pattern, str] | None = None,
) -> int:
    """Load the result of a round of exports into the model, in place.

    Collective over the world. The model may be sharded differently than those that were exported. Whatever stays in a
    cell (frozen parameters, policy ``local``, the optimizer) is not changed.

    :param path: The folder that ``xffl aggregate`` has written.
    :param model: The model, as :func:`xffl.shard` returned it.
    :param state: The state of this job.
    :param policies: As for :func:`export_cell`.
    :return: The number of the round that made it.
    :raises ConfigError: if an argument is invalid.
    :raises CheckpointError: if it cannot be read or does not fit the model; on all ranks, and the model is unchanged.
    """
    return load_agreed_global(path, model, state, policies=policies)[0]


def load_agreed_global(
    path: str | os.PathLike[str],
    model: nn.Module,
    state: DistributedState,
    *,
    policies: Mapping[Pattern, str] | None = None,
    only: tuple[int, str] | None = None,
) -> tuple[int, str]:
    """Load as :func:`load_global` does, and return the result of :func:`read_global` for the loaded files.

    ``only`` is the expected result: another model, which a process may have written there since, is refused.
    """
    with run_on_all_ranks("models to load into") as tell:
        manifest = _read_manifest(model, policies)
        tell(manifest)

    def check(record: Record) -> None:
        check_kind(Path(path), record, "global")
        compare(record.values["global"]["tensors"], _describe_tensors(manifest), f"{path}", "this model")
        if only is not None and _told_of_global(record) != only:
            raise CheckpointError(
                f"{path} was replaced by the model of round {record.values['global']['round']} after it was read as "
                f"that of round {only[0]}; nothing was loaded, start again"
            )

    part = _MovingTensors(manifest, is_export=False)
    return _told_of_global(load_with_record(path, {PART: part}, state, check=check))


def read_global(path: str | os.PathLike[str]) -> tuple[int, str]:
    """Return the round that made a global model, and the SHA-256 of its index, which has those of all files; local."""
    return _told_of_global(_read_record(Path(path), "global"))


def _told_of_global(record: Record) -> tuple[int, str]:
    return int(record.values["global"]["round"]), record.indexes[CELL_FOLDER]


def agreed_global(path: str | os.PathLike[str]) -> tuple[int, str]:
    """Return the result of :func:`read_global`, checked to be the same on all ranks; collective over the world."""
    with run_on_all_ranks("global models") as tell:
        result = read_global(path)
        tell(result)
    return result


def is_exported(
    path: str | os.PathLike[str],
    *,
    cell: int,
    cells: int,
    round: int,  # noqa: A002 - as in a report
    start: str | None,
    plan: RoundPlan | None,
) -> bool:
    """Tell whether this export exists already, complete and undamaged; local."""
    wanted: dict[str, Any] = {"cell": cell, "cells": cells, "round": round, "start": start}
    wanted |= {} if plan is None else {"plan": plan.plain()}
    return is_written(Path(path), "export", wanted)


def is_written(path: Path, kind: str, wanted: Mapping[str, Any]) -> bool:
    """Tell whether an export or a round's result with these values exists, complete and undamaged; local."""

    def read() -> bool:
        with OpenCheckpoint(check_path(path)) as source, source.noticing_replacement():
            record = source.read_record()
            check_kind(path, record, kind)
            if any(record.values[kind].get(name) != value for name, value in wanted.items()):
                return False
            check_data(read_index(source, record))
            return True

    try:
        return read_again_if_replaced(read)
    except CheckpointError:
        return False


def check_folder(path: Path) -> None:
    """Compare the files of an export or of a global model with their checksums; local."""

    def read() -> None:
        with OpenCheckpoint(check_path(path)) as source, source.noticing_replacement():
            check_data(read_index(source, source.read_record()))

    read_again_if_replaced(read)


def read_told(path: Path, kind: str) -> dict[str, Any]:
    """Return the values of an export (``kind`` is ``export``) or of a round's result (``global``); local."""
    values: dict[str, Any] = _read_record(path, kind).values[kind]
    return values


def _read_record(path: Path, kind: str) -> Record:
    record = read_record(check_path(path))
    check_kind(path, record, kind)
    return record


def check_kind(path: Path, record: Record, kind: str) -> None:
    """Refuse a checkpoint that is not an ``export`` or a ``global`` model, has another format, or is damaged; pure.

    Afterwards all of its values are known to have the right types and to be within their limits.
    """
    values = record.values.get(kind)
    if record.parts != (PART,) or len(record.cells) != 1 or not isinstance(values, dict):
        wanted = "the model of a round of exports; give what xffl aggregate wrote"
        if kind == "export":
            wanted = "the export of a cell; give what --export wrote"
        raise CheckpointError(f"{path} is not {wanted}")
    # Exports without a number were written before formats had numbers: theirs is the first.
    if (theirs := values.get("format", 1)) != EXPORT_FORMAT:
        ours = f"{EXPORT_FORMAT} (xffl {__version__})"
        raise CheckpointError(format_refusal(str(path), f"{shown(theirs)} (xffl {record.xffl})", ours=ours))
    fields = Fields(values, f"{path}", error=CheckpointError, hint="it is damaged, write it again")
    cells = fields.integer("cells", 1, MOST_CELLS)
    fields.integer("round")
    read_tensor_kinds(fields)
    if kind == "global":
        fields.list_of("shares", MOST_CELLS, Fields.number, 0.0)
        fields.optional("made_of", Fields.mapping)
        return
    fields.integer("cell", 0, cells - 1)
    fields.number("steps", 0.0)
    fields.number("weight", 0.0)
    fields.optional("start", Fields.text)
    if fields.optional("sizes", Fields.list_of, cells, Fields.integer, 1) not in (None, []):
        count = len(values["sizes"])
        if count != cells:
            fields.fail(f"{fields.place('sizes')} has {count} numbers for {cells} cells")
    plan = fields.optional("plan", Fields.mapping)
    if plan is not None:
        plan.refuse_others("algorithm", "options")
        plan.mapping("options").refuse_others(*PLANNED)


MOST_CELLS = 10**6
MOVING = ("average", "first")
"""Policies of tensors that a round moves"""


def read_tensor_kinds(fields: Fields) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return the data type and the shape of each tensor; raises the fields' error if an entry is invalid."""
    kinds: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    tensors = fields.mapping("tensors")
    for name in tensors:
        entry = tensors.any(name)
        if not isinstance(entry, list) or len(entry) != 4 or not isinstance(entry[1], bool):
            tensors.fail(f"{tensors.place(name)} must be a policy, a switch, a dtype and a shape, got {shown(entry)}")
        policy, is_stepped, dtype, shape = entry
        if policy not in MOVING:
            tensors.fail(f"{tensors.place(name)} has the policy {shown(policy)}; it is one of {', '.join(MOVING)}")
        try:
            kind = dtype_of(str(dtype).removeprefix("torch."))
            kinds[name] = kind, read_counts(shape, "shape")
        except ValueError as error:
            tensors.fail(f"{tensors.place(name)} is no tensor: {error}")
        if (policy == "average" or is_stepped) and not (kind.is_floating_point or kind.is_complex):
            tensors.fail(f"{tensors.place(name)} is {kind}, which has no mean")
    return kinds


def compare(theirs: Mapping[str, Any], ours: Mapping[str, Any], who: str, other: str) -> None:
    """Refuse tensors that differ in name, policy, data type or shape; pure."""
    for name in sorted(theirs.keys() | ours.keys()):
        if theirs.get(name) != ours.get(name):
            shown = [f"{_text_of(table.get(name))} in {place}" for table, place in ((theirs, who), (ours, other))]
            raise CheckpointError(f"tensor {name!r} is {' and '.join(shown)}; give all the same model and policies")


def _text_of(tensor: Any) -> str:
    if tensor is None:
        return "missing"
    policy, is_stepped, dtype, shape = tensor
    return f"{tuple(shape)} {dtype}, {policy}{'' if is_stepped else ', not trained'}"


def _read_manifest(model: nn.Module, policies: Mapping[Pattern, str] | None) -> Manifest:
    manifest = Manifest(model, policies)
    manifest.check_patterns()
    return manifest


def _describe_tensors(manifest: Manifest) -> dict[str, list[Any]]:
    """Return the properties of each tensor that a round moves, which must be equal in all cells."""
    return {
        entry.name: [entry.policy, entry.is_stepped, str(entry.dtype), list(entry.shape)] for entry in manifest.moving
    }


class _MovingTensors:
    """The tensors of a model that a round moves, as a checkpoint's part."""

    def __init__(self, manifest: Manifest, *, is_export: bool) -> None:
        self._entries = manifest.moving
        self._is_export = is_export

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the tensors; for an export, averaged buffers are those of the mean over the cell's ranks."""
        values = {entry.name: entry.tensor() for entry in self._entries}
        if self._is_export:
            means = [entry.name for entry in self._entries if entry.is_buffer and entry.policy == "average"]
            values |= {name: _cell_mean(values[name]) for name in means}
        return {name: value.detach() for name, value in values.items()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for entry in self._entries:
                target, source = local_tensor(entry.tensor()), local_tensor(state[entry.name])
                if target.data_ptr() != source.data_ptr():  # else the checkpoint was read in place
                    target.copy_(source)


def _cell_mean(buffer: torch.Tensor) -> torch.Tensor:
    """Return the mean of a buffer over the ranks, with equal weights, as in a round; collective over the world."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return buffer
    mine = bytes_of(local_tensor(buffer)).cpu()
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, mine)
    real = buffer.dtype.to_real() if buffer.is_complex() else buffer.dtype
    values = [from_bytes(row, real, (-1,)) for row in rows]
    mean = torch.empty_like(values[0])
    weighted_mean(values, [1.0] * len(values), mean)
    return from_bytes(bytes_of(mean), buffer.dtype, buffer.shape)
