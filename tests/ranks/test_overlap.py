"""Rounds that go on while their caller trains."""

from __future__ import annotations

import copy
import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import xffl
from tests.ranks.test_round import build, check_values, complete, digests, fill, make_state, tensors, weightings
from tests.rounds import replace_exchange
from tests.worlds import run_world
from xffl.aggregation.algorithms.every_steps import Schedule
from xffl.aggregation.algorithms.schedules import PerCell
from xffl.aggregation.engine.planning.transfers import RoundContext
from xffl.aggregation.privacy import Privacy
from xffl.distributed.session import cleanup_distributed_process_group

LAYOUTS = [((1, 1), None), ((3, 1), None), ((2, 2), 1)]


def without_steps(rank: int, world_size: int, sizes: tuple[int, ...], hsdp: int | None) -> None:
    """With no step in between, a delayed mean is the mean."""
    state = make_state(rank, sizes, hsdp)
    assert state.federated_rank is not None
    model = build("shard", "mixed", state)
    weight, weights = weightings(sizes, rank, state.federated_rank)[1]
    for alpha, rails in ((None, False), (0.0, True), (0.25, False)):
        aggregator = xffl.Aggregator(model, state, overlap=True, rails=rails, bucket_bytes=100)
        for number in range(2):
            fill(model, rank, state.federated_rank)
            before = {name: complete(tensor).clone() for name, tensor, _ in tensors(model)}
            pending = aggregator.aggregate_async(weight, alpha=alpha)
            report = pending.merge(keeps_steps=alpha != 0.25)  # with no step made, mixing would only lose the mean
            assert pending.is_done() and report.round == number + 1 and "wait" in report.phases
            check_values(model, before, sizes, weights)


@pytest.mark.parametrize("sizes, hsdp", LAYOUTS, ids=str)
def test_without_steps_a_delayed_mean_is_the_mean(sizes: tuple[int, ...], hsdp: int | None) -> None:
    run_world(sum(sizes), without_steps, sizes, hsdp)


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 4))


def batch(cell: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number * 10 + cell)
    return torch.randn(8, 12, generator=generator), torch.randn(8, 4, generator=generator)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, cell: int, number: int) -> None:
    inputs, targets = batch(cell, number)
    nn.functional.mse_loss(model(inputs), targets).backward()
    optimizer.step()
    optimizer.zero_grad()


def simulated(steps: list[int], every: int, delay: int, alpha: float | None) -> list[list[torch.Tensor]]:
    """Two cells in one process that make as many steps each: start every ``every`` steps, merge ``delay`` later."""
    models = [net() for _ in steps]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.2) for model in models]
    copies: list[list[torch.Tensor]] = []

    def values(model: nn.Module) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in model.parameters()]

    @torch.no_grad()
    def merge(keeps: bool) -> None:
        means = [torch.stack(both).double().mean(0).float() for both in zip(*copies, strict=True)]
        for model, own in zip(models, copies, strict=True):
            for parameter, mean, old in zip(model.parameters(), means, own, strict=True):
                if not keeps:
                    parameter.copy_(mean)
                elif alpha is None:
                    parameter.copy_(mean + (parameter - old))
                else:
                    parameter.copy_(alpha * parameter + (1 - alpha) * mean)

    since = 0
    for number in range(steps[0]):
        for cell, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            step(model, optimizer, cell, number)
        since += 1
        if copies and since == delay:
            merge(keeps=True)
            copies = []
        if since == every:
            copies, since = [values(model) for model in models], 0
    if copies:
        merge(keeps=since > 0)
    if since:
        copies = [values(model) for model in models]
        merge(keeps=False)
    return [values(model) for model in models]


