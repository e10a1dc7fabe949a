"""Where rounds went wrong before: interrupts, failures halfway, states of other set-ups, shared memory and groups."""

from __future__ import annotations

import copy
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import xffl
from tests.ranks.test_round import make_state
from tests.rounds import aggregator_of, replace_exchange
from tests.worlds import run_world
from xffl.aggregation import compression as feedback
from xffl.aggregation.engine import buffers as pool
from xffl.aggregation.engine import transport
from xffl.aggregation.engine.decision import consensus as protocol
from xffl.aggregation.engine.decision import unfit_cells
from xffl.aggregation.engine.exchange import RoundRun
from xffl.aggregation.engine.planning.transfers import RoundContext
from xffl.aggregation.report import RoundProfile
from xffl.distributed.failures.world_store import clone_store


def linear(size: int = 8, seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(size, size, bias=False)


def everyones(value: Any) -> list[Any]:
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, value)
    return told


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: int) -> None:
    for number in range(steps):
        torch.manual_seed(100 * rank + number)
        model(torch.randn(4, 8)).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def shaken(model: nn.Linear) -> None:
    with torch.no_grad():
        model.weight.add_(torch.randn_like(model.weight))


def refused(call: Callable[[], object], told: str) -> None:
    with pytest.raises(xffl.StateError, match=told):
        call()


# Fragments in a training loop


