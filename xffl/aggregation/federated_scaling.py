"""Rounds in a training loop that the caller owns."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from xffl.aggregation.aggregator import Aggregator
from xffl.aggregation.algorithms.clients import Client
from xffl.aggregation.algorithms.every_steps import Schedule
from xffl.aggregation.engine.decision.inconsistent import INCONSISTENT_MARK, refuse_inconsistent
from xffl.aggregation.engine.setup import check_given
from xffl.aggregation.federations.hierarchical import Levels
from xffl.aggregation.report import ElasticRoundReport, RoundReport
from xffl.aggregation.rounds.choose import choose_rounds
from xffl.aggregation.rounds.config import RoundArguments, check_stepped, parse_round_config
from xffl.aggregation.rounds.former_attributes import FormerAttribute
from xffl.aggregation.rounds.loop_hooks import NO_HOOKS, LoopHooks, check_hooks
from xffl.aggregation.rounds.offer import Averaged, FinalOffer, Outcome, RoundOffer, StepLedger
from xffl.aggregation.rounds.uncounted import CountingCheck
from xffl.aggregation.steps.backward_steps import backward_error
from xffl.aggregation.steps.client_steps import ClientSteps, MomentumSteps
from xffl.aggregation.steps.nested_steps import outermost
from xffl.aggregation.steps.stale_gradients import StaleGradients
from xffl.aggregation.steps.step_observers import StepObserver, are_plain, may_be_wrapped, needs_following
from xffl.aggregation.steps.wrapped_optimizers import StepHook, steps_may_nest
from xffl.checks import integer
from xffl.compat.pytorch import is_in_backward
from xffl.distributed.agreement.consistency import run_on_all_ranks
from xffl.distributed.distributed_state import DistributedState, cell_world_of
from xffl.distributed.values.sharding import without_wrappers
from xffl.errors import CheckpointError, ConfigError, StateError, XfflError

if TYPE_CHECKING:
    from xffl.aggregation.federations.elastic import ElasticAggregator
    from xffl.aggregation.steps.weight_copies import CopyWatch

__all__ = ["FederatedScaling"]


NO_CELLS = (
    "xffl: FederatedScaling has no effect: the job has a single cell, so nothing is averaged between cells; give sizes "
    "or a rule, such as --federated 4,4"
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
    :param moments: What rounds do with what the optimizers keep beside the parameters: ``local`` (nothing),
        ``average`` their mean with the parameters' (``average:exp_avg=3,exp_avg_sq=6``: in each third and each sixth
        round), or ``reset`` it. See :class:`~xffl.aggregation.algorithms.moments.Moments`.
    :param algorithm: An algorithm's name, with options: keywords for the aggregator and for here, which hold where
        nothing is given.
    :param hooks: What the loop wants to be asked by its rounds (:class:`xffl.aggregation.LoopHooks`).
    :raises ConfigError: if an argument is invalid or differs between ranks, or the aggregator is another model's; on
        all ranks alike.

    ``meetings`` are the rounds and checks that this rank has entered, ``local_steps`` the local steps that it has made.
    """

    before_final_rounds = FormerAttribute("before_final_rounds")
    tell = FormerAttribute("tell")
    is_stopping = FormerAttribute("is_stopping")
    defer_start = FormerAttribute("defers_start")

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
        moments: str | Mapping[str, Any] | None = None,
        algorithm: str | Mapping[str, Any] | None = None,
        hooks: LoopHooks | None = None,
    ) -> None:
        optimizers = None if optimizer is None else list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
        with run_on_all_ranks(
            "steps between rounds (every), clients, and ways to weigh and merge",
            convert=lambda error: ConfigError(f"the arguments cannot be read: {type(error).__name__}: {error}"),
            group=state.job_group if isinstance(state, DistributedState) else None,
        ) as tell:
            check_given(model, state)
            if hooks is not None:
                check_hooks(hooks)
            asked = RoundArguments(
                every,
                aggregator=aggregator,
                delay=delay,
                alpha=alpha,
                client=client,
                algorithm=algorithm,
                moments=moments,
            )
            cell, cells = state.cell, state.cells
            config = parse_round_config(model, optimizers, asked, cells=cells, weight=weight)
            tell(f"{config}, weighed={weight is not None}")
            rounds = choose_rounds(model, state, config, asked)
        is_alone = state.topology.cells == 1 and not state.is_federated_scaling_setup() and cell_world_of(state) is None
        if is_alone and state.is_first_of_job:
            print(NO_CELLS, file=sys.stderr, flush=True)  # a federation of one cell was reported at its set-up
        self.meetings = 0
        """The rounds and checks that this rank has entered."""
        self.local_steps = 0
        """The local steps that this rank has made."""
        self._model = model
        """The model that trains."""
        self._bare_model = without_wrappers(model)
        """The same without wrappers: it has the mark of an inconsistent model."""
        self._config = config
        """When there are rounds, and what the cells do in between."""
        self._cell = cell
        """The cell of this rank."""
        self._rounds = rounds
        """What makes the rounds."""
        self._hooks = NO_HOOKS if hooks is None else hooks
        """What the loop wants to be asked."""
        self._on_round = on_round
        """Whom the caller wants to be told of each round."""
        self._ledger = StepLedger(model, config.optimizers, weight)
        """What local steps have made that no round has taken in yet."""
        self._countdown = Countdown(config.schedule, cell, is_endless=not rounds.meets_others)
        """How far the next round is."""
        self._counting = CountingCheck(model, has_optimizers=bool(config.optimizers))
        """Whether the loop trains without counting its steps."""
        self._offer = self._make_offer()
        """What this rank gives to each round between local steps."""
        self._is_deferred = False
        """Whether a delayed round starts before the next step."""
        self._is_entered = False
        """Whether the ``with`` block is entered."""
        self._step_hooks: tuple[StepHook, StepHook] = (self._before_step, self._after_step)
        """What is called before and after each step of an optimizer."""
        if rounds.may_join:
            self._step_hooks = self._make_joining_hooks()
        self._handles: list[RemovableHandle] = []
        """The hooks of optimizers and model, while the block is entered."""
        takes_copies = config.moments is not None and config.moments.mode == "average"
        self._tells_copies = state.is_first_of_job and rounds.may_average and not takes_copies
        """Whether this rank says what rounds do not average."""
        self._observers: tuple[StepObserver, ...] = ()
        """What features do at each step, while the block is entered."""
        self._state_of_cells = state if state.topology.cells > 1 else None
        """The state, in a world of several cells: a framework's own wrapper would reach beyond one of them."""
        self._copy_watch: CopyWatch | None = None
        """Looks for what rounds do not average, in the first steps and at the end."""
        self._effort_of_step: Callable[[], float] | None = None
        """Returns the effective number of the local step that was made last; ``None`` where each step counts 1."""
        self._activity = state.activity
        """What the run has done."""
        self._entry = state.activity.expect_entry(self) if state.is_first_of_job else None
        """Expects the block, which somebody may have forgotten."""

    def attach(self, hooks: LoopHooks) -> None:
        """Ask a loop these, too, which take the place of earlier ones of their names; local, before the first step.

        :param hooks: What the loop wants to be asked.
        """
        check_hooks(hooks)
        self._hooks = self._hooks.joined_with(hooks)
        self._offer = self._make_offer()

    @property
    def aggregator(self) -> Aggregator | Levels | ElasticAggregator:
        """The aggregator that runs the rounds.

        :raises StateError: outside the ``with`` block, if none was given.
        """
        return self._rounds.aggregator

    @property
    def lineage(self) -> str:
        """Digest of the rounds behind this cell's model, in an elastic federation, in the block; elsewhere empty."""
        return self._rounds.lineage

    @property
    def steps_left(self) -> int:
        """How many local steps this rank makes before it enters the next round."""
        return self._countdown.steps_left

    @property
    def total_weight(self) -> float:
        """Sum of the weights that all cells had in all rounds so far; the same on all ranks that have just made one.

        Where ``weight`` counts samples, on how many the model was trained in all cells. With fragments each round
        counts for its part of the model. A cell of an elastic federation that takes the model over takes this, too.
        With levels only the rounds of this facility's lowest one are known.
        """
        return self._rounds.total_weight

    @property
    def is_under_way(self) -> bool:
        """Whether a round was started and is not merged."""
        return self._rounds.is_under_way

    def __enter__(self) -> FederatedScaling:
        if self._is_entered:
            raise StateError("this FederatedScaling is already entered; make one for each with block")
        if self._entry is not None:
            self._entry.detach()
        with run_on_all_ranks("optimizers"):
            if self._config.optimizers:  # parameters may have been replaced since this was made; rounds notice it later
                check_stepped(self._model, self._config.optimizers)
        self._rounds.open()
        self._ledger.clear(self._rounds.fragments)
        self._is_deferred = False
        self._countdown.restart(self._rounds.rounds)
        self._counting.note_start(self._rounds.rounds)
        self._is_entered = True
        self._activity.pause_watch()
        self._observers = self._make_observers()
        hooks: tuple[StepHook, ...] = self._step_hooks
        if not are_plain(self._config.optimizers) and steps_may_nest(self._config.optimizers):
            hooks = tuple(outermost(hook, self._config.optimizers) for hook in hooks)
        # Hooks stay outside of a step that is compiled.
        before, after = map(torch.compiler.disable, hooks)
        for optimizer in self._config.optimizers:
            self._handles.append(optimizer.register_step_pre_hook(before))
            self._handles.append(optimizer.register_step_post_hook(after))
        if self._rounds.needs_join and not self._joins_later():
            try:
                self._join(is_entering=True)
            except BaseException as error:
                self._take_off_hooks()
                self._rounds.close(error)
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._take_off_hooks()  # first: what follows may raise, and the optimizers live on
        failure: XfflError | None = None
        if kind is None and self._rounds.meets_others:
            with self._ledger.timer.paused():
                failure = self._finish() or self._find_uncounted()
        elif kind is None:
            self._ledger.add_rest()
            self._conclude(self._rounds.round(self._offer))
        self._rounds.close(error)  # collective without an error: also where a round was rejected
        if self._copy_watch is not None:
            for optimizer in self._config.optimizers:
                self._copy_watch.after_step(optimizer)
        if failure is not None:
            raise failure

    def _take_off_hooks(self) -> None:
        """Leave the block, on this rank, as far as the optimizers are concerned."""
        while self._handles:
            self._handles.pop().remove()
        self._is_entered = False
        self._activity.resume_watch(has_step=self.local_steps > 0)

    def join(self) -> bool:
        """Take over the model of an elastic federation, unless this was done since the block was entered or resumed.

        Collective over the cell; waits for the other cells' next round. Elsewhere it does nothing. Entering the block
        does it by itself, unless this cell has been in the run before: then it may load a checkpoint in the block, and
        joins at its first local step at the latest. Call this after loading, so that no step is made for nothing.
        Steps that wait in a checkpoint of the newest round count in the round in which the cell joins.

        :return: Whether steps are lost that no round had taken in: the other cells' mean has replaced all of the model.
        """
        if not self._rounds.needs_join:
            return False
        return self._join().has_lost_all

    def _joins_later(self) -> bool:
        """Tell whether this cell may still load what it joins the others with."""
        defers_join = self._hooks.defers_join
        return self._rounds.may_resume or (defers_join is not None and defers_join())

    def _join(self, *, is_entering: bool = False) -> _Joined:
        """Join the other cells of an elastic federation; collective over the cell.

        Where the block is being entered there are no steps to forget, and the caller is not asked for their weight.
        """
        is_resumed = self._rounds.rounds > 0
        is_replaced = False
        has_lost_all = False
        self.meetings += 1
        with self._ledger.timer.paused():
            for outcome in self._rounds.join(self._offer):
                # A model that is handed over may be this cell's, with its steps.
                has_lost_steps = outcome.has_values and any(map(self._offer.is_waiting, outcome.taken_over))
                if outcome.report is not None:
                    self._conclude((outcome,), is_joining=True)
                else:
                    self._tell_joined(outcome, is_dropped=has_lost_steps or not outcome.has_values)
                    if outcome.taken_over and not is_entering:
                        self._forget_steps(outcome.taken_over)
                # In the first round of all nothing is averaged, and the model of one cell stays as it is.
                is_replaced |= bool(outcome.taken_over) or (is_resumed and isinstance(outcome, Averaged))
                has_lost_all |= has_lost_steps and len(outcome.taken_over) == self._rounds.fragments
        self._countdown.restart(self._rounds.rounds)
        self._is_deferred = False  # the other cells begin their next round when so many steps are made
        return _Joined(is_replaced=is_replaced, has_lost_all=has_lost_all)

    def _tell_joined(self, outcome: Outcome, *, is_dropped: bool) -> None:
        """Tell the client of a round to which this cell gave no steps when it joined the others."""
        if self._config.client is not None and outcome.is_written:
            self._config.client.after_round(is_dropped=is_dropped)

    def step(self) -> None:
        """Count a local step in a loop that no optimizer counts for: this object was made with ``optimizer=None``.

        Call it on every rank once after each local step, when the parameters have changed, and outside of the backward
        pass. A round that is due takes place in it, over the world.

        :raises StateError: outside the ``with`` block, or where optimizers were given: they count by themselves.
        :raises ConfigError: in a backward pass.
        """
        if self._config.optimizers:
            raise StateError(
                "a call of the last optimizer's step counts a local step already; leave scaling.step() out, or give "
                "optimizer=None"
            )
        if not self._is_entered:
            raise StateError("local steps are counted in the with block; enter it first")
        self._check_step("scaling.step() was called")
        if self._rounds.needs_join and self._join().is_replaced:
            self._forget_uncounted()
            return  # the step was made on the model that was replaced
        self.start_deferred()
        self._after_local_step(1.0)

    def start_deferred(self) -> bool:
        """Start the delayed round that was held back, if any; tell whether there was one. On all ranks of a cell."""
        if not self._is_deferred:
            return False
        self._is_deferred = False
        with self._ledger.timer.paused():
            self._start()
        return True

    def settle(self) -> None:
        """Merge the round that is under way, if any: before a checkpoint is written in the middle of a delay.

        Call it on every rank, after the same number of steps within a cell.
        """
        self._conclude(self._rounds.settle())

    def discard(self) -> None:
        """Drop the round that is under way, if any: where other weights are loaded into the model without a state.

        Call it on every rank. It waits for the round; the next one takes in what this one had taken.
        """
        self._rounds.discard()

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs beside the model and the optimizers; local, each rank saves its own.

        That is the aggregator's and the client's state, the steps since the last round, and how many follow. Call it
        between two steps, or from ``on_round``.

        :return: Numbers, texts and copies of tensors.
        :raises StateError: while a round is under way; :meth:`settle` it first.
        """
        rounds, client, report = self._rounds.state_dict(), self._config.client, self._countdown.report
        return {
            "aggregator": rounds["aggregator"],
            "client": None if client is None else client.state_dict(),
            "ledger": self._ledger.tracker.state_dict(self._rounds.doubted),
            "effort": self._ledger.normalized_steps.state_dict(),
            "start": rounds["start"],
            "since": self._countdown.since,
            "target": self._countdown.target,
            "total_weight": rounds["total_weight"],
            "report": None if report is None else asdict(report),
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
        self._rounds.load_state_dict(state)  # drops a round under way
        if client is not None:
            client.load_state_dict(state["client"])
        if self._rounds.continues(state):
            self._ledger.tracker.load_state_dict(state["ledger"])
        self._ledger.normalized_steps.load_state_dict(state["effort"])
        self._countdown.load(state)
        # Saved in on_round after a merge, just before the next round was to start.
        self._is_deferred = self._config.delay > 0 and self._countdown.is_due
        self._counting.note_start(self._rounds.rounds)

    def _make_observers(self) -> tuple[StepObserver, ...]:
        """Return what features do at each step; nothing after the first round, without clients and momentum."""
        observers: list[StepObserver] = []
        self._effort_of_step = None
        if self._config.client is not None:
            observers.append(ClientSteps(self._config.client, self._ledger.normalized_steps))
            self._effort_of_step = self._ledger.normalized_steps.of_step
        elif needs_following(self._config.optimizers):
            observers.append(MomentumSteps(self._ledger.normalized_steps))
            self._effort_of_step = self._ledger.normalized_steps.of_step
        if self._tells_copies and not are_plain(self._config.optimizers):
            from xffl.aggregation.steps.weight_copies import CopyWatch, tell_swaps

            tell_swaps(self._config.optimizers)
            self._copy_watch = CopyWatch()
            observers.append(self._copy_watch)
        if self._state_of_cells is not None and may_be_wrapped(self._bare_model):
            from xffl.aggregation.steps.ddp_over_cells import WrapperWatch

            wrapper_watch = WrapperWatch(self._bare_model, self._state_of_cells)
            self._handles.append(wrapper_watch.handle)
            observers.append(wrapper_watch)
        return tuple(observers)

    def _check_step(self, what: str) -> None:
        """Raise where no step may be made now."""
        if is_in_backward():
            raise backward_error(what)
        if hasattr(self._bare_model, INCONSISTENT_MARK):
            refuse_inconsistent(self._bare_model)

    def _make_joining_hooks(self) -> tuple[StepHook, StepHook]:
        """Return the hooks of a cell that joins others before its next step, at the latest.

        Gradients of a model that was replaced meanwhile change nothing, and steps with them do not count.
        """
        stale_gradients = StaleGradients()

        def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            self._check_step(f"optimizer {type(optimizer).__name__} makes a step")
            if self._rounds.needs_join and self._join().is_replaced:
                stale_gradients.note_replaced(self._model, self._config.optimizers)
            if stale_gradients.begin_step(optimizer, args, kwargs):
                self._forget_uncounted()
            else:
                self._before_step(optimizer, args, kwargs)

        def after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if not stale_gradients.end_step(optimizer):
                self._after_step(optimizer, args, kwargs)

        return before_step, after_step

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._check_step(f"optimizer {type(optimizer).__name__} makes a step")
        if self._is_deferred:
            self.start_deferred()
        self._ledger.tracker.note_change()  # even by a step that raises on its way
        for observer in self._observers:
            observer.before_step(optimizer, args, kwargs)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for observer in self._observers:
            observer.after_step(optimizer)
        if optimizer is self._config.optimizers[-1]:
            self._after_local_step(1.0 if self._effort_of_step is None else self._effort_of_step())

    def _after_local_step(self, effort: float) -> None:
        self.local_steps += 1
        self._countdown.since += 1
        self._ledger.tracker.add_step(effort)
        self._ledger.timer.steps += 1
        if self._config.delay:
            self._follow_delayed_round()
        elif self._countdown.is_due:
            with self._ledger.timer.paused():
                self._round(self._offer)

    def _follow_delayed_round(self) -> None:
        """Merge the round that is under way, and start the next one, if it is time."""
        is_due = self._countdown.is_due
        is_merged = self.is_under_way and self._countdown.since == self._config.delay
        if is_due or is_merged:
            with self._ledger.timer.paused():
                self.settle()  # first: an aggregator has one round at a time
                if is_due and self._hooks.defers_start is not None and self._hooks.defers_start():
                    self._is_deferred = True
                elif is_due:
                    self._start()

    def _make_offer(self) -> RoundOffer:
        """Return what this rank gives to each round while it makes local steps."""
        return RoundOffer(self._ledger, self._config, self._hooks, self._check_counted)

    def _round(self, offer: RoundOffer) -> Outcome | None:
        """Participate in a round; return what became of it, ``None`` if this cell was asked to stop before it."""
        self.meetings += 1
        return self._conclude(self._rounds.round(offer))

    def _start(self) -> None:
        """Start a round that is merged some steps later."""
        self.meetings += 1
        is_replaced = False
        for outcome in self._rounds.start(self._offer):
            # A cell that is behind takes the model over in the round's place.
            is_replaced = bool(outcome.taken_over)
            self._conclude((outcome,), is_joining=is_replaced)
        self._ledger.timer.clear()
        if self.is_under_way or not is_replaced:
            self._countdown.restart(self._rounds.rounds + 1)

    def _finish(self) -> XfflError | None:
        """Answer the other cells' rounds until all have finished; return what the first rejected round raised."""
        # Optimizers may have stepped after the last local step.
        self._ledger.add_rest()
        rejected: XfflError | None = None
        is_last = False
        is_left = False
        while not is_last:
            if not self.is_under_way and self._hooks.before_final_rounds is not None:
                self._hooks.before_final_rounds()
            if is_left:
                break
            try:
                if self.is_under_way:
                    self.settle()
                else:
                    # After a rejected round this rank has finished whatever waits: else the next may be rejected, too.
                    gives_up = rejected is not None
                    offer = FinalOffer(self._ledger, self._config, self._hooks, self._check_counted, gives_up=gives_up)
                    outcome = self._round(offer)
                    is_last = outcome is not None and outcome.is_last
                    is_left = outcome is None
            except XfflError as error:
                if not self._rounds.can_go_on:
                    raise
                rejected = rejected or error
        return rejected

    def _conclude(self, outcomes: Iterable[Outcome], *, is_joining: bool = False) -> Outcome | None:
        """Account for rounds, and checks that skipped one, as they end; return the last one.

        Steps to the next round are counted from here, unless a delayed one has counted them since it started: a cell
        that is joining, also again since it was behind, has waited for it.
        """
        last: Outcome | None = None
        for outcome in outcomes:
            last = outcome
            report = outcome.report
            taken = outcome.taken
            if report is None or taken is None:
                continue
            if outcome.has_values:
                self._countdown.report = report
            if outcome.counts:
                self._ledger.tracker.commit(taken)
            else:
                self._ledger.tracker.rollback(taken)
            if outcome.taken_over:
                self._forget_steps(outcome.taken_over)
            if is_joining or not self._config.delay:
                self._countdown.restart(self._rounds.rounds)
            if outcome.is_written and self._observers:
                has_lost_steps = bool(outcome.taken_over) and taken.has_steps
                is_left_out = self._cell in report.dropped or not outcome.has_values
                self._tell_observers(is_dropped=has_lost_steps or is_left_out)
            if self._on_round is not None and any(report.weights):
                self._on_round(report)
        return last

    def _tell_observers(self, *, is_dropped: bool) -> None:
        for observer in self._observers:
            observer.after_round(is_dropped=is_dropped)
        self._observers = tuple(observer for observer in self._observers if not observer.is_over)

    def _forget_steps(self, fragments: Collection[int]) -> None:
        """Forget the steps of fragments that the last round has replaced."""
        self._ledger.forget_steps(fragments)
        self._is_deferred = False

    def _forget_uncounted(self) -> None:
        """Forget what the caller has counted for a step that does not count, unless other steps wait with it."""
        fragments = range(self._rounds.fragments)
        self._ledger.forget_steps([fragment for fragment in fragments if not self._offer.is_waiting(fragment)])

    def _check_counted(self) -> None:
        self._counting.check(self._rounds.rounds)

    def _find_uncounted(self) -> XfflError | None:
        """Return an error where the model was trained and no rank has counted a step; collective over the world."""
        try:
            self._check_counted()
        except XfflError as error:
            return error
        return None


