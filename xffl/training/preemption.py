"""Preemption: after a signal all ranks stop after the same step, save, and exit with a code of its own.

:class:`StopConsensus` finds the step: a thread on each rank and the store of the world, no communication until somebody
asks. :class:`Preemption` is what a loop calls between its steps, :class:`PreemptionMixin` what a trainer saves there.
"""

from __future__ import annotations

import json
import logging
import math
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum, auto
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from xffl.aggregation.rounds.loop_hooks import LoopHooks
from xffl.checkpoint.manager import CheckpointManager
from xffl.cluster.launch.failure import ExitCode, note_failure
from xffl.distributed.agreement.consistency import barrier, check_consistent, gather_objects, run_on_all_ranks
from xffl.distributed.distributed_state import DistributedState
from xffl.distributed.failures.world_store import clone_store
from xffl.distributed.several_worlds.job_ranks import connect_job_store
from xffl.errors import MeetingLeft, StateError
from xffl.training.callbacks.checkpoint import CheckpointCallback
from xffl.training.callbacks.progress import ProgressCallback, ending_line, name_of
from xffl.training.mixins.state import StateMixin
from xffl.training.mixins.validation import ValidationMixin
from xffl.training.signals import DEFAULT_SIGNALS, SignalInbox, check_signals

if TYPE_CHECKING:
    from xffl.aggregation import FederatedScaling

__all__ = ["PreemptedExit", "Preemption", "PreemptionMixin", "StopConsensus", "StopPoint"]

LOG = logging.getLogger(__name__)

INTERVAL_S = 0.5
REQUESTS_PER_S = 2000.0
"""What all ranks together ask of rank 0's store at most"""
PATIENCE_S = 60.0
TERM_PATIENCE_S = 7.0
"""A launcher that ends what is left after a failure sends SIGTERM, too, and kills ten seconds later"""
MARGIN_S = 2.0

ALL_ENDED = json.dumps("ended")
NO_AGREEMENT = json.dumps(None)


