"""Rounds in a training loop that the caller owns."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from xffl.aggregation.aggregator import Aggregator, PendingRound, check_given
from xffl.aggregation.algorithms.clients import Client, check_step, set_up
from xffl.aggregation.algorithms.schedules import Schedule
from xffl.aggregation.config import RoundArguments, RoundConfig, check_stepped, file_round, parse_round_config
from xffl.aggregation.contributions import (
    ContributionTracker,
    NormalizedSteps,
    Snapshot,
    StepTimer,
    check_apart,
    check_outside_backward,
    enclosing_calls,
)
from xffl.aggregation.engine.consensus import RoundBroken, RoundInput, checked_weight
from xffl.aggregation.engine.first_round import digest_of
from xffl.aggregation.hierarchical import Levels
from xffl.aggregation.report import ElasticRoundReport, RoundReport
from xffl.aggregation.weight_copies import tell_copies
from xffl.distributed.consistency import run_on_all_ranks
from xffl.distributed.distributed_state import DistributedState
from xffl.elastic.federation import MeetingLeft
from xffl.errors import CheckpointError, ConfigError, RoundError, StateError, XfflError

if TYPE_CHECKING:
    from xffl.aggregation.elastic import ElasticAggregator, ElasticRound
    from xffl.aggregation.exports import FileRound

__all__ = ["FederatedScaling"]


NO_CELLS = (
    "xffl: rounds are asked for, but no federation, and all ranks are in one cell: nothing is averaged between cells; "
    "give sizes or a rule, such as --federated 4,4"
)


class FederatedScaling:
    """Run rounds between optimizer steps, for as long as the ``with`` block lasts.

    Making it, entering it (an :class:`~xffl.Aggregator` is made) and leaving it normally are collective over the world:
    a cell that has finished keeps answering the others' rounds until all have finished, so cells with loaders of
    different length do not hang. Steps made since a cell's last round count in the first round that it answers; from
    then on its weight is 0. Leaving by an exception does not communicate.

    In a job that is one cell by itself (``xffl exec --cell 0/2``) there are no rounds: entering takes over the global
    model of ``--from``, if there is one, and leaving writes the export for a round over files.

    .. code-block:: python

       with xffl.FederatedScaling(model, optimizer, state, every=100):
           for batch in loader:
               model(batch).loss.backward()
               optimizer.step()
               optimizer.zero_grad()

    :param model: The model that trains.
    :param optimizer: Its optimizer, or several; a call of the last one's ``step`` is a local step. What the others have
        stepped since is taken in by the next round, at the latest by the one on leaving. ``None`` where the loop calls
        no ``step``, or only in a backward pass: then :meth:`step` counts.
    :param state: The state that describes the federation.
    :param every: Local steps between two rounds, at least 1, or a schedule
        (:mod:`xffl.aggregation.algorithms.schedules`): an object, its name with options (``"balanced:every=100"``), or
        a mapping. Cells may make different numbers of steps, the ranks of a cell the same. May be left out where the
        algorithm says it.
    :param weight: Called on each rank before a round: the count (samples, tokens) since the last call. What a rejected
        round did not use counts in the next. ``None``: every cell that made a step counts 1.
    :param on_round: Called on every rank with the report of each round, after the new weights stand, and of each check
        that skipped one.
    :param aggregator: An aggregator made with options of one's own, or a mapping with the keywords of the one to make
        (with ``levels``, a :class:`xffl.aggregation.Levels`); ``None`` makes one with the defaults. A loop that reduces
        gradients over the cell by itself gives ``{"gradients_reduced_by_caller": True}``.
    :param delay: Local steps that go on while a round is under way; 0 waits for it. It is merged before the next one
        starts at the latest. A delay needs an aggregator with ``overlap=True``.
    :param alpha: With a delay, the part of a local value that stays when the mean is merged; ``None`` keeps the steps
        made meanwhile. See :meth:`xffl.Aggregator.aggregate_async`.
    :param client: What changes the cells' local steps: ``fedprox``, ``scaffold``, with options, or an object of one's
        own (:class:`xffl.aggregation.algorithms.clients.Client`). Each needs one of its own, without delay and
        fragments.
    :param algorithm: An algorithm's name, with options: keywords for the aggregator and for here, which hold where
        nothing is given.
    :raises ConfigError: if an argument is invalid or differs between ranks, or the aggregator is another model's; on
        all ranks alike.

    ``meetings`` are the rounds and checks that this rank has entered, ``before_final_rounds`` is called before it
    enters another one when it has finished. Delayed rounds start before the next step where ``defer_start`` is set. In
    an elastic federation ``tell`` is called before each round, on all ranks with the same result: plain values that all
    cells of the round learn by its report (``told``). While other cells are waited for, ``is_stopping`` is asked on the
    cell's first rank: if it is true there is no round, and MeetingLeft is raised where this cell has not joined yet.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer] | None,
        state: DistributedState,
        *,
        every: int | str | Mapping[str, Any] | Schedule | None = None,
        weight: Callable[[], float] | None = None,
        on_round: Callable[[RoundReport], None] | None = None,
        aggregator: Aggregator | Levels | Mapping[str, Any] | None = None,
        delay: int | None = None,
        alpha: float | None = None,
        client: str | Mapping[str, Any] | Client | None = None,
        algorithm: str | Mapping[str, Any] | None = None,
    ) -> None:
        optimizers = None if optimizer is None else list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
        self._over_files: FileRound | None = None
        with run_on_all_ranks(
            "steps between rounds (every), clients, and ways to weigh and merge",
            convert=lambda error: ConfigError(f"the arguments cannot be read: {type(error).__name__}: {error}"),
        ) as tell:
            check_given(model, state)
            asked = RoundArguments(every, aggregator, delay, alpha, client, algorithm)
            cell, cells = state.cell, state.cells
            config = parse_round_config(model, optimizers, asked, cells=cells, weight=weight)
            tell(f"{config}, weighed={weight is not None}")
            if state.lone_cell is not None and state.elastic is None:
                self._over_files = file_round(model, state, config, asked)
        is_alone = state.topology.cells == 1 and not state.is_federated_scaling_setup() and state.lone_cell is None
        if is_alone and state.rank == 0:
            print(NO_CELLS, file=sys.stderr, flush=True)  # a federation of one cell was reported at its set-up
        self._is_told = state.rank == 0 and not is_alone and (cells > 1 or state.elastic is not None)
        """Whether this rank says what rounds do not average."""
        self._config: RoundConfig = config
        self._optimizers, self._weight, self._on_round = config.optimizers, weight, on_round
        self._model, self._state = model, state
        self._cell = cell
        self._is_own = isinstance(aggregator, Mapping | None)
        self._aggregator: Aggregator | Levels | ElasticAggregator | None = None
        if not isinstance(aggregator, Mapping | None):
            self._aggregator = aggregator
        self._handles: list[RemovableHandle] = []
        self._is_entered = False
        self._report: RoundReport | None = None
        self.before_final_rounds: Callable[[], None] | None = None
        self.tell: Callable[[], Mapping[str, Any]] | None = None
        self.is_stopping: Callable[[], bool] | None = None
        self.meetings, self.local_steps, self.defer_start = 0, 0, False
        self._weight_taken = 0.0
        self._has_joined = True
        self._doubted: Snapshot | None = None  # what a round of an elastic federation has taken in, if it was taken
        self._reset_counters()
        self._entry = state.activity.expect_entry(self) if state.rank == 0 else None

    def _reset_counters(self) -> None:
        self._tracker = ContributionTracker(1 if self._aggregator is None else self._aggregator.fragments)
        self._normalized_steps = NormalizedSteps(self._optimizers)
        self._step_timer = StepTimer(next((one.device for one in self._model.parameters()), torch.device("cpu")))
        self._delayed = _DelayedRound(self._config, self._tracker)
        self._since = self._target = 0

    @property
    def aggregator(self) -> Aggregator | Levels | ElasticAggregator:
        """The aggregator that runs the rounds.

        :raises StateError: outside the ``with`` block, if none was given.
        """
        if self._aggregator is None:
            raise StateError("the aggregator is made on entering the with block; enter it first")
        return self._aggregator

    @property
    def _elastic(self) -> Any:  # an ElasticAggregator, whose module is not imported here
        return self.aggregator

    @property
    def steps_left(self) -> int:
        """How many local steps this rank makes before it enters the next round."""
        return self._target - self._since

    @property
    def total_weight(self) -> float:
        """Sum of the weights that all cells had in all rounds so far; the same on all ranks that have just made one.

        Where ``weight`` counts samples, on how many the model was trained in all cells. With fragments each round
        counts for its part of the model. A cell of an elastic federation that takes the model over takes this, too.
        With levels only the rounds of this facility's lowest one are known.
        """
        rounds: Any = self._aggregator  # None where they go over files, and before the with block
        is_elastic = self._state.elastic is not None and rounds is not None
        return float(rounds.total_weight) if is_elastic else self._weight_taken / getattr(rounds, "fragments", 1)

    @property
    def is_under_way(self) -> bool:
        """Whether a round was started and is not merged."""
        return self._delayed.is_under_way

    def __enter__(self) -> FederatedScaling:
        if self._is_entered:
            raise StateError("this FederatedScaling is already entered; make one for each with block")
        if self._entry is not None:
            self._entry.detach()
        with run_on_all_ranks("optimizers"):
            if self._optimizers:  # parameters may have been replaced since this was made; from here on rounds notice
                check_stepped(self._model, self._optimizers)
        if self._over_files is not None:
            self._over_files.begin()
        else:
            self._open_aggregator()
        self._reset_counters()
        self._target = self._next_target(0 if self._aggregator is None else self._aggregator.rounds)
        self._note_start()
        self._is_entered = True
        # Hooks stay outside of a step that is compiled.
        hooks = (lambda *unused: self.join(), self._before_step, self._after_step)
        join, before, after = map(torch.compiler.disable, hooks)
        for optimizer in self._optimizers:
            self._handles += [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]
        if self._is_told:
            self._handles += tell_copies(self._optimizers)
        if self._state.elastic is not None:
            self._state.activity.note_round()  # a cell that comes and goes may be in none, which is no mistake
            # Before the first pass and not here, since a resumed run loads what it holds in the block.
            self._has_joined = False
            self._handles.append(self._model.register_forward_pre_hook(join, prepend=True))
        return self

    def _open_aggregator(self) -> None:
        """Make the aggregator where this object owns it, and drop a round that an error has left under way."""
        if self._aggregator is None or (self._is_own and self._aggregator.is_closed):
            # A second block goes on where the first has ended.
            saved = None if self._aggregator is None else self._aggregator.state_dict()
            client, options = self._config.client, dict(self._config.options)
            if "levels" not in options:
                options.setdefault("overlap", self._config.delay > 0)
                options.setdefault("norms", self._config.schedule.has_threshold)
            if client is not None and self._aggregator is None:
                set_up(client, self._model, self._optimizers, options.get("policies"))
            if client is not None and client.extra is not None:
                options["extra"] = client.extra
            if self._state.elastic is not None:
                # torchft, and what it brings, is imported for these runs only.
                from xffl.aggregation.elastic import ElasticAggregator

                if "levels" in options:
                    raise ConfigError("an elastic federation has no levels; leave levels out")
                self._aggregator = ElasticAggregator(self._model, self._state, **options)
            else:
                kind = Levels if "levels" in options else Aggregator
                self._aggregator = kind(self._model, self._state, **options)
            if saved is not None:
                self._aggregator.load_state_dict(saved)
        self.discard()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        while self._handles:  # first: what follows may raise, and the optimizers live on
            self._handles.pop().remove()
        self._is_entered = False
        if kind is not None and self._state.elastic is not None and self._aggregator is not None:
            self._aggregator.close()  # local: the other cells are not to wait for this one
        if kind is None and self._over_files is not None:
            self._export(self._over_files)
        elif kind is None:
            with self._step_timer.paused():
                failure = self._finish() or self._find_uncounted()
            if self._is_own:
                self.aggregator.close()  # collective: also where a round was rejected
            if failure is not None:
                raise failure

    def join(self) -> None:
        """Take over the model of an elastic federation, unless this was done since the block was entered or resumed.

        Collective over the cell; waits for the other cells' next round. The first forward pass does it by itself.
        """
        if self._has_joined:
            return
        self._has_joined = True
        self.meetings += 1
        client = self._config.client
        try:
            with self._step_timer.paused():
                self._elastic.join(None if client is None else client.before_round, is_stopping=self.is_stopping)
        except MeetingLeft:
            self._has_joined = False
            if self.before_final_rounds is not None:
                self.before_final_rounds()
            raise
        if client is not None:
            client.after_round(is_dropped=False)
        self._forget_replaced()
        self._since, self._target = 0, self._next_target(self.aggregator.rounds)

    def step(self) -> None:
        """Count a local step in a loop that no optimizer counts for: this object was made with ``optimizer=None``.

        Call it on every rank once after each local step, when the parameters have changed, and outside of the backward
        pass. A round that is due takes place in it, over the world.

        :raises StateError: outside the ``with`` block, or where optimizers were given: they count by themselves.
        :raises ConfigError: in a backward pass.
        """
        if self._optimizers:
            raise StateError(
                "a call of the last optimizer's step counts a local step already; leave scaling.step() out, or give "
                "optimizer=None"
            )
        if not self._is_entered:
            raise StateError("local steps are counted in the with block; enter it first")
        check_outside_backward("scaling.step() was called")
        if self._aggregator is not None:
            self._aggregator.check()
        self.start_deferred()
        self._after_local_step(1.0)

    def start_deferred(self) -> bool:
        """Start the delayed round that was held back, if any; tell whether there was one. On all ranks of a cell."""
        if not self._delayed.is_deferred:
            return False
        self._delayed.is_deferred = False
        with self._step_timer.paused():
            self._start()
        return True

    def settle(self) -> None:
        """Merge the round that is under way, if any: before a checkpoint is written in the middle of a delay.

        Call it on every rank, after the same number of steps within a cell.
        """
        if not self._delayed.is_under_way:
            return
        snapshot, report = self._delayed.merge()
        if report is None:
            self._put_back(snapshot)
        else:
            self._finish_round(snapshot, report)

    def discard(self) -> None:
        """Drop the round that is under way, if any: where other weights are loaded into the model without a state.

        Call it on every rank. It waits for the round; the next one takes in what this one had taken.
        """
        self._delayed.discard()
        self._doubted = None

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs beside the model and the optimizers; local, each rank saves its own.

        That is the aggregator's and the client's state, the steps since the last round, and how many follow. Call it
        between two steps, or from ``on_round``.

        :return: Numbers, texts and copies of tensors.
        :raises StateError: while a round is under way; :meth:`settle` it first.
        """
        client = self._config.client
        return {
            "aggregator": None if self._over_files is not None else self.aggregator.state_dict(),
            "client": None if client is None else client.state_dict(),
            "ledger": self._tracker.state_dict(self._doubted),
            "effort": self._normalized_steps.state_dict(),
            "start": None if self._over_files is None else self._over_files.start,
            "since": self._since,
            "target": self._target,
            "total_weight": self._weight_taken,
            "report": None if self._report is None else asdict(self._report),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned, on all ranks, in the ``with`` block, after loading the model.

        The rounds go on as if they had not stopped, one under way is dropped; another schedule holds from the next on.

        :param state: The saved state, of this rank.
        :raises StateError: outside the ``with`` block.
        :raises CheckpointError: if it is that of another set-up.
        """
        if not self._is_entered:
            raise StateError("the state is loaded into what entering the with block makes; enter it first")
        client = self._config.client
        if (client is None) != (state["client"] is None):
            raise CheckpointError(
                f"the state was saved {'without a' if state['client'] is None else 'with a'} client, and now it is "
                f"{client}; resume with the same client"
            )
        if (self._over_files is not None) != (state["aggregator"] is None):
            raise CheckpointError(
                "the state was saved in a job of other rounds (over files, or over a network); resume with the same"
            )
        if self._over_files is None:
            self.aggregator.load_state_dict(state["aggregator"])  # drops a round under way
        self._has_joined, self._doubted = False, None
        self._delayed = _DelayedRound(self._config, self._tracker)
        if client is not None:
            client.load_state_dict(state["client"])
        # What was made before this job's global model is in it.
        if self._over_files is None or state["start"] == self._over_files.start:
            self._tracker.load_state_dict(state["ledger"])
        self._normalized_steps.load_state_dict(state["effort"])
        self._since = int(state["since"])
        self._target = int(state["target"]) if self._over_files is None else sys.maxsize
        self._weight_taken = float(state.get("total_weight", 0.0))  # older checkpoints do not tell
        # Saved in on_round after a merge, just before the next round was to start.
        self._delayed.is_deferred = self._config.delay > 0 and self._since >= self._target
        report = state["report"]
        kind = ElasticRoundReport if report is not None and "membership" in report else RoundReport
        self._report = None if report is None else kind(**report)
        self._note_start()

    def _note_start(self) -> None:
        """Note what the model is before the first step."""
        self._first_rounds = 0 if self._aggregator is None else self._aggregator.rounds
        self._first_digest = digest_of(self._model)

    def _find_uncounted(self) -> XfflError | None:
        """Return an error where the model was trained and no rank has counted a step; collective over the world.

        A step that a rank has counted has led to a round by now, which all ranks know of.
        """
        if self._aggregator is not None and self._aggregator.rounds > self._first_rounds:
            return None
        advice = "With optimizer=None call scaling.step() after each local step"
        if self._optimizers:
            advice = (
                "The step() of the optimizers that were given was never called; give those whose step() trains the "
                "model, or, where none is called (as in SAM, or in fused backward passes), give optimizer=None and "
                "call scaling.step() after each local step"
            )
        try:
            with run_on_all_ranks("parameters that no step has changed"):
                if digest_of(self._model) != self._first_digest:
                    raise StateError(
                        "parameters have changed in the block, but no local step was counted, so there was no round "
                        f"and each cell has a model of its own. {advice}"
                    )
        except XfflError as error:
            return error
        return None

    def _export(self, over_files: FileRound) -> None:
        """Export what the steps since the start have made for a round over files; collective over the world."""
        self._tracker.add_effort(self._normalized_steps.of_step())
        if not self._tracker.is_waiting(0) and (failure := self._find_uncounted()) is not None:
            raise failure
        with run_on_all_ranks(
            "weights", convert=lambda error: RoundError(f"the weight cannot be read: {type(error).__name__}: {error}")
        ):
            if self._weight is not None:
                self._tracker.add_count(checked_weight(self._weight))
        weight = 0.0 if not self._tracker.is_waiting(0) else None if self._weight is None else self._tracker.count(0)
        over_files.end(weight, self._tracker.effort(0))
        self._tracker.commit(self._tracker.snapshot(0))

    def _next_target(self, rounds: int) -> int:
        """Return how many local steps this cell makes until the next round; with rounds over files there is none."""
        has_none = self._over_files is not None
        return sys.maxsize if has_none else self._config.local_steps(rounds, self._cell, self._report)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        outer = enclosing_calls()
        if any(one is optimizer for one in outer):
            return  # super().step(): a part of the step that has begun
        check_outside_backward(f"optimizer {type(optimizer).__name__} makes a step")
        if self._aggregator is not None:
            self._aggregator.check()
        check_apart(optimizer, [one for one in outer if any(one is other for other in self._optimizers)])
        self.start_deferred()
        self._tracker.note_change()  # even by a step that raises on its way
        self._normalized_steps.before_step(optimizer)
        if self._config.client is not None:
            check_step(optimizer, args, kwargs)
            self._config.client.before_step(optimizer)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if any(one is optimizer for one in enclosing_calls()):
            return
        factors = self._normalized_steps.after_step(optimizer)
        if self._config.client is not None:
            self._config.client.after_step(optimizer, factors)
        if optimizer is self._optimizers[-1]:
            self._after_local_step(self._normalized_steps.of_step())

    def _after_local_step(self, effort: float) -> None:
        self._since += 1
        self.local_steps += 1
        self._tracker.add_step(effort)
        self._step_timer.add_step()
        is_due = self._since >= self._target
        if is_due or self._delayed.is_due(self._since):
            with self._step_timer.paused():
                self.settle()  # first: an aggregator has one round at a time
                if is_due and not self._config.delay:
                    self._round()
                elif is_due and self.defer_start:
                    self._delayed.is_deferred = True
                elif is_due:
                    self._start()

    def _start(self) -> None:
        """Start a round that is merged some steps later."""
        self.meetings += 1
        weigh = None if self._weight is None else self._count
        if self._state.elastic is None or not self._open_elastic():
            self._delayed.start(self.aggregator, weigh, self._step_timer.step_seconds)
        self._step_timer.clear()
        self._since, self._target = 0, self._next_target(self.aggregator.rounds + 1)

    def _finish(self) -> XfflError | None:
        """Answer the other cells' rounds until all have finished; return what the first rejected round raised."""
        # Optimizers may have stepped after the last local step.
        self._tracker.add_effort(self._normalized_steps.of_step())
        rejected: XfflError | None = None
        is_last = False
        while not is_last:
            if not self.is_under_way and self.before_final_rounds is not None:
                self.before_final_rounds()
            try:
                if self.is_under_way:
                    self.settle()
                else:
                    # After a rejected round this rank has finished whatever waits: else the next may be rejected, too.
                    is_last = self._round(is_finishing=True, gives_up=rejected is not None)
            except XfflError as error:
                if not self.aggregator.can_go_on:
                    raise
                rejected = rejected or error
        return rejected

    def _round(self, *, is_finishing: bool = False, gives_up: bool = False) -> bool:
        """Participate in a round; tell whether it was the last."""
        self.meetings += 1
        fragment = self.aggregator.next_fragment
        least = self._config.schedule.least_divergence(self.aggregator.rounds)
        given = self._round_input(is_finishing=is_finishing, gives_up=gives_up)
        if self._state.elastic is None:
            report = self.aggregator.participate(given, least_divergence=least)
        else:
            try:
                report = self._elastic_round(
                    given, is_finishing=is_finishing, gives_up=gives_up, least_divergence=least
                )
            except MeetingLeft:
                return False  # its steps wait for the next round, also in a checkpoint
        # After the round: one that raises has taken nothing. Cells that may be lost learn then which part it was of.
        snapshot = self._tracker.snapshot(fragment if report is None else report.fragment)
        if report is None:
            return True
        self._step_timer.clear()
        self._finish_round(snapshot, report)
        return report.is_last

    def _round_input(self, *, is_finishing: bool, gives_up: bool) -> RoundInput:
        """Return what this rank gives to the next round."""
        fragment, client = self.aggregator.next_fragment, self._config.client
        return RoundInput(
            None if self._weight is None else self._count,
            is_absent=not self._tracker.is_waiting(fragment),
            is_finished=is_finishing and (gives_up or not self._tracker.has_others(fragment)),
            steps=self._tracker.effort(fragment),
            seconds=self._step_timer.step_seconds,
            prepare=None if client is None else client.before_round,
        )

    def _elastic_round(
        self, given: RoundInput, *, is_finishing: bool, gives_up: bool, least_divergence: float | None
    ) -> RoundReport | None:
        """Make a round of an elastic federation, with the cells that are there, until one is taken."""
        while True:
            self._take_up(self._meet(is_finished=given.is_finished))
            # The round before may only now be known to be taken: its steps have counted.
            given = self._round_input(is_finishing=is_finishing, gives_up=gives_up)
            try:
                report: RoundReport | None = self._elastic.participate(given, least_divergence=least_divergence)
                return report
            except RoundBroken:
                self._put_back(self._tracker.snapshot(self._elastic.next_fragment))

    def _open_elastic(self) -> bool:
        """Meet the other cells for a delayed round; tell whether there is none, since this cell only catches up."""
        try:
            self._take_up(self._meet())
        except MeetingLeft:
            return True
        if not self._elastic.is_behind:
            return False
        try:
            report = self._elastic.participate(RoundInput(is_absent=True))
        except RoundBroken:
            self._put_back(self._tracker.snapshot(self._elastic.next_fragment))
        else:
            self._finish_round(self._tracker.snapshot(report.fragment), report)
        return True

    def _meet(self, *, is_finished: bool = False) -> Any:
        told = self.tell and self.tell()
        return self._elastic.open(is_finished=is_finished, told=told, is_stopping=self.is_stopping)

    def _take_up(self, report: RoundReport | None) -> None:
        """End a doubt: the round before was taken, as its report says, or there was none."""
        snapshot, self._doubted = self._doubted, None
        if report is not None:
            assert snapshot is not None, "kept while the round is in doubt"
            self._finish_round(snapshot, report)
        elif snapshot is not None:
            self._tracker.rollback(snapshot)

    def _put_back(self, snapshot: Snapshot) -> None:
        """Let steps wait for the next round that the last one has not taken, or keep them as long as it is in doubt."""
        if self._elastic.is_in_doubt:
            self._doubted = snapshot
        else:
            self._tracker.rollback(snapshot)

    def _finish_round(self, snapshot: Snapshot, report: RoundReport) -> None:
        """Update the counters after a round, or a check that skipped it, and tell of it."""
        self._report = report
        if report.is_skipped:
            self._tracker.rollback(snapshot)
        else:
            self._tracker.commit(snapshot)
        self._forget_replaced()
        if not self._config.delay:
            self._since, self._target = 0, self._next_target(self.aggregator.rounds)
        self._notify(report)

    def _forget_replaced(self) -> None:
        """Forget the steps of a model that a round has replaced, in a cell of an elastic federation that was away."""
        if getattr(self.aggregator, "has_taken_over", False):
            if self._weight is not None:
                self._weight()  # what it counted is gone
            self._tracker = ContributionTracker(self.aggregator.fragments)
            self._delayed = _DelayedRound(self._config, self._tracker)

    def _notify(self, report: RoundReport) -> None:
        """Tell the client and ``on_round`` of a round whose weights stand, or of a check that skipped it."""
        self._weight_taken += report.weight_taken
        if self._config.client is not None and not report.is_skipped:
            self._config.client.after_round(is_dropped=self._cell in report.dropped)
        if self._on_round is not None and any(report.weights):
            self._on_round(report)

    def _count(self) -> float:
        """Return the count since the last round of the fragment that the next round moves."""
        assert self._weight is not None, "asked for only where there is one"
        self._tracker.add_count(checked_weight(self._weight))
        return self._tracker.count(self.aggregator.next_fragment)


