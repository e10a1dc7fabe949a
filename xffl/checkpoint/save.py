"""Saving of a checkpoint: each cell writes its own folder, once for all its replicas, and the whole appears at once.

:func:`save_checkpoint` returns when it is written; an :class:`AsyncSaver` copies the tensors, and a thread writes them.
"""

from __future__ import annotations

import atexit
import hashlib
import inspect
import json
import os
import queue
import shutil
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.stateful import Stateful

from xffl import checks
from xffl.callers import is_of_script
from xffl.checkpoint import format as folders
from xffl.checkpoint.contents import (
    Contents,
    Part,
    RankState,
    check_parts,
    check_rank_state,
    check_skip,
    collect,
    collect_rank_state,
    find_buffers,
    left_out_text,
    write_rank_state,
)
from xffl.checkpoint.format import Cell, CellWriter, Record
from xffl.checkpoint.tables import FileEntry
from xffl.distributed.agreement.consistency import barrier, run_on_all_ranks
from xffl.distributed.agreement.differences import difference_of
from xffl.distributed.collectives import Group
from xffl.distributed.distributed_state import DistributedState
from xffl.distributed.groups import destroy_group, new_group
from xffl.distributed.replicas.plain_values import Plain, to_plain
from xffl.distributed.several_worlds.cross_world import CrossWorldGroup
from xffl.distributed.several_worlds.job_ranks import join_job
from xffl.distributed.values.sharding import bytes_of
from xffl.errors import CheckpointError, ConfigError, StateError, XfflError
from xffl.files import make_folders

__all__ = ["AsyncSaver", "PendingSave", "save_checkpoint"]

OWN_ADVICE = (
    "give what each rank has for itself as own={'mine': part}, an object with state_dict and load_state_dict, which "
    "comes back on the rank that saved it"
)
PREVIOUS_STAYS = "what was saved before stays; see that there is space and who may write there, then save again"


@dataclass(frozen=True)
class PreparedSave:
    """A checkpoint that is to be written."""

    target: Path
    cell: Cell
    parts: tuple[str, ...]
    values: dict[str, Plain]
    after_round: bool
    contents: Contents
    rank_state: RankState


def save_checkpoint(
    path: str | os.PathLike[str],
    parts: Mapping[str, Part],
    state: DistributedState,
    *,
    values: Mapping[str, Any] | None = None,
    own: Mapping[str, Stateful] | None = None,
    after_round: bool = False,
    skip: Collection[str] = (),
) -> None:
    """Write a checkpoint, whole or not at all.

    Collective over the job; the folder must be on a file system that all its ranks share. Each cell writes its own
    tensors once, however many replicas it has: each rank the shards that no lower rank of its cell holds, and what is
    not sharded its first rank. Buffers that differ between the ranks of a cell, such as statistics of their own data
    since the last round, each rank writes for itself as well. Tensors do not move between ranks. A small all-reduce
    ends each step, so that all ranks fail alike. The files (tensors as torch writes them, all else as JSON, which run
    no code when they are read) are written aside, flushed to the disk, read back for their checksums, and take their
    name in the end; a checkpoint of the same name is replaced only then. A save that was killed leaves a folder
    ``.NAME.partial``, which the next one of this name removes.

    :param path: The folder to make; one that is no checkpoint is not overwritten.
    :param parts: Models, optimizers of these models, and objects with ``state_dict`` and ``load_state_dict``, by name;
        the same on all ranks. What such an object holds must be the same on all ranks of a cell.
    :param state: The state that says where this rank stands.
    :param values: Plain values (step, epoch) that loading returns; the same on all ranks.
    :param own: Objects with ``state_dict`` and ``load_state_dict`` that each rank keeps for itself (random numbers,
        what lossy codecs still have to send), by name; the names are the same on all ranks. They load into the same
        layout only; their tensors come back on the CPU.
    :param after_round: Whether a round has just given all cells the same weights; then the checkpoint also loads into
        other numbers of cells. The same on all ranks.
    :param skip: Entries that are left out without a warning, by name (``model/_metadata``): what a model's
        ``state_dict`` has beside parameters, buffers and extra states, and options of an optimizer's groups. Without it
        they are kept where they are plain values, and left out with one warning where they are not; loading leaves
        what was left out as it is there. The same on all ranks.
    :raises ConfigError: if an argument is invalid or cannot be kept, or the ranks were given different ones.
    :raises StateError: if the state does not fit torch.distributed.
    :raises CheckpointError: if it could not be written; the same on all ranks.
    """
    write_checkpoint(
        prepare_save(
            path=path,
            parts=parts,
            state=state,
            values=values,
            own=own,
            after_round=after_round,
            skip=skip,
        )
    )