def delayed(
    rank: int, world_size: int, sizes: tuple[int, ...], hsdp: int | None, steps: int, delay: int, alpha: float | None
) -> int:
    """The hooks do what the simulation does, while the cell's own collectives go on beside the round."""
    state = make_state(rank, sizes, hsdp)
    cell = state.federated_rank or 0
    model = xffl.shard(net(), state, wrap=[nn.Linear])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    reports: list[xffl.RoundReport] = []
    scaling = xffl.FederatedScaling(model, optimizer, state, every=4, delay=delay, alpha=alpha, on_round=reports.append)
    with scaling:
        for number in range(steps):
            step(model, optimizer, cell, number)
            dist.all_reduce(torch.ones(3))  # the world is the caller's
    assert [report.round for report in reports] == list(range(1, len(reports) + 1))
    expected = simulated([steps, steps], 4, delay, alpha)[cell]
    for parameter, value in zip(model.parameters(), expected, strict=True):
        assert torch.allclose(complete(parameter), value, rtol=0, atol=2e-6)
    told: list[dict[str, str]] = [{}] * world_size
    dist.all_gather_object(told, digests(model))
    assert all(other == told[0] for other in told)
    return len(reports)


@pytest.mark.parametrize("sizes, hsdp", [((1, 1), None), ((1, 2), 1)], ids=str)
def test_hooks_merge_after_the_delay(sizes: tuple[int, ...], hsdp: int | None) -> None:
    for steps, delay, alpha, rounds in ((13, 2, None, 4), (12, 3, 0.5, 3), (9, 1, 0.5, 3)):
        assert run_world(sum(sizes), delayed, sizes, hsdp, steps, delay, alpha) == [rounds] * sum(sizes)


