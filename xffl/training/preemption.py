"""Leaving before the time is up: all ranks stop after the same step, save, and end with an exit code of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol

import torch.distributed as dist

from xffl.cluster.exit_codes import ExitCode
from xffl.cluster.launch.failure import note_failure
from xffl.distributed.consistency import barrier, check_consistent
from xffl.distributed.distributed_state import DistributedState
from xffl.errors import LaunchError, StateError
from xffl.training.listener import Goal, Listener, own_store
from xffl.training.signals import DEFAULT_SIGNALS, SignalInbox, check_signals

__all__ = ["PreemptedExit", "Preemption", "Rounds"]


class PreemptedExit(SystemExit):
    """The run was asked to leave and has saved what it needs to go on; Python ends with exit code 75.

    Attributes: ``reason`` (signal and rank).

    :param reason: Who asked.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(int(ExitCode.PREEMPTED))
        self.reason = reason


class Rounds(Protocol):
    """What :meth:`Preemption.follow` has to know of rounds; :class:`xffl.FederatedScaling` is it."""

    defer_start: bool
    before_final_rounds: Callable[[], None] | None

    @property
    def meetings(self) -> int:
        """How many rounds and checks of rounds this rank has entered."""

    @property
    def local_steps(self) -> int:
        """How many local steps it has made."""

    @property
    def steps_left(self) -> int:
        """How many local steps it makes before it enters the next round."""

    @property
    def is_under_way(self) -> bool:
        """Whether a round was started and is not merged."""

    def start_deferred(self) -> bool:
        """Start the round that was held back, if any, and tell whether there was one."""