def prepare_save(
    path: str | os.PathLike[str],
    parts: Mapping[str, Part],
    state: DistributedState,
    values: Mapping[str, Any] | None,
    own: Mapping[str, Stateful] | None,
    after_round: bool,
    skip: Collection[str],
    *,
    groups: tuple[Group, dist.ProcessGroup | None] | None = None,
    is_copied: bool = False,
) -> PreparedSave:
    """Check what is to be saved and take it; collective over the job.

    ``groups`` are used in place of the state's (by a thread); ``is_copied`` copies tensors, so that they may change.
    """
    world = state.job_group if groups is None else groups[0]

    def check() -> tuple[Path, dict[str, Plain], Cell, Mapping[str, Stateful]]:
        check_parts(parts)
        checks.one_of("after_round", after_round, (True, False))
        kept = check_rank_state(own)
        check_skip(skip)
        target = folders.check_path(path)
        if values is not None and not isinstance(values, Mapping):
            raise ConfigError(f"values is {type(values).__name__}; give a mapping such as {{'step': 100}}")
        if wrong := [name for name in values or () if not isinstance(name, str)]:
            raise ConfigError(f"values has the name {wrong[0]!r}; names are strings")
        plain = {name: to_plain(value, f"values[{name!r}]") for name, value in (values or {}).items()}
        return target, plain, folders.this_cell(state, groups), kept

    def show(checked: tuple[Path, dict[str, Plain], Cell, Mapping[str, Stateful]]) -> str:
        target, plain, _, kept = checked
        names = f"parts={sorted(parts)} values={json.dumps(plain, sort_keys=True)} own={sorted(kept)}"
        return f"path={target} {names} after_round={after_round}" + (f" skip={sorted(set(skip))}" if skip else "")

    shown = Path(str(path))
    target, plain, cell, kept = folders.run_collectively(
        "arguments", act=check, path=shown, advice=PREVIOUS_STAYS, show=show, world=world, describe=_describe_arguments
    )

    def take() -> tuple[Contents, RankState, dict[str, torch.Tensor], dict[str, str]]:
        contents = collect(parts, skip)
        buffers = find_buffers(parts, contents)
        digests = {name: hashlib.sha256(bytes_of(one.cpu()).numpy().data).hexdigest() for name, one in buffers.items()}
        return contents, collect_rank_state(kept), buffers, digests

    contents, rank_state, buffers, digests = folders.run_collectively(
        "contents", take, target, PREVIOUS_STAYS, world=world
    )

    def set_apart() -> tuple[Contents, RankState]:
        reasons = {name: one.reason for name, one in contents.left_out.items() if not one.is_skipped}
        by_rank = folders.gather_in_cell((digests, contents.composites, reasons), cell)
        if cell.rank == 0 and (left_out := {name: why for _, _, whys in by_rank for name, why in whys.items()}):
            _warn_of_script(left_out_text(left_out))
        contents.mark_left_out()
        contents.take_apart({name for _, names, _ in by_rank for name in names})
        pairs = {pair for of_rank, _, _ in by_rank for pair in of_rank.items()}
        kinds = Counter(name for name, _ in pairs)  # how many different buffers of a name there are
        apart = [name for name in buffers if kinds[name] > 1]
        copies = {name: buffers[name].detach().to("cpu", copy=True) for name in apart}
        return contents.on_host() if is_copied else contents, replace(rank_state, buffers=copies)

    contents, rank_state = folders.run_collectively("buffers", set_apart, target, PREVIOUS_STAYS, world=world)
    names = tuple(sorted(parts))
    return PreparedSave(
        target,
        cell=cell,
        parts=names,
        values=plain,
        after_round=after_round,
        contents=contents,
        rank_state=rank_state,
    )