def uneven(rank: int, world_size: int, alpha: float | None) -> tuple[int, list[tuple[float, ...]]]:
    """Cells with loaders of different length end together, with the same weights; no count is lost or used twice."""
    state = make_state(rank, (1, 1), None)
    model, counted = net(), itertools.count(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps, seen = (6, 17)[rank], 0

    def weight() -> float:
        nonlocal seen
        fresh, seen = made - seen, made
        return float(fresh)

    made = 0
    rounds: list[xffl.RoundReport] = []
    with xffl.FederatedScaling(
        model, optimizer, state, every=4, delay=2, alpha=alpha, weight=weight, on_round=rounds.append
    ):
        for number in range(steps):
            made = next(counted)
            step(model, optimizer, rank, number)
    told: list[dict[str, str]] = [{}] * world_size
    dist.all_gather_object(told, digests(model))
    assert told[0] == told[1]
    assert sum(report.weights[rank] for report in rounds) == steps
    return len(rounds), [report.weights for report in rounds]


@pytest.mark.parametrize("alpha", [None, 0.5])
def test_cells_of_different_length_end_together(alpha: float | None) -> None:
    first, second = run_world(2, uneven, alpha)
    assert first == second
    assert first[1] == [(4.0, 4.0), (2.0, 4.0), (0.0, 4.0), (0.0, 4.0), (0.0, 1.0)]


def at_once(rank: int, world_size: int) -> None:
    """The call returns before the others have come, and what it sends is the copy, not what the model is by then."""
    state = make_state(rank, (1, 1), None)
    model = nn.Linear(3, 2, bias=False)
    aggregator = xffl.Aggregator(model, state, overlap=True)
    with torch.no_grad():
        model.weight.fill_(10.0 * rank)
    if rank == 1:
        dist.recv(torch.empty(1), 0)  # rank 0 is on its way already
    pending = aggregator.aggregate_async()
    if rank == 0:
        assert not pending.is_done()
        with torch.no_grad():
            model.weight.add_(1.0)
        dist.send(torch.ones(1), 1)
    with pytest.raises(xffl.StateError, match="under way"):
        aggregator.aggregate()
    with pytest.raises(xffl.StateError, match="under way"):
        aggregator.aggregate_async()
    with pytest.raises(xffl.StateError, match="under way"):
        aggregator.state_dict()
    report = pending.merge()
    assert (model.weight == (6.0 if rank == 0 else 5.0)).all()
    assert report.seconds >= report.phases["wait"]
    with pytest.raises(xffl.StateError, match="has ended already"):
        pending.merge()


def rejected(rank: int, world_size: int) -> None:
    """A delayed round that is rejected raises at the merge, on all ranks, and the steps made meanwhile stay."""
    state = make_state(rank, (1, 1), None)
    model = nn.Linear(3, 2, bias=False)
    aggregator = xffl.Aggregator(model, state, overlap=True)
    with torch.no_grad():
        model.weight.fill_(float("nan") if rank else 1.0)
    pending = aggregator.aggregate_async()
    with torch.no_grad():
        model.weight.fill_(2.0 * rank)
    kept = copy.deepcopy(model.state_dict())
    with pytest.raises(xffl.RoundError, match="cell 1 holds values that are not finite in 'weight'"):
        pending.merge()
    assert torch.equal(model.weight, kept["weight"]) and not aggregator.is_torn and aggregator.rounds == 0
    assert aggregator.aggregate_async().merge().round == 1
    assert (model.weight == 1.0).all()


def rejected_beside_the_caller(rank: int, world_size: int) -> None:
    """Ranks tell each other why there is no round beside what the caller sends over the world."""
    state = make_state(rank, (1, 1), None)
    model = nn.Linear(3, 2, bias=False)
    aggregator = xffl.Aggregator(model, state, overlap=True)
    with torch.no_grad():
        model.weight.fill_(float("nan") if rank else 1.0)
    number = torch.ones(3)
    if rank == 0:
        pending = aggregator.aggregate_async()
        work = dist.all_reduce(number, async_op=True)
        dist.send(torch.ones(1), 1)
    else:
        dist.recv(torch.empty(1), 0)
        pending = aggregator.aggregate_async()
        pending._background.wait()
        work = dist.all_reduce(number, async_op=True)
    work.wait()
    assert (number == 2.0).all()
    with pytest.raises(xffl.RoundError, match="cell 1 holds values that are not finite"):
        pending.merge()
    assert aggregator.can_go_on


def stopping(done: threading.Event) -> Callable[[], None]:
    """Return a wait that is interrupted once, after the event."""

    def wait() -> None:
        threading.Event.wait(done)
        del done.wait  # type: ignore[method-assign]
        raise KeyboardInterrupt

    return wait


def interrupted(rank: int, world_size: int) -> None:
    """A signal that comes when the result is there, but not yet written, leaves the round to be merged."""
    state = make_state(rank, (1, 1), None)
    model = nn.Linear(3, 2, bias=False)
    aggregator = xffl.Aggregator(model, state, overlap=True)
    with torch.no_grad():
        model.weight.fill_(float(rank))
    pending = aggregator.aggregate_async()
    done = pending._background._done
    done.wait = stopping(done)  # type: ignore[method-assign, assignment]
    with pytest.raises(KeyboardInterrupt):
        pending.merge()
    assert pending.is_done() and aggregator.under_way is pending and (model.weight == rank).all()
    assert pending.merge().round == 1
    assert (model.weight == 0.5).all() and aggregator.under_way is None


def interrupted_in_a_block(rank: int, world_size: int) -> None:
    """A block whose wait for a round was interrupted merges it when it is asked again."""
    state = make_state(rank, (1, 1), None)
    model = nn.Linear(3, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with torch.no_grad():
        model.weight.zero_()
    with xffl.FederatedScaling(model, optimizer, state, every=2, delay=1) as scaling:
        for number in range(3):
            model.weight.grad = torch.full_like(model.weight, rank + 1.0)
            if number == 2:
                pending = scaling.aggregator.under_way
                assert pending is not None
                done = pending._background._done
                done.wait = stopping(done)  # type: ignore[method-assign, assignment]
                with pytest.raises(KeyboardInterrupt):
                    optimizer.step()
                assert scaling.is_under_way
                scaling.settle()
                assert not scaling.is_under_way and scaling.aggregator.rounds == 1
                assert (model.weight == -3.0 - rank - 1.0).all()
            else:
                optimizer.step()
    assert (model.weight == -4.5).all()


def left_alone(rank: int, world_size: int) -> None:
    """Who leaves waits for a round that nobody has merged: a thread that still communicates would abort the process."""
    state = make_state(rank, (1, 1), None)
    model = nn.Linear(3, 2, bias=False)
    aggregator = xffl.Aggregator(model, state, overlap=True)

    def slow(exchange: Callable[[], RoundContext]) -> RoundContext:
        time.sleep(0.5)
        return exchange()

    replace_exchange(aggregator, slow)
    pending = aggregator.aggregate_async()
    cleanup_distributed_process_group(state)
    assert pending.is_done() and not pending._background._thread.is_alive()
    assert pending.merge().round == 1


def left_behind(rank: int, world_size: int) -> None:
    """Who leaves by an exception ends a round that does not end by itself: a thread that woke up later would abort."""
    state = make_state(rank, (1, 1), None)
    aggregator = xffl.Aggregator(nn.Linear(3, 2, bias=False), state, overlap=True)
    until = time.monotonic() + 60

    def endless(*args: Any) -> None:
        while time.monotonic() < until:
            time.sleep(0.01)

    replace_exchange(aggregator, endless)
    pending = aggregator.aggregate_async()
    start = time.monotonic()
    cleanup_distributed_process_group(state, synchronize=False)
    assert pending.is_done() and not pending._background._thread.is_alive() and time.monotonic() - start < 20
    with pytest.raises(SystemExit):
        pending.merge()


def overtaken(rank: int, world_size: int) -> None:
    """Of two rounds of the same tensors at once the second would count the way to the mean twice; others are free."""
    state = make_state(rank, (1, 1), None)
    model = nn.ModuleDict({"one": nn.Linear(3, 2, bias=False), "two": nn.Linear(3, 2, bias=False)})
    first, second = (xffl.Aggregator(model, state, overlap=True) for _ in range(2))
    one, two = (xffl.Aggregator(model, state, policies={other: "local"}, overlap=True) for other in ("two.*", "one.*"))
    halves = [xffl.Aggregator(model, state, fragments=2, overlap=True) for _ in range(2)]
    halves[1].aggregate()

    def start(*aggregators: xffl.Aggregator) -> list[xffl.PendingRound]:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(rank)
        return [aggregator.aggregate_async() for aggregator in aggregators]

    for other in (second, None):
        pending, *late = start(*filter(None, (first, other)))
        if other is None:
            second.aggregate()
            late = [pending]
        else:
            pending.merge()
        with pytest.raises(xffl.StateError, match="another aggregator's round has written tensors of this one"):
            late[0].merge()
        assert all((parameter == 0.5).all() for parameter in model.parameters())
        with pytest.raises(xffl.StateError, match="ended already"):
            late[0].merge()
    assert (first.rounds, second.rounds) == (1, 1) and first.can_go_on
    for apart in ([one, two], halves, [first]):
        for pending in start(*apart):
            pending.merge()
        assert all((parameter == 0.5).all() for parameter in model.parameters())
    assert (one.rounds, two.rounds, first.rounds, [half.rounds for half in halves]) == (1, 1, 2, [1, 2])


def unlike(rank: int, world_size: int) -> None:
    """Cells that merge with different alphas would drift apart; a finished one may take the result at once."""
    state = make_state(rank, (1, 1), None)
    model = nn.Linear(3, 2, bias=False)
    aggregator = xffl.Aggregator(model, state, overlap=True)
    for alpha in ((None, 0.9), (0.5, 0.9)):
        with pytest.raises(xffl.RoundError, match=r"merge with different alphas \(.*alpha=0\.9"):
            aggregator.aggregate_async(alpha=alpha[rank]).merge()
    assert aggregator.can_go_on
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        report = aggregator.aggregate() if rank else aggregator.aggregate_async(alpha=0.5).merge()
    assert report.round == 1 and ("wait" in report.phases) == (rank == 0)
    assert ("xffl.wait" in {event.key for event in seen.key_averages()}) == (rank == 0)


def wrong(rank: int, world_size: int) -> None:
    state = make_state(rank, (1, 1), None)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain, overlapping = xffl.Aggregator(model, state), xffl.Aggregator(model, state, overlap=True)
    with pytest.raises(xffl.StateError, match="overlap=True"):
        plain.aggregate_async()
    with pytest.raises(xffl.ConfigError, match=r"alpha must be a number >= 0 and < 1, got 1\.0"):
        overlapping.aggregate_async(alpha=1.0).merge()
    with pytest.raises(xffl.ConfigError, match="needs atomic=True"):
        xffl.Aggregator(model, state, overlap=True, atomic=False)
    for options, told in (
        ({"every": 3, "delay": 3}, "delay must be an integer from 0 to 2, got 3"),
        ({"every": 3, "alpha": 0.5}, "alpha 0.5 is for delayed rounds, but delay is 0"),
        ({"every": 3, "delay": 1, "aggregator": plain}, "delay 1 needs an aggregator made with overlap=True"),
        ({"every": 3, "delay": 1, "alpha": -1}, "alpha must be .*got -1"),
        ({"every": 3, "delay": 1 + rank}, "delay=2"),
        (
            {"every": 3, "aggregator": {"codek": "int8"}},
            r"option must be one of 'policies', .*, got 'codek' \(did you mean 'codec'\?\)",
        ),
    ):
        with pytest.raises(xffl.ConfigError, match=told):
            xffl.FederatedScaling(model, optimizer, state, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "case",
    [
        at_once,
        rejected,
        rejected_beside_the_caller,
        interrupted,
        interrupted_in_a_block,
        left_alone,
        left_behind,
        overtaken,
        unlike,
        wrong,
    ],
    ids=lambda case: case.__name__,
)
def test_in_the_background(case: object) -> None:
    run_world(2, case)  # type: ignore[arg-type]


def entered_again(rank: int, world_size: int, overlap: bool) -> tuple[int, int, dict[str, str]]:
    """Two blocks of one loop, whose aggregator gives its groups back in between."""
    state = make_state(rank, (1, 1), None)
    torch.manual_seed(0)
    model = xffl.shard(torch.nn.Linear(5, 4), state)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"server": "fedavgm", "privacy": Privacy(clip=1.0, noise=0.0), "overlap": overlap}
    scaling = xffl.FederatedScaling(model, optimizer, state, every=2, aggregator=options)
    for _ in range(2):
        with scaling:
            for number in range(4):
                for parameter in model.parameters():
                    parameter.grad = torch.full_like(parameter, float(rank + number))
                optimizer.step()
    accountant = scaling.aggregator.accountant
    assert accountant is not None
    return scaling.aggregator.rounds, accountant.rounds, digests(model)


def test_a_second_block_goes_on_where_the_first_has_ended() -> None:
    kept, remade = (run_world(2, entered_again, overlap)[0] for overlap in (False, True))
    assert kept[:2] == (4, 4) and remade == kept


def warmed_up(rank: int, world_size: int, delay: int) -> list[tuple[int, int]]:
    """Note after which step which round was merged, in two blocks."""
    state = make_state(rank, (1, 1), None)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    told: list[tuple[int, int]] = []
    now = 0

    def note(report: xffl.RoundReport) -> None:
        told.append((now, report.round))
        assert len(report.step_seconds) == 2 and all(seconds > 0.0 for seconds in report.step_seconds)

    scaling = xffl.FederatedScaling(
        model, optimizer, state, every="warmup:rounds=2,every=2,then=4", delay=delay, on_round=note
    )
    for steps in (9, 5):
        with scaling:
            for _ in range(steps):
                now += 1
                for parameter in model.parameters():
                    parameter.grad = torch.ones_like(parameter)
                optimizer.step()
    return told


@pytest.mark.parametrize("delay", [0, 1])
def test_a_warm_up_is_over_after_its_rounds(delay: int) -> None:
    starts = {2: 1, 4: 2, 8: 3, 13: 5}  # the second block, which is no warm-up, begins after step 9
    ends = {9: 4, 14: 6}
    expected = sorted([(step + delay, number) for step, number in starts.items()] + list(ends.items()))
    assert run_world(2, warmed_up, delay) == [expected] * 2


def normalized(rank: int, world_size: int) -> None:
    """A combiner is told the steps that a delayed round takes in, and not those made meanwhile."""
    state = make_state(rank, (1, 1), None)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    start = model.weight.detach().clone()
    ways: list[float] = []

    def note(report: xffl.RoundReport) -> None:
        ways.append(float((start - model.weight).mean()))

    scaling = xffl.FederatedScaling(
        model, optimizer, state, every=PerCell((2, 4)), delay=1, on_round=note, aggregator={"combine": "fednova"}
    )
    with scaling:
        for _ in range((3, 5)[rank]):
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, rank + 1.0)
            optimizer.step()
    # Two steps of 1 and four of 2 are three of the mean, 1.5; one more was made here meanwhile.
    assert ways[0] == pytest.approx(3 * 1.5 + rank + 1.0, abs=1e-5)


