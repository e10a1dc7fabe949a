"""Saves while the training goes on: tensors are copied, and a thread writes them."""

from __future__ import annotations

import atexit
import os
import queue
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.stateful import Stateful

from xffl.checkpoint.contents import Part
from xffl.checkpoint.format import this_cell
from xffl.checkpoint.save import SaveRequest, prepare_save, write_checkpoint
from xffl.checks import number
from xffl.distributed.consistency import barrier, run_on_all_ranks
from xffl.distributed.distributed_state import DistributedState
from xffl.distributed.groups import destroy_group, make_host_groups
from xffl.errors import StateError

__all__ = ["AsyncSaver", "PendingSave"]


GRACE_S = 30.0
"""How long a process that ends without :meth:`AsyncSaver.close` still waits for what is being written."""


class PendingSave:
    """A checkpoint that is being written, as :meth:`AsyncSaver.save` returns it.

    :param path: Where it shall lie.
    :param saver: Who writes it.
    """

    def __init__(self, path: Path, saver: AsyncSaver) -> None:
        self.path = path
        self._saver = saver

    def then(self, call: Callable[[dist.ProcessGroup | None], None]) -> None:
        """Do something on the saver's thread when the checkpoint is whole, and nothing where it failed.

        All ranks ask for the same, before they wait or save again.

        :param call: Called with the saver's group of all ranks (``None`` in a single process), which it may communicate
            over. What it raises is raised by :meth:`AsyncSaver.wait`.
        """
        self._saver._do(call)


class AsyncSaver:
    """Save checkpoints while the training goes on.

    .. code-block:: python

       with AsyncSaver(state) as saver:
           for step, batch in enumerate(loader):
               train(batch)
               if step % 1000 == 0:
                   saver.save(f"step_{step}", {"model": model, "optimizer": optimizer}, values={"step": step})

    :meth:`save` copies what this rank holds to the memory of the host, so it needs room for that once, and returns. A
    thread writes the copy and gives the checkpoint its name, over gloo groups of its own, which are made here:
    collective over the world, where it is initialized.

    :param state: The state that says where this rank stands.
    :param timeout_s: Seconds that a rank may wait for others to have written, at least.
    :raises ConfigError: if an argument is invalid.
    :raises StateError: if the state does not fit torch.distributed.
    """

    def __init__(self, state: DistributedState, *, timeout_s: float = 1800.0) -> None:
        with run_on_all_ranks("arguments of AsyncSaver") as share:
            timeout_s = number("timeout_s", timeout_s, above=0, below=1e6, hint="give seconds")
            cell = this_cell(state)
            share(f"timeout_s={timeout_s}")
        self._state = state
        self._groups = make_host_groups(state.topology, cell.rank, timeout_s) if dist.is_initialized() else None
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
    ) -> PendingSave:
        """Copy what is to be kept and begin to write it; see :func:`xffl.checkpoint.save_checkpoint`.

        Collective over the world. Waits for the save before this one.

        :param path: The folder to make.
        :param parts: Models, optimizers and other objects by name.
        :param values: Plain values that loading returns.
        :param own: Objects that each rank keeps for itself.
        :param after_round: Whether a round has just given all cells the same weights.
        :return: The save under way; :meth:`wait` tells whether it went well.
        :raises ConfigError: if an argument is invalid or cannot be kept, or the ranks were given different ones.
        :raises StateError: if the saver is closed.
        :raises CheckpointError: if the save before this one failed; nothing of this one is begun then.
        """
        self.wait()
        request = SaveRequest(parts, values, own, after_round)
        saving = prepare_save(path, request, self._state, groups=self._groups, is_copied=True)
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
            error, self._error = self._error, None
            raise error

    def close(self) -> None:
        """Wait for what is being written and give the groups back; collective over the world.

        :raises XfflError: as :meth:`wait`; the saver is closed all the same, but its groups stay.
        """
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
            for group in (world, cell):
                if group is not None:
                    destroy_group(group)
            barrier()  # nobody makes a group of the same name while another one still clears this one's keys

    def __enter__(self) -> AsyncSaver:
        """Return the saver."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close the saver; after an exception nothing communicates, and what is being written may go on.

        The process waits for that before it ends, but not for longer than half a minute.
        """
        if kind is None:
            self.close()

    def _do(self, call: Callable[[dist.ProcessGroup | None], None]) -> None:
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
