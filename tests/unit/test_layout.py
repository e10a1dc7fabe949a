"""Where elements lie: nothing is lost on the way out of a model and back, and no change of it goes unnoticed."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.rounds import options_of
from xffl.aggregation.compression import codec_of
from xffl.aggregation.engine.arena import Arena
from xffl.aggregation.engine.buffers import (
    Copies,
    Layout,
    ModelCopy,
    Pool,
    aligned,
)
from xffl.aggregation.engine.exchange import Memory, RoundMemory
from xffl.aggregation.engine.groups import RoundGroups
from xffl.aggregation.engine.planning.plan import plan_groups, plan_transfers
from xffl.aggregation.engine.planning.tensors import Division, Manifest, canonical_axis
from xffl.aggregation.engine.planning.transfers import GroupTransfer
from xffl.aggregation.report import RoundProfile
from xffl.aggregation.rounds.offer import ContributionTracker, Snapshot
from xffl.compat.pytorch import memory_of
from xffl.errors import ConfigError
from xffl.topology import Topology

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.complex64]


@st.composite
def models(draw: st.DrawFn) -> nn.Module:
    """Tensors of any shape, type and order in memory; some shared, some frozen."""
    model = nn.ParameterDict()
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    for index in range(draw(st.integers(1, 8))):
        shape = draw(st.lists(st.integers(0, 7), max_size=3))
        # Numbers that bf16 holds, so that its codec loses nothing.
        value = torch.randn(shape, generator=generator).bfloat16().to(draw(st.sampled_from(DTYPES)))
        way = draw(st.sampled_from(["plain", "turned", "gaps", "column"]))
        if way == "turned" and value.dim() > 1:
            value = value.transpose(0, 1).contiguous().transpose(0, 1)
        elif way == "gaps" and value.dim():
            value = torch.cat([value, value], dim=-1)[..., : value.shape[-1]]
        elif way == "column" and value.dim():
            value = torch.stack([value, value], dim=-1)[..., 0]
        model[f"p{index}"] = nn.Parameter(value)
    return model


def prepare(model: nn.Module, bucket_bytes: int) -> tuple[Layout, tuple[GroupTransfer, ...]]:
    topology = Topology(1, (1,))
    manifest = Manifest(model)
    at = topology.coordinates(0)
    axes = [manifest.axes(topology, at)]
    items = manifest.items(topology, axes)
    transfers = plan_transfers(
        plan_groups(items, topology, 0),
        topology,
        0,
        RoundGroups(None, (), None, None),
        options_of(bucket_bytes=bucket_bytes, atomic=False),
        {},
        is_on_cpu=True,
    )
    return Layout(manifest.moving, items, axes, at), transfers


@settings(max_examples=150, deadline=None)
@given(models(), st.integers(1, 300), st.sampled_from(["none", "bf16"]))
def test_nothing_is_lost_between_packing_and_unpacking(model: nn.Module, bucket_bytes: int, codec_name: str) -> None:
    codec = codec_of(codec_name)
    original, emptied = copy.deepcopy(model), model
    source, transfers = prepare(original, bucket_bytes)
    target, _ = prepare(emptied, bucket_bytes)
    with torch.no_grad():
        for parameter in emptied.parameters():
            parameter.fill_(math.nan)
        source.look_up()
        target.look_up()
        for transfer in transfers:
            for bucket in transfer.buckets:
                values = torch.empty(bucket.stop - bucket.start, dtype=transfer.dtype)
                source.pack(bucket, values)
                if codec is not None:
                    code = torch.empty(codec.nbytes(values.numel()), dtype=torch.uint8)
                    codec.encode(values.float(), code)
                    decoded = torch.empty(values.numel())
                    codec.decode(code, decoded)
                    values.copy_(decoded)
                target.unpack(bucket, values)
    for (name, value), copied in zip(original.named_parameters(), emptied.parameters(), strict=True):
        assert torch.equal(value, copied), name


def test_one_element_of_a_larger_step_is_sent_like_any_other() -> None:
    model = nn.ParameterList([nn.Parameter(torch.arange(2.0)[1::2])])
    assert model[0].is_contiguous() and model[0].stride() == (2,)
    layout, (transfer,) = prepare(model, 10**6)
    layout.look_up()
    run = layout.run_of(transfer.buckets[0], CPU)
    assert run is not None
    run.view(torch.uint8).copy_(torch.tensor([3.0]).view(torch.uint8))
    assert model[0].item() == 3.0


def test_views_follow_a_model_that_is_put_elsewhere() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6, bias=False))
    layout, transfers = prepare(model, 10**6)
    (bucket,) = transfers[0].buckets

    def packed() -> torch.Tensor:
        values = torch.empty(bucket.stop - bucket.start)
        with torch.no_grad():
            layout.look_up()
            layout.pack(bucket, values)
        return values

    before = packed()
    weight = model[0].weight
    weight.data = weight.data.clone() + 1  # elsewhere
    moved = packed()
    assert not torch.equal(moved, before)
    weight.data = weight.data.t()  # the same memory, turned
    assert not torch.equal(packed(), moved)
    model[0].bias = nn.Parameter(torch.full((6,), 7.0))  # another tensor
    assert (packed() == 7.0).sum() == 6
    weight.data = weight.data[:5]
    with pytest.raises(ConfigError, match=r"'0.weight' was \(6, 6\)"):
        packed()
    weight.data = torch.zeros(6, 6, dtype=torch.float64)
    with pytest.raises(ConfigError, match="'0.weight' was"):
        packed()


@pytest.mark.parametrize(
    "value, why",
    [
        (torch.ones(3, dtype=torch.complex64).conj(), "conjugate view"),
        (torch.ones(3, dtype=torch.complex64).conj().imag, "negated view"),
        (torch.ones(1).expand(3), "is expanded"),
    ],
)
def test_a_tensor_whose_memory_does_not_hold_its_values_is_refused(value: torch.Tensor, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Manifest(nn.ParameterList([nn.Parameter(value)]))


def test_a_run_of_memory_is_sent_from_where_it_lies() -> None:
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(3, 3))
    layout, transfers = prepare(model, 4096)
    layout.look_up()
    runs = [layout.run_of(bucket, CPU) for bucket in transfers[0].buckets]
    assert [run is None for run in runs] == [False] * 4 + [True]
    assert runs[0] is not None and runs[0].data_ptr() == model[0].weight.data_ptr()


def test_autograd_finds_out_that_a_round_has_written() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    layout, transfers = prepare(model, 10**6)
    (bucket,) = transfers[0].buckets
    assert len(bucket.pieces) == 4
    loss = model(torch.ones(1, 3)).sum()
    with torch.no_grad():
        layout.look_up()
        layout.unpack(bucket, torch.ones(bucket.stop - bucket.start))
    assert all((parameter == 1.0).all() for parameter in model.parameters())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_autograd_finds_out_about_values_that_have_come_to_where_they_belong() -> None:
    model = nn.Linear(3, 3, bias=False)
    layout, transfers = prepare(model, 10**6)
    (bucket,) = transfers[0].buckets
    loss = model(torch.ones(1, 3, requires_grad=True)).sum()
    with torch.no_grad():
        layout.look_up()
        run = layout.run_of(bucket, CPU)
        assert run is not None
        memory_of(run)[:] = bytes(run.nbytes)
        layout.unpack(bucket, run)
    assert (model.weight == 0.0).all()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_round_inside_inference_mode_writes_too() -> None:
    with torch.inference_mode():
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        layout, transfers = prepare(model, 10**6)
        (bucket,) = transfers[0].buckets
        layout.look_up()
        layout.unpack(bucket, torch.ones(bucket.stop - bucket.start))
    assert all((parameter == 1.0).all() for parameter in model.parameters())


def test_what_was_packed_is_kept_for_its_flight_and_not_for_the_next_round() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    layout, (transfer,) = prepare(model, 10**6)
    (bucket,) = transfer.buckets
    kept = Memory(layout, [transfer], CPU, copies=Copies(), atomic=False)
    memory: RoundMemory

    def look() -> torch.Tensor:
        nonlocal memory
        layout.look_up()
        memory = kept.of_round([transfer], ModelCopy.NONE, RoundProfile())
        place = memory.acquire(transfer, bucket)
        memory.pack(bucket, place.values)
        assert place.lent is not None
        memory.keep(bucket, place.lent)
        return place.values.clone()

    def fly() -> torch.Tensor:
        place = memory.acquire(transfer, bucket)
        assert place.lent is not None and place.out is place.values
        memory.fill(bucket, place.values)
        memory.release(place)
        return place.values.clone()

    with torch.no_grad():
        first = look()
        model[0].weight.mul_(2.0)
        assert torch.equal(fly(), first)  # not copied again
        look()  # a round that does not take place
        model[0].weight.mul_(2.0)
        assert not torch.equal(look(), first)
        now = fly()
        assert not torch.equal(now, first)
        assert torch.equal(fly(), now)  # nothing is kept any more: copied anew, once more the same


def test_a_pool_lends_and_takes_back() -> None:
    pool = Pool(100, CPU)
    first, second = pool.acquire(), pool.acquire(60)
    assert first.data_ptr() != second.data_ptr() and first.numel() == 100
    pool.release(first)
    assert pool.acquire().data_ptr() == first.data_ptr()
    pool.release(second)
    larger = pool.acquire(101)
    assert larger.numel() == 101
    pool.release(first)  # too small by now
    assert pool.acquire().numel() == 101


def test_rows_are_aligned_and_kept() -> None:
    assert [aligned(n) for n in (0, 1, 64, 65)] == [0, 64, 64, 128]
    pool = Pool(3 * 64 + 63, CPU)
    buffer = pool.acquire()
    rows = pool.rows(buffer, torch.float64, 3)
    assert [row.data_ptr() - buffer.data_ptr() for row in rows] == [0, 64, 128]
    assert all(row.numel() == 8 and row.dtype == torch.float64 for row in rows)
    assert pool.rows(buffer, torch.float64, 3) is rows and pool.rows(buffer, torch.uint8, 0) == []
    assert [row.numel() for row in pool.rows(buffer, torch.uint8, 2)] == [64, 64]
    larger = pool.acquire(2 * aligned(1000))
    assert all(row.numel() >= 1000 for row in pool.rows(larger, torch.uint8, 2))


def test_a_journal_keeps_the_first_failure_and_adds_seconds_up() -> None:
    profile = RoundProfile()
    assert profile.hidden == 0.0
    for text in ("first", "second"):
        with profile.capture_failure("combine"):
            raise MemoryError(text)
    assert str(profile.failure) == "first" and profile.phases["combine"] > 0.0
    with pytest.raises(KeyboardInterrupt), profile.capture_failure("combine"):
        raise KeyboardInterrupt
    with pytest.raises(RuntimeError), profile.phase("vote"):
        raise RuntimeError
    assert profile.phases["vote"] > 0.0  # also where it failed
    profile.record_send(7)
    profile.record_send(0)
    assert profile.bytes_across == 7
    profile._first_post -= 100.0
    profile.add("across", 40.0)  # what is waited for is not hidden
    profile.arrived()
    assert 60.0 <= profile.hidden < 100.0


def test_what_a_round_did_not_take_in_waits_for_the_next() -> None:
    tracker = ContributionTracker(2)
    for effort in (1.0, 0.5):
        tracker.add_step(effort)
    tracker.add_count(8.0)
    taken = tracker.snapshot(0)
    assert taken == Snapshot(0, 2, 1.5, 8.0, False)
    assert (tracker.is_waiting(0), tracker.effort(0), tracker.count(0)) == (False, 0.0, 8.0)
    assert tracker.has_others(0) and not tracker.has_others(1)
    tracker.add_step(0.25)
    tracker.add_count(4.0)
    tracker.rollback(taken)
    again = ContributionTracker(2)
    again.load_state_dict(tracker.state_dict())
    for one in (tracker, again):
        assert [(one.snapshot(part).steps, one.effort(part), one.count(part)) for part in (0, 1)] == [
            (3, 0.0, 12.0)
        ] * 2
    again.commit(taken)
    assert (again.count(0), again.count(1), tracker.count(0)) == (4.0, 12.0, 12.0)


def test_what_changes_after_a_local_step_waits_and_counts_as_one_where_its_samples_were_counted_before() -> None:
    tracker = ContributionTracker(2)
    for _ in range(2):
        tracker.note_change()
        tracker.add_step()
    tracker.add_count(16.0)
    for part in (0, 1):
        tracker.commit(tracker.snapshot(part))
    assert not tracker.is_waiting(0) and tracker.count(0) == 0.0
    tracker.note_change()
    again = ContributionTracker(2)
    again.load_state_dict(tracker.state_dict())
    assert again.is_waiting(0) and again.has_others(0)
    assert (again.effort(0), again.count(0)) == (1.0, 8.0)  # nobody has measured what it amounts to
    again.add_effort(0.25)
    taken = again.snapshot(0)
    assert taken == Snapshot(0, 0, 0.25, 0.0, True) and not again.is_waiting(0) and again.is_waiting(1)
    again.rollback(taken)
    assert again.is_waiting(0) and (again.effort(0), again.count(0)) == (0.25, 8.0)
    again.add_count(3.0)
    assert again.count(0) == 3.0
    old = ContributionTracker(2)
    old.load_state_dict({"steps": [1, 0], "efforts": [1.0, 0.0], "counts": [2.0, 2.0]})  # as before there was more
    assert old.is_waiting(0) and not old.is_waiting(1)


def test_cells_that_hold_a_tensor_whole_follow_the_axis_of_the_others() -> None:
    (weight,) = Manifest(nn.ParameterDict({"weight": nn.Parameter(torch.ones(4, 4))})).entries
    whole = Division.REPLICATED
    assert canonical_axis(weight, [whole, whole]) == 0
    assert canonical_axis(weight, [whole, 1, 1]) == 1
    wanted = r"'weight' is not cut along one axis in all cells \(by cell: 0, replicated, 1\)"
    with pytest.raises(ConfigError, match=wanted):
        canonical_axis(weight, [0, whole, 1])


def test_aggregators_behind_each_other_use_the_same_memory() -> None:
    arena = Arena(Copies())
    arena.restart(1000)
    first = [arena.take(3, torch.float32), arena.take(100, torch.float64)]
    assert [one.data_ptr() % 8 for one in first] == [0, 0]
    assert first[0].data_ptr() + 64 == first[1].data_ptr()
    arena.restart(900)
    assert arena.take(50, torch.float32).data_ptr() == first[0].data_ptr()
    arena.restart(2000)
    assert arena.take(400, torch.float32).numel() == 400