def test_a_late_round_knows_its_steps() -> None:
    run_world(2, normalized)


def rejected_last(rank: int, world_size: int) -> None:
    """The steps of a delayed round that is rejected at the end count in the closing one."""
    state = make_state(rank, (1, 1), None)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaling = xffl.FederatedScaling(model, optimizer, state, every=2, delay=1)
    with torch.no_grad():
        model.weight.zero_()
    scaling.__enter__()
    tries = itertools.count()

    def broken(exchange: Callable[[], RoundContext]) -> RoundContext:
        context = exchange()
        if rank == 1 and next(tries) == 0:
            raise MemoryError("no room")
        return context

    replace_exchange(scaling.aggregator, broken)
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, rank + 1.0)
        optimizer.step()
    with pytest.raises(xffl.RoundError, match="no room"):
        scaling.__exit__(None, None, None)
    assert scaling.aggregator.rounds == 1 and (model.weight == -3.0).all()


def test_what_a_late_round_has_not_taken_counts_at_the_end() -> None:
    run_world(2, rejected_last)


def leaves_after_a_rejection(rank: int, world_size: int) -> tuple[str, bool]:
    """One cell has finished when a round of the other is rejected; both give their groups back."""
    state = make_state(rank, (1, 1), None)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaling = xffl.FederatedScaling(model, optimizer, state, every=2, delay=1)
    told = ""
    try:
        with scaling:
            tries = itertools.count()

            def broken(exchange: Callable[[], RoundContext]) -> RoundContext:
                context = exchange()
                if rank == 1 and next(tries) == 0:
                    raise MemoryError("no room")
                return context

            replace_exchange(scaling.aggregator, broken)
            for number in range((1, 6)[rank]):
                for parameter in model.parameters():
                    parameter.grad = torch.full_like(parameter, float(number))
                try:
                    optimizer.step()
                except xffl.RoundError:
                    told = "in the loop"
    except xffl.RoundError:
        told = "at the end"
    return told, scaling.aggregator.is_closed