class _DelayedRound:
    """The round that goes on while a cell makes local steps: none, one held back until the next step, or one under way.

    A round under way has a snapshot of what it took from the tracker. Merged, it gives both to the caller; rejected or
    discarded, it lets the tracker roll the snapshot back.
    """

    def __init__(self, config: RoundConfig, tracker: ContributionTracker) -> None:
        self._delay, self._alpha, self._tracker = config.delay, config.alpha, tracker
        self._under_way: (
            tuple[Aggregator | Levels | ElasticAggregator, PendingRound | ElasticRound, Snapshot] | None
        ) = None
        self.is_deferred = False

    @property
    def is_under_way(self) -> bool:
        return self._under_way is not None

    def is_due(self, steps: int) -> bool:
        """Tell whether a round under way is to be merged, so many local steps after its start."""
        return self._under_way is not None and steps == self._delay

    def start(
        self,
        aggregator: Aggregator | Levels | ElasticAggregator,
        weigh: Callable[[], float] | None,
        step_seconds: float,
    ) -> None:
        fragment = aggregator.next_fragment
        steps = self._tracker.effort(fragment)
        pending = aggregator.aggregate_async(weigh, alpha=self._alpha, steps=steps, seconds=step_seconds)
        self._under_way = aggregator, pending, self._tracker.snapshot(fragment)

    def merge(self) -> tuple[Snapshot, RoundReport | None]:
        """Merge the round; without a report, it is one of an elastic federation that was lost."""
        assert self._under_way is not None, "the caller has asked"
        aggregator, pending, snapshot = self._under_way
        try:
            # Where no step was made meanwhile, nothing local is to stay.
            report = pending.merge(keeps_steps=self._tracker.is_waiting(snapshot.fragment))
        except XfflError as error:
            if isinstance(error, RoundBroken) and not isinstance(aggregator, Aggregator | Levels):
                return snapshot, None
            self._tracker.rollback(snapshot)
            raise
        finally:
            if aggregator.under_way is not pending:  # else the wait was interrupted: another merge() takes it up again
                self._under_way = None
        return snapshot, report

    def discard(self) -> None:
        if self._under_way is not None:
            aggregator, _, snapshot = self._under_way
            aggregator.discard()  # waits; interrupted, the round is still under way
            self._tracker.rollback(snapshot)
            self._under_way = None