def _describe_arguments(shown: dict[int, str]) -> XfflError:
    """Make the error of ranks that were given different arguments; pure."""
    what = "arguments of a checkpoint"
    values = {text.partition(" values=")[2].rpartition(" own=")[0] for text in shown.values()}
    if len(values) == 1:
        return difference_of(what, shown)
    return difference_of(what, shown, f"values are the same on all ranks; {OWN_ADVICE}")


def write_checkpoint(saving: PreparedSave) -> None:
    """Write a checkpoint and give it its name; collective over the job."""
    # Each step ends with an all-reduce, since the next one needs it on all ranks: nobody writes before rank 0 has made
    # the folders, and the checkpoint takes its name only when all files of all ranks are on the disk.
    target, cell = saving.target, saving.cell

    def on_all_ranks(what: str, act: Callable[[], None]) -> None:
        folders.run_collectively(what, act, target, PREVIOUS_STAYS, world=cell.world)

    on_all_ranks("preparing", lambda: _prepare(target, cell))
    partial = folders.temporary_path(target, "partial")
    try:
        on_all_ranks("writing", lambda: _write(partial / f"cell_{cell.number}", saving))
        on_all_ranks("publishing", lambda: _publish(saving))
    except CheckpointError:
        if cell.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)  # it may fill the disk; what is left the next save removes
        raise


def _prepare(path: Path, cell: Cell) -> None:
    """Clear the way and make the folders to write into; rank 0 does it."""
    if cell.rank != 0:
        return
    # A kill between the two renames of folders.publish() left the checkpoint as .old only: it gets its name back before
    # anything else, so that this save, too, has a whole one to replace.
    if (before := folders.locate_checkpoint(path)) != path:
        before.rename(path)
    if path.exists() and folders.find_record(path) is None and not (path.is_dir() and not any(path.iterdir())):
        raise CheckpointError(
            f"{path} exists and is no checkpoint that could be replaced; remove it, or give another name"
        )
    # Nothing is deleted before the check above; these folders are of saves that were killed.
    make_folders(path.parent)
    folders.clear_leftovers(path)
    for number in range(len(cell.sizes)):
        (folders.temporary_path(path, "partial") / f"cell_{number}").mkdir(parents=True)


def _write(folder: Path, saving: PreparedSave) -> None:
    """Write this rank's tensors; collective over the cell."""
    contents, cell = saving.contents, saving.cell
    values = _merge_in_cell(contents.values, cell)
    # Each tensor is written by one rank for all, so all must hold the same kind of it.
    shapes = _merge_in_cell({name: f"{tuple(it.shape)} {it.dtype}" for name, it in contents.tensors.items()}, cell)
    conflict = next((text for text in (values, shapes) if isinstance(text, str)), None)
    files: dict[str, FileEntry] = {}
    try:
        if not folder.is_dir():
            conflict = (
                f"rank {cell.rank} does not see {folder}, which rank 0 has made; save where all ranks share files"
            )
        elif conflict is None:
            files = write_rank_state(folder, cell.place, saving.rank_state)
    except Exception as error:  # noqa: BLE001 - whatever it is, the others must hear of it
        conflict = f"rank {cell.rank} cannot write what it keeps for itself: {type(error).__name__}: {error}"
    # Before torch's collectives, which a rank that raises alone would leave the others in.
    by_rank = folders.gather_in_cell((conflict, files, contents.ties), cell)
    if conflicts := [text for text, _, _ in by_rank if text is not None]:
        raise CheckpointError(conflicts[0])
    assert isinstance(values, dict)
    own_files = {name: entry for _, files, _ in by_rank for name, entry in files.items()}
    ties = {name: first for _, _, ties in by_rank for name, first in ties.items()}
    # Buffers that go together are of one rank, and one replica writes.
    once: dict[str, Any] = {"dedup_save_to_lowest_rank": True}
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False, **once)
    writer = CellWriter(folder, values, ties, own_files)
    if dist.is_initialized():
        save(dict(contents.tensors), storage_writer=writer, planner=planner, process_group=cell.group)
    else:
        _save_alone(contents.tensors, writer, planner)


def _save_alone(tensors: Mapping[str, torch.Tensor], writer: CellWriter, planner: DefaultSavePlanner) -> None:
    """Take torch's steps of a save in one process, where its ``save`` warns (warning filters are not per thread)."""
    planner.set_up_planner(dict(tensors), writer.storage_meta(), is_coordinator=True)
    writer.set_up_storage_writer(True)
    plans, metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    (plan,) = writer.prepare_global_plan(plans)
    writer.finish(metadata, [writer.write_data(planner.finish_plan(plan), planner).wait()])