class PreemptedExit(SystemExit):
    """The run was asked to stop early and has saved what it needs to go on; Python ends with exit code 75.

    Attributes: ``reason`` (signal and rank).

    :param reason: Who asked.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(int(ExitCode.PREEMPTED))
        self.reason = reason


# The consensus --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StopPoint:
    """Where all ranks stop."""

    reason: str
    steps: Mapping[int, int]
    """By cell: stop after this step, or a later one"""
    rounds: int
    """Stop when as many rounds have been entered"""


class _Phase(Enum):
    TRAINING = auto()
    """Nobody has asked"""
    DECIDING = auto()
    """Somebody has asked: no rank begins anything new until it is decided where to stop"""
    STOPPING = auto()
    """There is a stop point"""
    OVER = auto()
    """All have ended, or no stop point can be found: signals are no longer waited for"""


class StopConsensus:
    """Hear of signals on all ranks, and find a point to stop at, over these keys of a store.

    .. code-block:: text

       asked         a signal and its rank: somebody wants all to stop
       reached/RANK  how far a rank goes in any case; it begins nothing more until it is decided
       ended         how many ranks have no more steps to make
       decision      compare-and-set, so that all take what the first one writes: where every cell stops, by rank 0 from
                     what all have reached; that all have ended, by the last of them; or that there is no agreement, by
                     whoever waits in vain
       failed        a rank that failed: nothing can be decided any more

    All ranks of the world make one, each with the signals of its inbox, a store that nobody else calls from this
    process, with keys that no other consensus has used, and the number of its cell.
    """

    def __init__(self, inbox: SignalInbox, store: Store, rank: int, world_size: int, cell: int) -> None:
        self._inbox = inbox
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._cell = cell
        self._interval_s = max(INTERVAL_S, world_size / REQUESTS_PER_S)
        # The thread alone moves the phase, and the training's side what follows; both read under the lock.
        self._changed = threading.Condition()
        self._phase = _Phase.TRAINING
        self._stop_point: StopPoint | None = None
        self._step = 0  # the last that this rank has begun
        self._rounds = 0  # that it has entered when that step is over
        self._has_ended = self._has_arrived = self._is_closing = self._has_failed = False
        self._thread = threading.Thread(target=self._run, name="xffl-preemption", daemon=True)
        self._thread.start()

    # The training's side

    @property
    def stop_point(self) -> StopPoint | None:
        """Where all ranks stop, once this is decided."""
        with self._changed:
            return self._stop_point

    def proceed(self, step: int | None, rounds: int) -> StopPoint | None:
        """Say how far this rank goes now, unless it is decided where to stop; wait while the ranks decide.

        ``step`` is the one that begins, ``None`` where this cell makes no other, and ``rounds`` how many will have been
        entered when it is over. Where a stop point is returned, nothing was begun.
        """
        with self._changed:
            while self._phase is _Phase.DECIDING:
                self._changed.wait()
            if self._stop_point is None:
                self._step = self._step if step is None else max(step, self._step)
                self._rounds = max(rounds, self._rounds)
            return self._stop_point

    def await_all(self) -> StopPoint | None:
        """Wait until all ranks have called this, or there is a stop point, which is returned."""
        with self._changed:
            self._has_ended = True
        self._inbox.wake()
        with self._changed:
            while self._phase in (_Phase.TRAINING, _Phase.DECIDING):
                self._changed.wait()
            return self._stop_point

    def arrive(self) -> None:
        """Say that this rank has come to the stop point: it saves now, and no signal cuts that short."""
        self._has_arrived = True

    def close(self, *, has_failed: bool = False) -> None:
        """End the thread; where this rank has failed, nothing can be decided any more."""
        self._has_failed = has_failed  # first: the thread reads it when it sees the other
        self._is_closing = True
        self._inbox.wake()
        self._thread.join(MARGIN_S if has_failed else PATIENCE_S)

    # The thread

    def _run(self) -> None:
        signals: list[signal.Signals] = []
        try:
            if self._listen(signals):
                return
        except RuntimeError as lost:  # the store went with rank 0, whose failure ends the others, too
            LOG.debug("preemption is off: %s", lost)
        self._move_to(_Phase.OVER)
        while not self._is_closing:
            self._inbox.give_up(signals)
            signals = self._inbox.wait(self._interval_s)

    def _move_to(self, phase: _Phase, stop_point: StopPoint | None = None) -> None:
        with self._changed:
            self._phase = phase
            self._stop_point = stop_point or self._stop_point
            self._changed.notify_all()

    def _listen(self, signals: list[signal.Signals]) -> bool:
        """Wait for signals and for what others ask; return False where signals shall do what they did before."""
        store, has_counted, deadline = self._store, False, math.inf
        while not self._is_closing:
            signals += self._inbox.wait(self._interval_s)
            if self._phase in (_Phase.STOPPING, _Phase.OVER):
                # What comes now asks for nothing new, unless nobody can get there any more.
                if signals and store.check(["failed"]):
                    return False
                if signal.SIGTERM in signals:
                    deadline = min(deadline, time.monotonic() + PATIENCE_S)
                if time.monotonic() > deadline and not self._has_arrived:
                    signals[:] = [signal.SIGTERM]
                    return False
                signals.clear()
                continue
            if signals:
                store.compare_set("asked", "", f"{signals[0].name} on rank {self._rank}")
            if self._has_ended and not has_counted:
                has_counted = True
                if store.add("ended", 1) == self._world_size:
                    store.compare_set("decision", "", ALL_ENDED)
            is_found = True
            if store.check(["asked"]):
                is_found = self._decide()
            elif has_counted and store.check(["decision"]):
                is_found = self._take_decision()
            if not is_found:
                return False
            if self._phase in (_Phase.STOPPING, _Phase.OVER):
                signals.clear()
        if self._has_failed:
            store.set("failed", str(self._rank))
        return True

    def _decide(self) -> bool:
        """Say how far this rank goes, and take over what is decided; return whether there is an agreement."""
        store = self._store
        with self._changed:
            self._phase = _Phase.DECIDING
            reached = [self._cell, self._step, self._rounds]
        store.set(f"reached/{self._rank}", json.dumps(reached))
        reason = store.get("asked").decode()
        is_hasty = reason.startswith("SIGTERM")
        patience_s = TERM_PATIENCE_S if is_hasty else PATIENCE_S
        slack_s = min(self._interval_s, INTERVAL_S) if is_hasty else self._interval_s
        if self._rank == 0:
            point = self._find_stop_point(reason, patience_s + slack_s)
            value = NO_AGREEMENT if point is None else json.dumps([reason, list(point.steps.items()), point.rounds])
            store.compare_set("decision", "", value)
        try:
            # Rank 0 may have heard of it an interval later than this one.
            store.wait(["decision"], timedelta(seconds=patience_s + MARGIN_S + 2 * slack_s))
        except RuntimeError:  # a lost store raises the same; then the next line raises it, too
            store.compare_set("decision", "", NO_AGREEMENT)
        return self._take_decision()

    def _take_decision(self) -> bool:
        """Take over what was decided; return whether there is an agreement."""
        decision = self._store.get("decision").decode()
        if decision == ALL_ENDED:
            self._move_to(_Phase.OVER)
        elif decision != NO_AGREEMENT:
            reason, steps, rounds = json.loads(decision)
            self._move_to(_Phase.STOPPING, StopPoint(reason, dict(steps), rounds))
        return decision != NO_AGREEMENT

    def _find_stop_point(self, reason: str, patience_s: float) -> StopPoint | None:
        """Find the first point that every rank can stop at; ``None`` where not all ranks answer."""
        store, deadline = self._store, time.monotonic() + patience_s
        keys = [f"reached/{rank}" for rank in range(self._world_size)]
        while not store.check(keys):
            # With a decision, others have ended, or given up: what is returned here comes too late.
            if store.check(["decision"]) or store.check(["failed"]) or time.monotonic() > deadline:
                return None
            time.sleep(0.02)
        has_batches = store.has_extended_api()  # type: ignore[attr-defined]
        values = store.multi_get(keys) if has_batches else [store.get(key) for key in keys]
        steps: dict[int, int] = {}
        rounds = 0
        for cell, step, entered in map(json.loads, values):
            steps[cell], rounds = max(step, steps.get(cell, step)), max(rounds, entered)
        return StopPoint(reason, steps, rounds)


# What a loop calls ----------------------------------------------------------------------------------------------------


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
    :raises ConfigError: if a signal is invalid, or the ranks were given different ones.
    """

    def __init__(
        self, state: DistributedState, signals: Sequence[str] = DEFAULT_SIGNALS, *, inbox: SignalInbox | None = None
    ) -> None:
        self.signals = check_signals(signals)
        self._state = state
        self._inbox = SignalInbox(self.signals) if inbox is None else inbox
        self._own_inbox = self._inbox if inbox is None else nullcontext()
        self._consensus: StopConsensus | None = None
        self._rounds: FederatedScaling | None = None
        self._save: Callable[[], None] | None = None
        self._local_steps = self._most_steps = self._rounds_foreseen = 0
        self._has_asked_at_end = False
        self._holds_rounds = False  # delayed ones, until the next step: there may be none
        self._reached: StopPoint | None = None

    @property
    def reason(self) -> str | None:
        """Who asked, once this rank has come to where all stop; ``None`` before."""
        return None if self._reached is None else self._reached.reason

    def is_stopping(self) -> bool:
        """Tell whether it is decided where to stop, which may be behind the step that is being made; local."""
        return self._consensus is not None and self._consensus.stop_point is not None

    def follow(self, rounds: FederatedScaling, save: Callable[[], None]) -> None:
        """Take rounds into account, from now on; local, before the first step, on all ranks.

        :param rounds: What runs them.
        :param save: Called, on all ranks of a cell, where the cell has made its last step, answers the others' rounds,
            and all stop; :class:`PreemptedExit` is raised after it.
        """
        self._rounds = rounds
        self._save = save
        self._local_steps = rounds.local_steps
        self._rounds_foreseen = rounds.meetings + 1
        if self.signals:
            rounds.attach(
                LoopHooks(
                    before_final_rounds=self._before_final_rounds,
                    is_stopping=self.is_stopping,
                    defers_start=lambda: self._holds_rounds,
                )
            )

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
        if rounds is not None and rounds.meetings > self._rounds_foreseen:
            raise StateError(
                f"step {step} has entered round {rounds.meetings}, and at most {self._rounds_foreseen} was foreseen; "
                "call is_due once in a round at least, always after as many local steps"
            )
        consensus, foreseen = self._get_consensus(), self._count_rounds_ahead()
        point = consensus.proceed(step + 1, foreseen)
        if point is None:
            self._rounds_foreseen = foreseen
            return rounds is not None and rounds.start_deferred() and self.is_due(step)
        self._rounds_foreseen = max(self._rounds_foreseen, point.rounds)
        if rounds is not None:
            if rounds.meetings < point.rounds:
                # Rounds that another rank may have entered come first, those that were held back among them.
                return rounds.start_deferred() and self.is_due(step)
            self._holds_rounds = True
            if rounds.is_under_way:
                return False
        if step < point.steps[self._cell]:
            return False
        self._reached = point
        consensus.arrive()
        return True

    def is_due_at_end(self) -> bool:
        """Tell whether to stop where this cell has made its last step; collective over the world.

        Needed where there are several cells and no rounds: it waits for the other cells, or for a decision.

        :return: Whether all ranks stop where they are now.
        """
        if not self.signals:
            return False
        consensus = self._get_consensus()
        self._has_asked_at_end = True
        self._reached = consensus.await_all()
        if self._reached is not None:
            consensus.arrive()
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
        signals = str([signal_.name for signal_ in self.signals])
        check_consistent("signals of a preemption", signals, group=self._state.job_group)
        if not self.signals:
            return self
        topology, rank = self._state.job_topology, self._state.job_rank or 0
        self._cell = topology.cell_of(rank)
        self._cells = topology.cells
        self._own_inbox.__enter__()
        try:
            with run_on_all_ranks("connections of a preemption", group=self._state.job_group):
                # Over the one connection, the thread's calls would have the main thread's wait for them.
                connection = self._connect()
                # All ranks count before one of them does so again.
                number = int(connection.add("xffl_preemption", 1) - 1) // topology.world_size
                store = PrefixStore(f"xffl_preemption_{number}", connection)
        except BaseException:
            self._own_inbox.__exit__(None, None, None)
            raise
        self._consensus = StopConsensus(
            self._inbox, store=store, rank=rank, world_size=topology.world_size, cell=self._cell
        )
        return self

    def _connect(self) -> Store:
        """Return a connection of its own to a store that all ranks of the job share."""
        if self._state.isolated is not None:
            return connect_job_store(self._state.isolated, self._state.timeouts.session_s)
        return clone_store("leave signals alone with preempt_signals: []")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        consensus = self._consensus
        self._consensus = None
        if consensus is None:
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
                barrier(self._state.job_group)  # rank 0 decides for all who may still come to a step
        finally:
            consensus.close(has_failed=not is_orderly)
            if not is_orderly:
                self._inbox.give_up(())  # nobody waits for signals any more
            self._own_inbox.__exit__(None, None, None)
        if missed is not None:
            raise missed
        if kind is None and self._reached is not None:
            self.leave()

    def _get_consensus(self) -> StopConsensus:
        if self._consensus is None:
            raise StateError("is_due was called outside the with block of the Preemption; enter it first")
        return self._consensus

    def _count_rounds_ahead(self) -> int:
        """Return how many rounds this rank may have entered when the next step is over."""
        rounds = self._rounds
        if rounds is None:
            return 0
        # A step of the caller may be several of the rounds'; how many is known when it has made one.
        self._most_steps = max(self._most_steps, rounds.local_steps - self._local_steps)
        self._local_steps = rounds.local_steps
        is_due = self._most_steps == 0 or rounds.steps_left <= self._most_steps
        return rounds.meetings + is_due

    def _before_final_rounds(self) -> None:
        """Stop, where this is due, in place of entering a round as a cell that has finished."""
        rounds, save = self._rounds, self._save
        assert rounds is not None and save is not None, "rounds that are followed call this"
        point = self._get_consensus().proceed(None, rounds.meetings + 1)
        if point is not None and rounds.meetings >= point.rounds:
            self._reached = point
            self._get_consensus().arrive()
            save()
            self.leave()