def test_who_leaves_with_an_error_does_not_keep_the_others_waiting() -> None:
    assert run_world(2, leaves_after_a_rejection, timeout_s=40.0) == [("at the end", True), ("in the loop", True)]


class AsTold(Schedule):
    """Go by what the last round has told."""

    def steps(self, rounds: int, cell: int, report: xffl.RoundReport | None) -> int:
        return 2 if report is None else 3 - report.round % 2


def resumes_at_a_merge(rank: int, world_size: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]], bool]:
    """Save where a merge tells of a round and the next is to start in the same step."""
    state = make_state(rank, (1, 1), None)
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rounds: list[list[tuple[int, int]]] = [[], []]
    saved: dict[str, Any] = {}
    now = 0

    def loop(steps: range, told: list[tuple[int, int]]) -> None:
        nonlocal now

        def note(report: xffl.RoundReport) -> None:
            told.append((now, report.round))
            if report.round == 2 and not saved:
                saved["model"] = {name: value.clone() for name, value in model.state_dict().items()}
                saved["rounds"], saved["step"] = scaling.state_dict(), now

        scaling = xffl.FederatedScaling(model, optimizer, state, every=AsTold(), delay=2, on_round=note)
        with scaling:
            if steps.start:
                model.load_state_dict(saved["model"])
                scaling.load_state_dict(saved["rounds"])
            for now in steps:
                for parameter in model.parameters():
                    parameter.grad = torch.full_like(parameter, (now + 1) * (rank + 1.0))
                optimizer.step()

    loop(range(14), rounds[0])
    whole = digests(model)
    loop(range(saved["step"] + 1, 14), rounds[1])
    return rounds[0], rounds[1], digests(model) == whole


def test_resuming_where_a_merge_and_a_start_meet_equals_never_having_stopped() -> None:
    for whole, resumed, is_same in run_world(2, resumes_at_a_merge):
        assert resumed == [one for one in whole if one[1] > 2] and len(resumed) > 2 and is_same