def _merge_in_cell(values: dict[str, Plain], cell: Cell) -> dict[str, Plain] | str:
    """Put the values of the cell's ranks together on its first one, or return what contradicts; collective over it."""
    # Stages of a pipeline name different parameters, all other ranks the same: only the first rank with some values
    # sends them.
    digests = folders.gather_in_cell(hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest(), cell)
    if len(set(digests)) == 1:
        return values
    place = dist.get_rank(cell.group)
    mine = values if digests.index(digests[place]) == place else None
    by_rank: list[dict[str, Plain] | None] = [None] * len(digests)
    head = cell.rank - place
    dist.gather_object(mine, by_rank if cell.place == 0 else None, group_dst=0, group=cell.group)
    merged: dict[str, Plain] = {}
    for rank, theirs in enumerate(by_rank):
        for name, value in (theirs or {}).items():
            if merged.setdefault(name, value) != value:
                return (
                    f"what {name!r} holds on rank {head + rank} is not what it holds on a lower rank of cell "
                    f"{cell.number}; a checkpoint keeps one value for each cell, so make them the same, or {OWN_ADVICE}"
                )
    return merged


def _publish(saving: PreparedSave) -> None:
    """Give the checkpoint its name; rank 0 does it."""
    if saving.cell.rank != 0:
        return
    topology, indexes = saving.cell.topology, {}
    for number in range(topology.cells):
        index = folders.temporary_path(saving.target, "partial") / f"cell_{number}" / folders.INDEX
        if not index.is_file():
            raise CheckpointError(
                f"rank 0 does not see {index}, which cell {number} has written; save where all ranks share the files"
            )
        indexes[f"cell_{number}"] = folders.checksum(index)
    record = Record.now(
        world_size=topology.world_size,
        cells=topology.sizes,
        replica_size=topology.replica_size,
        cell_shape=None if (shape := topology.cell_shape) is None else tuple(dict(shape).items()),
        after_round=saving.after_round,
        parts=saving.parts,
        own=tuple(sorted(saving.rank_state.values)),
        values=saving.values,
        indexes=indexes,
    )
    folders.publish(saving.target, record)


# In the background ----------------------------------------------------------------------------------------------------

GRACE_S = 30.0  # how long a process that ends without AsyncSaver.close still waits for what is being written


class PendingSave:
    """A checkpoint that is being written to its ``path``, as :meth:`AsyncSaver.save` returns it."""

    def __init__(self, path: Path, saver: AsyncSaver) -> None:
        self.path = path
        self._saver = saver

    def then(self, call: Callable[[Group | None], None]) -> None:
        """Call something on the saver's thread when the checkpoint is whole, and nothing where it failed.

        All ranks ask for the same, before they wait or save again. The call gets the saver's group of all ranks of the
        job (``None`` in a single process) to communicate over; what it raises is raised by :meth:`AsyncSaver.wait`.
        """
        self._saver._do(call)