def fragments_end_alike(rank: int, world_size: int, delay: int) -> None:
    """Whatever fragment comes last, all parts of the model end the same in all cells, and hear of every count."""
    state = make_state(rank, (1, 1), None)
    model = nn.Sequential(*(linear(seed=seed) for seed in range(3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    aggregator = xffl.Aggregator(model, state, fragments=3, overlap=delay > 0)
    rounds, heard, steps, fresh = 0, [0.0] * 3, (5, 8)[rank], 0.0

    def count(*args: Any) -> None:
        nonlocal fresh
        fresh += 1.0

    def take() -> float:
        nonlocal fresh
        taken, fresh = fresh, 0.0
        return taken

    def note(report: xffl.RoundReport) -> None:
        nonlocal rounds
        rounds += 1
        heard[report.fragment] += report.weights[rank]

    optimizer.register_step_pre_hook(count)
    with xffl.FederatedScaling(
        model, optimizer, state, every=2, aggregator=aggregator, on_round=note, delay=delay, weight=take
    ):
        train(model, optimizer, rank, steps)
    told = everyones([parameter.detach().clone() for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*told, strict=True))
    assert heard == [steps] * 3 and aggregator.rounds == rounds


def a_finished_cell_counts_in_every_fragment(rank: int, world_size: int) -> None:
    state = make_state(rank, (1, 1), None)
    model = nn.ParameterList([nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    aggregator = xffl.Aggregator(model, state, fragments=2)
    with xffl.FederatedScaling(model, optimizer, state, every=1, aggregator=aggregator):
        for _ in range(1 if rank == 0 else 4):
            for parameter in model:
                parameter.grad = torch.full((4,), -1.0 if rank == 0 else -10.0)
            optimizer.step()
    # Part 0 meets after one step of each; part 1 after one of rank 0 and two of rank 1; then rank 1 goes on alone.
    assert [parameter[0].item() for parameter in model] == [5.5 + 30.0, 10.5 + 20.0]


# Interrupts


def interrupted_at_the_end(rank: int, world_size: int) -> None:
    """A rank that said yes and does not learn what came of it is torn; the others have the new weights."""
    state = make_state(rank, (1, 1), None)
    model = linear(seed=rank)
    aggregator = xffl.Aggregator(model, state)
    cast, calls = protocol.VoteTree.gather, 0
    store: Any = dist.group.WORLD.get_group_store()  # type: ignore[union-attr]

    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        threading.Event().wait(1.0)
        store.set("interrupted", "")

    def slow(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            if rank == 0:
                store.wait(["interrupted"])
            else:
                threading.Timer(0.5, interrupt).start()
        return cast(*args)

    protocol.VoteTree.gather = slow  # type: ignore[assignment]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if rank == 0:
        assert aggregator.aggregate().round == 1 and not aggregator.is_torn
        return
    with pytest.raises(KeyboardInterrupt):
        aggregator.aggregate()
    assert aggregator.is_torn
    with pytest.raises(xffl.RoundError, match="torn"):
        model(torch.ones(8))


def before_closing(act: Callable[[], object]) -> Callable[..., Any]:
    """Return a vote that does something before the second one, on the outcome of the first round."""
    cast, calls = protocol.VoteTree.gather, itertools.count(1)

    def acting(*args: Any) -> Any:
        if next(calls) == 2:
            act()
        return cast(*args)

    return acting


def interrupted_while_it_waits(rank: int, world_size: int) -> None:
    """A merge that was interrupted can be taken up again."""
    state = make_state(rank, (1, 1), None)
    model = linear(seed=rank)
    aggregator = xffl.Aggregator(model, state, overlap=True)
    store = clone_store("no store")
    if rank == 0:
        protocol.VoteTree.gather = before_closing(lambda: store.wait(["interrupted"], timedelta(seconds=40)))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    pending = aggregator.aggregate_async()
    if rank == 1:
        main = threading.main_thread().ident
        assert main is not None
        end = pending._background._done
        wait = end.wait

        def interrupted(timeout: float | None = None) -> bool:
            end.wait = wait  # type: ignore[method-assign]
            threading.Timer(0.2, signal.pthread_kill, (main, signal.SIGINT)).start()
            return wait(timeout)

        end.wait = interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            pending.merge()
        assert aggregator.under_way is pending and not aggregator.is_torn
        store.set("interrupted", "")
    assert pending.merge().round == 1
    told = everyones(model.weight.detach().clone())
    assert torch.equal(*told)


def an_opening_is_no_end(rank: int, world_size: int) -> None:
    """A rank that was interrupted after its exchange and starts again is not taken for one that says yes."""
    state = make_state(rank, (1, 1), None)
    model = linear(seed=rank)
    aggregator = xffl.Aggregator(model, state)
    before = model.weight.detach().clone()
    if rank == 1:
        stops = [KeyboardInterrupt]

        def interrupted(exchange: Callable[[], RoundContext]) -> RoundContext:
            context = exchange()
            if stops:
                raise stops.pop()
            return context

        replace_exchange(aggregator, interrupted)
        with pytest.raises(KeyboardInterrupt):
            aggregator.aggregate()
    with pytest.raises(xffl.RoundError, match="at the end of round 1"):
        aggregator.aggregate()
    assert torch.equal(model.weight, before) and aggregator.rounds == 0


def interrupted_over_the_result(rank: int, world_size: int) -> None:
    """A rank that was interrupted between exchange and second vote, and goes on, tears no other rank's model."""
    state = make_state(rank, (1, 1, 1), None)
    model = linear(seed=rank)
    aggregator = xffl.Aggregator(model, state)
    before = model.weight.detach().clone()
    if rank == 1:
        with mock.patch.object(RoundRun, "result", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            aggregator.aggregate()
        with pytest.raises(xffl.RoundError, match="different rounds"):
            aggregator.aggregate()
    else:
        with pytest.raises(protocol.RoundBroken, match="was not taken, this rank keeps its weights"):
            aggregator.aggregate()
    assert torch.equal(model.weight, before) and aggregator.rounds == 0
    assert not aggregator.is_torn and not aggregator.can_go_on
    model(torch.ones(8))


def interrupted_in_the_vote(rank: int, world_size: int) -> None:
    """An answer that is still to come would be taken for one to the next ballot."""
    state = make_state(rank, (1, 1), None)
    aggregator = xffl.Aggregator(linear(seed=rank), state)

    def interrupted(*args: Any) -> Any:
        raise KeyboardInterrupt

    with mock.patch.object(protocol.VoteTree, "gather", interrupted), pytest.raises(KeyboardInterrupt):
        aggregator.aggregate()
    assert not aggregator.can_go_on and not aggregator.is_torn
    with pytest.raises(xffl.StateError, match="a vote of this aggregator was cut off"):
        aggregator.aggregate()


def interrupted_at_work(rank: int, world_size: int) -> None:
    """An interrupt is no failure to be told and outlived, wherever it comes."""
    state = make_state(rank, (1, 1), None)
    model = linear(seed=rank)
    aggregator = xffl.Aggregator(model, state, form="two_hop")
    before = model.weight.detach().clone()
    with mock.patch.object(transport, "weighted_mean", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        aggregator.aggregate()
    assert torch.equal(model.weight, before) and not aggregator.is_torn and not aggregator.can_go_on


def alone_in_the_exchange(rank: int, world_size: int, is_back: bool) -> None:
    """One rank is interrupted and comes back or not: who has waited for it in vain says no, so weights stand."""
    state = make_state(rank, (1, 1), None)
    model = linear(seed=rank)
    aggregator = xffl.Aggregator(model, state)
    before = model.weight.detach().clone()
    cast, calls = protocol.VoteTree.gather, 0
    stops = [KeyboardInterrupt() if rank else RuntimeError("timed out")]

    def stopped(exchange: Callable[[], RoundContext]) -> RoundContext:
        if stops:
            raise stops.pop()
        return exchange()

    def unanswered(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2 and not is_back:
            raise RuntimeError("nobody answers")
        return cast(*args)

    replace_exchange(aggregator, stopped)
    with mock.patch.object(protocol.VoteTree, "gather", unanswered):
        if rank == 1:
            with pytest.raises(KeyboardInterrupt):
                aggregator.aggregate()
        if rank == 0 or is_back:
            told = "round 1 was not taken, this rank keeps .*timed out" if rank == 0 else "different rounds"
            with pytest.raises(xffl.RoundError, match=told):
                aggregator.aggregate()
    assert torch.equal(model.weight, before) and not aggregator.is_torn and not aggregator.can_go_on
    model(torch.ones(8))


def without_reasons(rank: int, world_size: int) -> None:
    """One rank has said no, and why cannot be learned any more: nobody writes, so weights stand."""
    state = make_state(rank, (1, 1), None)
    model = linear(seed=rank)
    aggregator = xffl.Aggregator(model, state)
    before = model.weight.detach().clone()

    def fails(exchange: Callable[[], RoundContext]) -> RoundContext:
        context = exchange()
        if rank == 1:
            raise MemoryError("planted")
        return context

    replace_exchange(aggregator, fails)
    lost = mock.patch.object(protocol, "all_gather_json", side_effect=RuntimeError("the peer is gone"))
    told = "the peer is gone" if rank == 0 else "planted"
    with lost, pytest.raises(xffl.RoundError, match=f"round 1 was not taken, this rank keeps its weights: .*{told}"):
        aggregator.aggregate()
    assert torch.equal(model.weight, before) and not aggregator.is_torn and not aggregator.can_go_on


def alone_in_place(rank: int, world_size: int) -> None:
    """What was written bucket by bucket stays torn where the round fails and nobody answers."""
    state = make_state(rank, (1, 1), None)
    model = linear(seed=rank)
    aggregator = xffl.Aggregator(model, state, atomic=False)
    unanswered = before_closing(mock.Mock(side_effect=RuntimeError("nobody answers")))
    failing = mock.patch.object(transport, "weighted_mean", side_effect=MemoryError("planted"))
    with (
        failing,
        mock.patch.object(protocol.VoteTree, "gather", unanswered),
        pytest.raises(xffl.RoundError, match="torn"),
    ):
        aggregator.aggregate()
    assert aggregator.is_torn


# Failures


def no_memory(rank: int, world_size: int, atomic: bool) -> None:
    """Buffers are made before the vote, so a rank that has no memory for them says so in time."""
    state = make_state(rank, (1, 1), None)
    model = nn.Sequential(linear(64, seed=rank), nn.BatchNorm1d(5))
    aggregator = xffl.Aggregator(model, state, bucket_bytes=256, atomic=atomic)
    make, calls = pool.Pool._make, 0

    def fails(self: Any) -> Any:
        nonlocal calls
        calls += 1
        if rank == 1 and calls == 3:
            raise torch.OutOfMemoryError("planted")
        return make(self)

    pool.Pool._make = fails  # type: ignore[method-assign]
    start = time.monotonic()
    with pytest.raises(xffl.RoundError, match="planted"):
        aggregator.aggregate()
    assert time.monotonic() - start < 40 and not aggregator.is_torn
    made = 0
    empty = torch.empty

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal made
        made += options.get("dtype") == torch.uint8
        return empty(*args, **options)

    RoundRun(aggregator._exchange, 0, RoundProfile())
    torch.empty = counted  # type: ignore[assignment]
    pool.Pool._make = make  # type: ignore[method-assign]
    try:
        aggregator.aggregate()
    finally:
        torch.empty = empty
    assert made == 0


def dropped_and_delayed(rank: int, world_size: int, alpha: float | None) -> None:
    """A cell that was left out takes the mean, also where steps made meanwhile would stay."""
    state = make_state(rank, (1, 1, 1), None)
    model = linear(seed=rank)
    aggregator = xffl.Aggregator(model, state, overlap=True, nonfinite="drop_cell")
    if rank == 1:
        with torch.no_grad():
            model.weight[0, 0] = float("nan")
    dropped = []
    for _ in range(2):
        dropped.append(aggregator.aggregate_async(alpha=alpha).merge().dropped)
        assert model.weight.isfinite().all()
    assert dropped == [(1,), ()]


def torn_with_a_codec(rank: int, world_size: int) -> None:
    """After a tear cells start from what they load, not from what the failed round has left of the agreed state."""
    state = make_state(rank, (1, 1), None)
    model = linear(16, seed=rank)
    aggregator = xffl.Aggregator(model, state, atomic=False, codec="int8", bucket_bytes=256)
    aggregator.aggregate()
    good = copy.deepcopy(model.state_dict())
    shaken(model)
    decode, calls = feedback.ErrorFeedback.decode, 0

    def fails(self: Any, *args: Any) -> None:
        nonlocal calls
        calls += 1
        if rank == 1 and calls == 3:
            raise MemoryError("planted")
        decode(self, *args)

    feedback.ErrorFeedback.decode = fails  # type: ignore[method-assign]
    with pytest.raises(xffl.RoundError, match="planted"):
        aggregator.aggregate()
    feedback.ErrorFeedback.decode = decode  # type: ignore[method-assign]
    model.load_state_dict(good)
    shaken(model)
    aggregator.aggregate()
    assert torch.equal(*everyones(model.weight.detach().clone()))


def torn_on_one_rank(rank: int, world_size: int) -> None:
    """Once model and aggregator are loaded on all ranks, rounds go on."""
    state = make_state(rank, (1, 1), None)
    model = linear(seed=rank)
    aggregator = xffl.Aggregator(model, state)
    good, saved = copy.deepcopy(model.state_dict()), copy.deepcopy(aggregator.state_dict())
    cast, calls = protocol.VoteTree.gather, 0

    def breaks(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        ballots = cast(*args)
        if rank == 1 and calls == 2:
            raise RuntimeError("the link is down")
        return ballots

    protocol.VoteTree.gather = breaks  # type: ignore[assignment]
    if rank == 1:
        with pytest.raises(xffl.RoundError, match="model and of the aggregator"):
            aggregator.aggregate()
    else:
        aggregator.aggregate()
    model.load_state_dict(good)
    aggregator.load_state_dict(saved)
    assert aggregator.aggregate().round == 1
    assert torch.equal(*everyones(model.weight.detach().clone()))


def messages_of_the_caller(rank: int, world_size: int) -> None:
    """What a script sends over the world on its own is not taken for a vote."""
    state = make_state(rank, (1, 1), None)
    aggregator = xffl.Aggregator(linear(seed=rank), state, rails=True)
    number = torch.zeros(24, dtype=torch.float64)
    work = dist.irecv(number, 1) if rank == 0 else None
    aggregator.aggregate()
    if work is None:
        dist.send(torch.full((24,), 7.0, dtype=torch.float64), 0)
    else:
        work.wait()
        assert (number == 7.0).all()


def rejected_at_the_end(rank: int, world_size: int) -> None:
    """A delayed round that is rejected as the block ends is tried again, with what it should have counted."""
    state = make_state(rank, (1, 1), None)
    model = linear(seed=rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    aggregator = xffl.Aggregator(model, state, overlap=True)
    calls = 0

    def fails_once(exchange: Callable[[], RoundContext]) -> RoundContext:
        nonlocal calls
        calls += 1
        context = exchange()
        if rank == 1 and calls == 1:
            raise MemoryError("planted")
        return context

    replace_exchange(aggregator, fails_once)
    counts = iter([5.0, 0.0])
    weights: list[tuple[float, ...]] = []
    scaling = xffl.FederatedScaling(
        model,
        optimizer,
        state,
        every=2,
        delay=1,
        aggregator=aggregator,
        weight=lambda: next(counts),
        on_round=lambda report: weights.append(report.weights),
    )
    scaling.__enter__()
    train(model, optimizer, rank, 2)
    with pytest.raises(xffl.RoundError, match="planted"):
        scaling.__exit__(None, None, None)
    assert weights == [(5.0, 5.0)]
    assert torch.equal(*everyones(model.weight.detach().clone()))


# States


def states_of_other_exchanges(rank: int, world_size: int) -> None:
    state = make_state(rank, (1, 1), None)
    model = linear(16, seed=rank)
    aggregator = xffl.Aggregator(model, state, codec="int4", bucket_bytes=256)
    saved = [copy.deepcopy((model.state_dict(), aggregator.state_dict()))]

    def go_on(rounds: int) -> torch.Tensor:
        for number in range(rounds):
            torch.manual_seed(number + 10 * rank)
            shaken(model)
            aggregator.aggregate()
        return model.weight.detach().clone()

    straight = go_on(3)
    saved.append((copy.deepcopy(model.state_dict()), aggregator.state_dict()))
    kept = copy.deepcopy(saved[1][1])
    after = go_on(2)
    lane = next(iter(kept["codecs"]["lanes"]))
    assert torch.equal(saved[1][1]["codecs"]["lanes"][lane]["reference"], kept["codecs"]["lanes"][lane]["reference"])
    # Back to the start, where there was no agreed state, and to the middle.
    for (model_state, aggregator_state), rounds, expected in zip(saved, (3, 2), (straight, after), strict=True):
        model.load_state_dict(model_state)
        aggregator.load_state_dict(aggregator_state)
        assert torch.equal(go_on(rounds), expected)
    for options in ({"bucket_bytes": 512}, {"bucket_bytes": 256, "form": "two_hop"}):
        other = xffl.Aggregator(model, state, codec="int4", **options)  # type: ignore[arg-type]
        with pytest.raises(xffl.CheckpointError, match="that of another exchange"):
            other.load_state_dict(saved[1][1])


def out_of_a_delay(rank: int, world_size: int) -> None:
    """Rounds under way can be settled for a checkpoint, survive an exception of the script, and leave no groups."""
    from torch.distributed import distributed_c10d

    state = make_state(rank, (2, 2), 1)
    model = linear(seed=rank // 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    groups = set()
    for _ in range(3):
        options = {"gradients_reduced_by_caller": True}
        with xffl.FederatedScaling(model, optimizer, state, every=2, delay=1, aggregator=options) as scaling:
            for _ in range(2):
                train(model, optimizer, rank // 2, 2)
                refused(scaling.aggregator.state_dict, "under way")
                scaling.settle()
                assert scaling.aggregator.state_dict()["rounds"] > 0
        groups.add(len(distributed_c10d._world.pg_map))
        refused(scaling.aggregator.aggregate, "closed")
    assert len(groups) == 1
    aggregator = aggregator_of(model, state, overlap=True)

    def breaks_off() -> None:
        with xffl.FederatedScaling(model, optimizer, state, every=2, delay=1, aggregator=aggregator):
            train(model, optimizer, rank // 2, 2)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        breaks_off()
    assert aggregator.under_way is not None
    aggregator.under_way.merge()
    assert aggregator.under_way is None and aggregator.aggregate().round == 2


def closed(rank: int, world_size: int) -> None:
    """A closed aggregator makes no round, whether it had groups of its own to give back or not."""
    state = make_state(rank, (1, 1), None)
    for overlap in (False, True):
        aggregator = xffl.Aggregator(linear(seed=0), state, overlap=overlap)
        assert aggregator.aggregate().round == 1
        aggregator.close()
        for call in (aggregator.aggregate, aggregator.aggregate_async):
            with pytest.raises(xffl.StateError, match="closed; make another one"):
                call()
        aggregator.close()  # once more is nothing
        assert not aggregator.can_go_on
        model = aggregator.model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(xffl.ConfigError, match="the aggregator is closed; make another one"):
            xffl.FederatedScaling(model, optimizer, state, every=1, aggregator=aggregator)
        assert aggregator.is_closed and aggregator.state_dict()["rounds"] == 1


def two_blocks(rank: int, world_size: int) -> None:
    """A second block goes on where the first has ended: with the server's momentum, and what the codec left out."""
    state = make_state(rank, (1, 1), None)
    ends = []
    for blocks in ((6,), (2, 4)):
        model = linear(seed=0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options = {"server": "fedavgm:lr=0.5,momentum=0.9", "codec": "int4"}
        scaling = xffl.FederatedScaling(model, optimizer, state, every=2, aggregator=options)
        for steps in blocks:
            with scaling:
                for _ in range(steps):
                    train(model, optimizer, rank, 1)
        assert scaling.aggregator.rounds == 3
        ends.append(model.weight.detach().clone())
    assert torch.equal(*ends)


def ways_to_merge(rank: int, world_size: int) -> None:
    state = make_state(rank, (2, 2), 1)
    model = linear(seed=rank // 2)
    aggregator = aggregator_of(model, state, overlap=True)
    pending = aggregator.aggregate_async(alpha=0.5 if rank == 1 else 0.25)
    with pytest.raises(xffl.RoundError, match="the ranks of cell 0 merge in different ways"):
        pending.merge()
    # Between cells they may differ: one that has finished answers at once.
    report = aggregator.aggregate() if rank < 2 else aggregator.aggregate_async(alpha=0.5).merge()
    assert report.round == 1


# Numbers


def wide_steps(rank: int, world_size: int) -> None:
    """Steps far below fp32's spacing of the weights reach the others through a codec."""
    state = make_state(rank, (1, 1), None)
    torch.manual_seed(0)
    model = nn.Linear(16, 16, bias=False, dtype=torch.float64)
    aggregator = xffl.Aggregator(model, state, codec="bf16")
    aggregator.aggregate()
    before = model.weight.detach().clone()
    step = 1e-9 * torch.randn(16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        model.weight.add_(step)
    aggregator.aggregate()
    assert ((model.weight.detach() - before) - step).norm() < 0.01 * step.norm()
    huge = nn.ParameterList([nn.Parameter(torch.full((4,), 1.7e308 * (1 - 2 * rank), dtype=torch.float64))])
    xffl.Aggregator(huge, state).aggregate()
    assert (huge[0] == 0.0).all()
    zero = linear()
    with torch.no_grad():
        zero.weight.fill_(-0.0)
    xffl.Aggregator(zero, state, overlap=True).aggregate_async().merge()
    assert torch.signbit(zero.weight).all()


def one_cell(rank: int, world_size: int) -> None:
    """Nothing crosses in one cell, so a codec changes no bit."""
    state = make_state(rank, (world_size,), None)
    model = linear(16)
    aggregator = aggregator_of(model, state, codec="int4")
    for _ in range(2):
        torch.manual_seed(3)
        shaken(model)
        before = model.weight.detach().clone()
        report = aggregator.aggregate()
        assert torch.equal(model.weight, before)
        assert report.codec_error is None and report.hidden == 0.0 and report.bytes_across == 0


def shared_memory(rank: int, world_size: int) -> None:
    state = make_state(rank, (1, 1), None)
    values = torch.randn(64)
    model = nn.ParameterList([nn.Parameter(values), nn.Parameter(values.view(8, 8))])
    with pytest.raises(xffl.ConfigError, match="'0' and '1' share memory"):
        xffl.Aggregator(model, state, atomic=False).aggregate()
    xffl.Aggregator(model, state).aggregate()
    assert torch.equal(*everyones(values))


def interrupted_before_writing(rank: int, world_size: int) -> None:
    """A rank that knows of a yes and is stopped before it writes is torn; the others have the new weights."""
    state = make_state(rank, (1, 1), None)
    model = linear(seed=rank)
    aggregator = xffl.Aggregator(model, state)

    def stop(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    if rank == 0:
        assert aggregator.aggregate().round == 1 and not aggregator.is_torn
        return
    with mock.patch.object(aggregator, "_conclude", stop), pytest.raises(KeyboardInterrupt):
        aggregator.aggregate()
    assert aggregator.is_torn and not aggregator.can_go_on


def stopped_in_a_refusal(rank: int, world_size: int, stop: type[BaseException], nonfinite: str) -> None:
    """Where ranks cannot tell each other what they have found, all keep their weights, and no round can follow."""
    state = make_state(rank, (1, 1), None)
    model = linear(seed=rank)
    with torch.no_grad():
        model.weight[0, 0] = float("nan") if rank or nonfinite == "reject" else 1.0
    before = model.weight.detach().clone()
    aggregator = xffl.Aggregator(model, state, nonfinite=nonfinite)
    how = {"reject": (unfit_cells, "check_consistent"), "drop_cell": (unfit_cells, "all_gather_json")}[nonfinite]

    def lost(*args: Any, **kwargs: Any) -> None:
        raise stop("the peer is gone")

    with mock.patch.object(*how, lost), pytest.raises(BaseException, match="the peer is gone") as found:
        aggregator.aggregate()
    assert isinstance(found.value, xffl.RoundError if stop is RuntimeError else stop)
    assert not aggregator.can_go_on and not aggregator.is_torn
    assert torch.equal(model.weight.nan_to_num(7.0), before.nan_to_num(7.0))


@pytest.mark.parametrize(
    "ranks, case, args",
    [
        (2, fragments_end_alike, (0,)),
        (2, fragments_end_alike, (1,)),
        (2, a_finished_cell_counts_in_every_fragment, ()),
        (2, interrupted_while_it_waits, ()),
        (2, an_opening_is_no_end, ()),
        (2, closed, ()),
        (2, two_blocks, ()),
        (2, no_memory, (True,)),
        (2, no_memory, (False,)),
        (3, dropped_and_delayed, (None,)),
        (3, dropped_and_delayed, (0.5,)),
        (2, torn_with_a_codec, ()),
        (2, torn_on_one_rank, ()),
        (2, messages_of_the_caller, ()),
        (2, rejected_at_the_end, ()),
        (2, states_of_other_exchanges, ()),
        (4, out_of_a_delay, ()),
        (4, ways_to_merge, ()),
        (2, wide_steps, ()),
        (1, one_cell, ()),
        (2, one_cell, ()),
        (2, shared_memory, ()),
        (2, interrupted_at_the_end, ()),
        (2, interrupted_in_the_vote, ()),
        (2, interrupted_at_work, ()),
        (2, without_reasons, ()),
        (2, alone_in_place, ()),
        *((2, alone_in_the_exchange, (is_back,)) for is_back in (True, False)),
        (2, interrupted_before_writing, ()),
        *(
            (2, stopped_in_a_refusal, (stop, nonfinite))
            for stop in (RuntimeError, KeyboardInterrupt)
            for nonfinite in ("reject", "drop_cell")
        ),
    ],
    ids=lambda value: getattr(value, "__name__", None) or str(value),
)
def test_edges(ranks: int, case: Callable[..., None], args: tuple[Any, ...]) -> None:
    run_world(ranks, case, *args, timeout_s=60.0)


def test_an_interrupt_between_exchange_and_second_vote_tears_no_model() -> None:
    run_world(3, interrupted_over_the_result)