@dataclass(frozen=True)
class _Joined:
    """What became of this cell's model when it joined the others."""

    is_replaced: bool
    """Whether it may be another one now"""
    has_lost_all: bool
    """Whether steps are lost that no round had taken in, and with them all of the model"""


class Countdown:
    """The local steps of a cell until its next round, as the schedule says; local.

    :param schedule: Says how many steps.
    :param cell: The cell, which may make more or fewer steps than others.
    :param is_endless: Whether there is no round between local steps.
    """

    def __init__(self, schedule: Schedule, cell: int, *, is_endless: bool) -> None:
        self._schedule = schedule
        self._cell = cell
        self._is_endless = is_endless
        self.since = 0
        """Local steps since the last round."""
        self.target = 0
        """Local steps between the last round and the next one."""
        self.report: RoundReport | None = None
        """What the last round did to which cells gave something, by which a schedule may go."""

    @property
    def steps_left(self) -> int:
        """How many local steps are made before the next round."""
        return self.target - self.since

    @property
    def is_due(self) -> bool:
        """Whether the next round is to be made now."""
        return self.since >= self.target

    def restart(self, rounds: int) -> None:
        """Count anew after so many rounds."""
        self.since = 0
        if self._is_endless:
            self.target = sys.maxsize
            return
        steps = self._schedule.steps(rounds, self._cell, self.report)
        if type(steps) is not int or steps < 1:  # a schedule of the user's own may return anything
            what = f"steps of schedule {self._schedule} for cell {self._cell} after {rounds} rounds"
            steps = integer(what, steps)
        self.target = steps

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a state of :class:`FederatedScaling`."""
        self.since = int(state["since"])
        self.target = sys.maxsize if self._is_endless else int(state["target"])
        report = state["report"]
        kind = ElasticRoundReport if report is not None and "membership" in report else RoundReport
        # States of before have the report of a round to which no cell gave anything, too.
        self.report = None if report is None or not any(report["weights"]) else kind(**report)