class AsyncSaver:
    """Save checkpoints while the training goes on, as in ``with AsyncSaver(state) as saver: saver.save(path, parts)``.

    :meth:`save` copies what this rank holds to the memory of the host, so it needs room for that once, and returns. A
    thread writes the copy and gives the checkpoint its name, over gloo groups of its own, which are made here:
    collective over the job, where torch.distributed is initialized.

    :param state: The state that says where this rank stands.
    :param timeout_s: Seconds that a rank may wait for others to have written, at least.
    :raises ConfigError: if an argument is invalid.
    :raises StateError: if the state does not fit torch.distributed.
    """

    def __init__(self, state: DistributedState, *, timeout_s: float = 1800.0) -> None:
        with run_on_all_ranks("arguments of AsyncSaver", group=state.job_group) as share:
            timeout_s = checks.number("timeout_s", timeout_s, above=0, below=1e6, hint="give seconds")
            cell = folders.this_cell(state)
            share(f"timeout_s={timeout_s}")
        self._state = state
        self._groups = _make_host_groups(state, cell, timeout_s) if dist.is_initialized() else None
        self._device = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._error: BaseException | None = None
        self._is_closed = False
        # A daemon: a peer that does not answer must not keep a process that has failed elsewhere from ending.
        self._thread = threading.Thread(target=self._run, name="xffl-checkpoint", daemon=True)
        self._thread.start()
        # Python takes the threads down while they are inside gloo otherwise, and the process aborts.
        atexit.register(self._linger)

    def save(
        self,
        path: str | os.PathLike[str],
        parts: Mapping[str, Part],
        *,
        values: Mapping[str, Any] | None = None,
        own: Mapping[str, Stateful] | None = None,
        after_round: bool = False,
        skip: Collection[str] = (),
    ) -> PendingSave:
        """Copy what is to be kept and begin to write it; :meth:`wait` tells whether it went well.

        Collective over the world, with the arguments and errors of :func:`xffl.checkpoint.save_checkpoint`. Waits for
        the save before this one, and begins nothing where that failed or the saver is closed.
        """
        self.wait()
        saving = prepare_save(
            path=path,
            parts=parts,
            state=self._state,
            values=values,
            own=own,
            after_round=after_round,
            skip=skip,
            groups=self._groups,
            is_copied=True,
        )
        self._do(lambda _: write_checkpoint(saving))
        return PendingSave(saving.target, self)

    save_checkpoint = save
    """The name under which a :class:`xffl.checkpoint.CheckpointManager` saves."""

    def wait(self) -> None:
        """Wait until nothing is being written.

        :raises XfflError: what the save before has raised, once, on all ranks alike.
        :raises StateError: if the saver is closed.
        """
        if self._is_closed:
            raise StateError("this saver is closed; make another one")
        self._jobs.join()
        if self._error is not None:
            error = self._error
            self._error = None
            raise error

    def close(self) -> None:
        """Wait as :meth:`wait`, which may raise, and give the groups back; collective over the world."""
        if self._is_closed:
            return
        try:
            self.wait()
        finally:
            self._is_closed = True
            self._jobs.put(None)
            atexit.unregister(self._linger)
        if self._groups is not None:
            world, cell = self._groups
            barrier(world)  # nobody still listens to a group that another one destroys
            if isinstance(world, CrossWorldGroup):
                world.close()
            else:
                destroy_group(world)
            if cell is not None:
                destroy_group(cell)

    def __enter__(self) -> AsyncSaver:
        """Return the saver."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close the saver; after an exception nothing communicates, and what is being written goes on for a while."""
        if kind is None:
            self.close()

    def _do(self, call: Callable[[Group | None], None]) -> None:
        """Let the thread call something when it has done what came before."""
        world = None if self._groups is None else self._groups[0]
        self._jobs.put(lambda: call(world))

    def _linger(self) -> None:
        """Let the thread end; called where the process does."""
        self._jobs.put(None)
        self._thread.join(GRACE_S)

    def _run(self) -> None:
        if self._device is not None:
            torch.cuda.set_device(self._device)  # a new thread has the first GPU as its current one
        while True:
            job = self._jobs.get()
            try:
                if job is None:
                    return
                if self._error is None:
                    job()
            except BaseException as error:  # noqa: BLE001 - raised in wait()
                self._error = error
            finally:
                del job  # it holds the copy of all tensors
                self._jobs.task_done()


def _make_host_groups(state: DistributedState, cell: Cell, timeout_s: float) -> tuple[Group, dist.ProcessGroup | None]:
    """Make groups over gloo for what goes on beside the training, in the host's memory; collective over the job.

    They hold all ranks of the job, and those of the cell where these are not all of the first group.
    """
    if state.isolated is not None:
        inside = new_group(range(state.topology.world_size), timeout_s, "xffl_host_federation", "gloo")
        return join_job(state.isolated, "checkpoints", timeout_s), inside
    world = new_group(range(cell.topology.world_size), timeout_s, "xffl_host_world", "gloo")
    if cell.topology.cells == 1:
        return world, None
    return world, new_group(cell.topology.federation(cell.number), timeout_s, "xffl_host_federation", "gloo")


def _warn_of_script(text: str) -> None:
    """Warn, at the line of the script that has led here; where libraries alone are on the stack, at the caller's."""
    level = 1  # this function
    frame = inspect.currentframe()
    while frame is not None:
        path = frame.f_code.co_filename
        if is_of_script(path):
            break
        frame = frame.f_back
        level += 1
    warnings.warn(text, stacklevel=2 if frame is None else level)