class Preemption:
    """Let all ranks stop after the same optimizer step when a signal asks one of them to.

    .. code-block:: python

       with xffl.session() as state, Preemption(state) as preemption:
           first = load()
           for step, batch in enumerate(loader, first + 1):
               train(batch)
               if preemption.is_due(step):
                   save(step)
                   break

    Entering and leaving it are collective over the world. Left normally after :meth:`is_due` was True, it raises
    :class:`PreemptedExit`, so that the script ends with exit code 75.

    There is no communication while nobody asks: :meth:`is_due` takes a lock of this process, and a thread asks rank 0's
    store twice a second whether somebody has (in worlds of more than 1000 ranks less often). When somebody has, each
    rank tells how far it goes in any case, waiting at its next step, and rank 0 decides: every cell stops after the
    last step that one of its ranks has begun. Cells may make different numbers of steps; with rounds
    (:meth:`follow`), all first make those that one of them may have entered.

    Signals that come later ask for nothing more. Where not all ranks answer (one has failed), signals do what they did
    before: the default ends the process. SIGINT is left alone.

    :param state: The state that describes the world.
    :param signals: Names of the signals; none to make this do nothing. The same on all ranks.
    :param inbox: Signals that are caught already, of the same names; by default they are caught in the block. Outside
        the main thread none are.
    :raises ConfigError: if a signal cannot be meant, or the ranks were given different ones.
    """

    def __init__(
        self,
        state: DistributedState,
        signals: Sequence[str] = DEFAULT_SIGNALS,
        *,
        inbox: SignalInbox | None = None,
    ) -> None:
        self.signals = check_signals(signals)
        self._state = state
        self._inbox = SignalInbox(self.signals) if inbox is None else inbox
        self._is_own = inbox is None
        self._listener: Listener | None = None
        self._rounds: Rounds | None = None
        self._save: Callable[[], None] | None = None
        self._step = -1
        self._local_steps, self._most_steps, self._meetings_told = 0, 0, 0
        self._has_asked_at_end = False
        self._reached: Goal | None = None

    @property
    def reason(self) -> str | None:
        """Who asked, once this rank has come to where all stop; ``None`` before."""
        return None if self._reached is None else self._reached.reason

    def follow(self, rounds: Rounds, save: Callable[[], None]) -> None:
        """Take rounds into account, from now on; local, before the first step, on all ranks.

        :param rounds: What runs them.
        :param save: Called, on all ranks of a cell, where the cell has made its last step, answers the others' rounds,
            and all stop; :class:`PreemptedExit` is raised after it.
        """
        self._rounds, self._save = rounds, save
        self._local_steps, self._meetings_told = rounds.local_steps, rounds.meetings + 1
        if self.signals:
            rounds.before_final_rounds = self._answer

    def is_due(self, step: int) -> bool:
        """Tell whether to stop here, where nothing of a step is open; local.

        Called on all ranks after each optimizer step, and best once before the first. Where False was returned the next
        step follows, or the end. Waits for the decision where one is being made.

        :param step: Steps that this cell has made.
        :return: Whether all ranks stop where they are now.
        :raises StateError: outside the ``with`` block, or where a step has entered more rounds than one.
        """
        rounds = self._rounds
        if not self.signals:
            if rounds is not None:
                rounds.start_deferred()  # before samples of the next step count for it
            return False
        if rounds is not None and rounds.meetings > self._meetings_told:
            raise StateError(
                f"step {step} has entered round {rounds.meetings}, and at most {self._meetings_told} was foreseen; "
                "call is_due once in a round at least, always after as many local steps"
            )
        listener, meetings = self._get_listener(), self._meetings_ahead()
        goal = listener.proceed(step + 1, meetings)
        if goal is None:
            self._meetings_told = meetings
            return rounds is not None and rounds.start_deferred() and self.is_due(step)
        self._meetings_told = max(self._meetings_told, goal.meetings)
        if rounds is not None and rounds.meetings < goal.meetings and rounds.start_deferred():
            return self.is_due(step)
        if rounds is not None and rounds.meetings >= goal.meetings:
            rounds.defer_start = True
            is_here = not rounds.is_under_way
        else:
            is_here = rounds is None
        if not is_here or step < goal.steps[self._cell]:
            return False
        self._reached = goal
        listener.arrive()
        return True

    def is_due_at_end(self) -> bool:
        """Tell whether to stop where this cell has made its last step; collective over the world.

        Needed where there are several cells and no rounds: it waits for the other cells, or for a decision.

        :return: Whether all ranks stop where they are now.
        """
        if not self.signals:
            return False
        listener = self._get_listener()
        self._has_asked_at_end = True
        self._reached = listener.await_all()
        if self._reached is not None:
            listener.arrive()
        return self._reached is not None

    def leave(self) -> None:
        """Raise :class:`PreemptedExit`; local, after :meth:`is_due` was True.

        :raises PreemptedExit: always.
        :raises StateError: if nobody has asked.
        """
        if self._reached is None:
            raise StateError("leave was called, and is_due was not True; leave where it is")
        raise PreemptedExit(self._reached.reason)

    def __enter__(self) -> Preemption:
        check_consistent("signals of a preemption", str([one.name for one in self.signals]))
        if not self.signals:
            return self
        topology, rank = self._state.topology, self._state.rank or 0
        self._cell, self._cells = topology.cell_of(rank), topology.cells
        if self._is_own:
            self._inbox.__enter__()
        size = topology.world_size
        wrong: LaunchError | None = None
        try:
            store = own_store(size)
        except LaunchError as lost:
            wrong = lost
        try:
            check_consistent("connections of a preemption", "", error=wrong)
        except BaseException:
            if self._is_own:
                self._inbox.__exit__()
            raise
        self._listener = Listener(self._inbox, store, rank, size, self._cell)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        listener, self._listener = self._listener, None
        if listener is None:
            return
        is_forgotten = self._reached is None and not self._has_asked_at_end
        missed: StateError | None = None
        if kind is None and self._cells > 1 and self._rounds is None and is_forgotten:
            error = missed = StateError(
                f"there are {self._cells} cells and no rounds, and is_due_at_end was not called; call it after the "
                "last step, on all ranks, so that a cell that has finished waits for the others' signals"
            )
        if error is not None:
            note_failure(error)  # before the others lose this rank, so that it counts as the first to fail
        is_orderly = error is None or (isinstance(error, PreemptedExit) and self._reached is not None)
        try:
            if is_orderly and dist.is_initialized():
                barrier()  # rank 0 decides for all who may still come to a step
        finally:
            listener.stop(has_failed=not is_orderly)
            if not is_orderly:
                self._inbox.give_up(())  # nobody listens any more
            if self._is_own:
                self._inbox.__exit__()
        if missed is not None:
            raise missed
        if kind is None and self._reached is not None:
            self.leave()

    def _get_listener(self) -> Listener:
        if self._listener is None:
            raise StateError("is_due was called outside the with block of the Preemption; enter it first")
        return self._listener

    def _meetings_ahead(self) -> int:
        """Return how many rounds this rank may have entered when the next step is over."""
        rounds = self._rounds
        if rounds is None:
            return 0
        # A step of the caller may be several of the rounds'; how many is known when it has made one.
        self._most_steps = max(self._most_steps, rounds.local_steps - self._local_steps)
        self._local_steps = rounds.local_steps
        is_due = self._most_steps == 0 or rounds.steps_left <= self._most_steps
        return rounds.meetings + is_due

    def _answer(self) -> None:
        """Stop, where this is due, in place of entering a round as a cell that has finished."""
        rounds, save = self._rounds, self._save
        assert rounds is not None and save is not None, "rounds that are followed call this"
        goal = self._get_listener().proceed(-1, rounds.meetings + 1)
        if goal is not None and rounds.meetings >= goal.meetings:
            self._reached = goal
            self._get_listener().arrive()
            save()
            self.leave()