# What a trainer saves -------------------------------------------------------------------------------------------------


class PreemptionMixin(StateMixin, ValidationMixin):
    """Save and stop where all ranks agree to; every trainer has it."""

    preemption: Preemption
    """Hears of signals, while :meth:`fit` runs"""
    _first_step: int = 0
    """Optimizer steps of this cell when training began or went on"""
    _began_s: float = 0.0
    _bytes_across: int = 0
    """Sent by this rank to other cells since the start"""

    def watch_signals(self) -> None:
        """Stop before the first step, where this is due; called on every rank when the counters stand."""
        self._first_step = self.global_step
        if (rounds := self.find_rounds()) is not None:
            self.preemption.follow(rounds, self._save_and_tell)
        self.leave_if_due()

    def take_place(self) -> bool:
        """Join the other cells of an elastic run, or leave where that is asked for while they are waited for."""
        if (rounds := self.find_rounds()) is not None:
            rounds.attach(LoopHooks(is_stopping=self.preemption.is_stopping))
        try:
            return super().take_place()
        except MeetingLeft:
            self._first_step = self.global_step
            self.leave_if_due()
            raise

    def leave_if_due(self) -> None:
        """Save and raise :class:`PreemptedExit`, where this is due after the step that was made.

        Local, unless it is due: then collective over the world, and raised on all ranks alike.
        """
        if self.preemption.is_due(self.global_step):
            self._save_and_tell()
            self.preemption.leave()

    def leave_if_due_at_end(self) -> None:
        """Save and raise :class:`PreemptedExit`, where this is due after the last step of this cell.

        Nothing moves where there is one cell, or rounds, which a cell that has finished answers; else collective over
        the world.
        """
        if self.state.topology.cells > 1 and self.find_rounds() is None and self.preemption.is_due_at_end():
            self._save_and_tell()
            self.preemption.leave()

    def _save_and_tell(self) -> None:
        """Save into the run's folder, where it is looked for, and let callbacks and loggers end in order.

        Collective over the world. Where no cell has made a step since the start there is nothing new to save.
        """
        step, made = self.furthest(self.global_step, self.global_step - self._first_step)
        path: Path | None = None
        if made > 0:
            # As many checkpoints stay as the run's own callback keeps.
            counts = [callback.keep_last_n for callback in self.callbacks if isinstance(callback, CheckpointCallback)]
            manager = CheckpointManager(self.config.experiment.output_dir, keep_last=max(counts, default=3))
            manager.save(self, step)
            path = manager.path_of(step)
        self.callbacks.preemption(self, None if path is None else str(path))
        self.tell_ending("stopped early" if path is None else f"stopped early, saved as {path.name}")

    def tell_ending(self, how: str) -> None:
        """Log what the federation has come to, and let progress callbacks show it as the run's last line.

        Where there are rounds, collective over the world: a gather of some numbers, after which no other cell has
        anything left to show. Without rounds cells end on their own, and nothing is waited for.
        """
        scope, values = self.last_validation or ("cell", {})
        ending = scope, values if self.run_directory.is_cell_writer else {}, self._bytes_across
        has_rounds = self.find_rounds() is not None
        of_ranks = gather_objects(ending) if has_rounds else [ending]
        if not self.state.is_first_of_job:
            return
        experiment = self.config.experiment
        line = ending_line(
            name=name_of(self),
            how=how,
            cells=self.state.topology.cells,
            validations=[values for one, values, _ in of_ranks if one == scope and values],
            rounds=self.rounds if has_rounds else None,
            bytes_sent=sum(sent for *_, sent in of_ranks),
            seconds=time.monotonic() - self._began_s,
            folder=str(experiment.output_dir),
        )
        logging.getLogger("xffl.training").info("%s", line)
        for callback in self.callbacks:
            if isinstance(callback, ProgressCallback):
                callback.show_ending(line)
