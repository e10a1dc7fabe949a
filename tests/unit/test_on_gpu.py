"""What is asked of a GPU and of NCCL, seen without either."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch.autograd.profiler import profile
from torch.overrides import TorchFunctionMode

from tests.worlds import fake_world
from xffl.aggregation.arithmetic import combined, weighted_mean
from xffl.aggregation.engine.streams import GpuProfile, StreamWork
from xffl.aggregation.engine.transport import Progress
from xffl.aggregation.pending import Background
from xffl.aggregation.rounds.offer import StepTimer
from xffl.cluster.environment import detect_environment
from xffl.cluster.network import Timeouts
from xffl.distributed import session
from xffl.distributed.distributed_state import DistributedState
from xffl.distributed.values.norms import norms_of
from xffl.errors import LaunchError, RoundError
from xffl.parallel.native import LossScale

GPU = torch.device("cuda", 3)


class Stream:
    """Stands for a GPU's stream, and counts how often the host waits for it."""

    def __init__(self) -> None:
        self.device, self.waits = GPU, 0

    def synchronize(self) -> None:
        self.waits += 1

    def wait_stream(self, other: Stream) -> None:
        assert other is not self


class Event:
    """Comes to pass when it has been asked for often enough."""

    left = 0.0

    def record(self, stream: Stream) -> None:
        assert stream.device == GPU

    def query(self) -> bool:
        Event.left -= 1
        return Event.left <= 0


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    """Give the stream that is everybody's current one on the GPU; to wait for all of the GPU fails."""
    current = Stream()

    def current_stream(device: torch.device) -> Stream:
        assert device == GPU
        return current

    def refuse(device: object = None) -> None:
        raise AssertionError("a round under way would be waited for, too")

    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    monkeypatch.setattr(torch.cuda, "synchronize", refuse)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    return current


def test_a_gpu_is_waited_for_by_the_host(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Event, "left", 3)
    Progress(GPU, 60.0).drain()
    assert Event.left == 0
    monkeypatch.setattr(Event, "left", math.inf)
    with pytest.raises(RuntimeError, match=r"a rank did not answer within 0\.008 s"):
        Progress(GPU, 0.01).drain()


def test_steps_end_without_the_round_behind_them(stream: Stream) -> None:
    with StepTimer(GPU).paused():
        assert stream.waits == 1


def test_a_background_thread_works_on_its_gpu(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, object, bool]] = []

    def note(what: str, value: object) -> None:
        seen.append((what, value, threading.current_thread() is threading.main_thread()))

    @contextmanager
    def entered(value: object) -> Iterator[None]:
        note("stream", value)
        yield

    monkeypatch.setattr(torch.cuda, "set_device", lambda device: note("device", device))
    monkeypatch.setattr(torch.cuda, "stream", entered)
    other: Any = Stream()
    assert Background(lambda: 7, other).result() == 7
    assert seen == [("device", GPU, False), ("stream", other, False)]


def test_the_callers_stream_does_not_wait_for_a_round_that_failed(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The round's stream may never end then, and with it the next step, or the checkpoint."""
    joined: list[object] = []
    monkeypatch.setattr(stream, "wait_stream", joined.append, raising=False)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    other: Any = Stream()

    def fail() -> None:
        raise RoundError("planted")

    with pytest.raises(RoundError, match="planted"):
        Background(fail, other).result()
    with pytest.raises(RoundError, match="planted"), StreamWork(other):
        fail()
    assert joined == []
    assert Background(lambda: 7, other).result() == 7
    with StreamWork(other):
        pass
    assert joined == [other, other]


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Pretend that torch sees four GPUs and works on the last; give those that it is then told to work on."""
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: device)
    return chosen


@pytest.mark.parametrize("asked, expected", [("cuda", GPU), (torch.device("cuda"), GPU), (1, torch.device("cuda", 1))])
def test_a_state_works_on_the_current_gpu(asked: Any, expected: torch.device, four_gpus: list[torch.device]) -> None:
    state = DistributedState()
    state.set_exec_device(asked, streams=2)
    assert four_gpus == [expected] and state.current_device == expected and state.streams == (expected, expected)


@pytest.mark.parametrize("asked", [None, "cuda", torch.device("cuda")])
def test_ranks_of_a_node_get_a_gpu_each(asked: Any, four_gpus: list[torch.device]) -> None:
    node = {
        "LOCAL_WORLD_SIZE": "4",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "a1",
        "MASTER_PORT": "9",
    }
    requests = []
    for rank in map(str, range(4)):
        place = detect_environment({"RANK": rank, "WORLD_SIZE": "4", "LOCAL_RANK": rank, **node})
        requests.append(
            session._request(
                place,
                files=None,
                backend="gloo",  # NCCL is in no build of torch for CPUs
                device=asked,
                federated=None,
                hsdp=None,
                streams=None,
                timeouts=Timeouts.within(60.0),
                parameters=None,
                link_backend=None,
            )
        )
    assert [request.device for request in requests] == [torch.device("cuda", rank) for rank in range(4)]


@pytest.mark.parametrize(
    "ranks, backend, synchronize, is_late, destroys",
    [
        (4, "nccl", False, False, False),
        (4, "cpu:gloo,cuda:nccl", False, False, False),
        (4, "nccl", True, True, False),
        (4, "nccl", True, False, True),
        (1, "nccl", False, False, True),
        (4, "gloo", False, False, True),
        (4, "gloo", True, True, True),
    ],
)
def test_who_leaves_alone_waits_for_nobody(
    ranks: int, backend: str, synchronize: bool, is_late: bool, destroys: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL waits for what a group still carries when it is destroyed: any group, not the world alone."""
    barriers: list[object] = []
    destroyed: list[str] = []
    destroy = dist.destroy_process_group

    def wait(group: object) -> None:
        barriers.append(group)
        if is_late:
            raise RuntimeError("somebody is missing")

    def note(group: dist.ProcessGroup | None = None) -> None:
        destroyed.append("world" if group is None else group.group_desc)
        destroy(group)

    with fake_world(ranks, 0), monkeypatch.context() as patch:
        state = DistributedState()
        state.set_global("fake", torch.device("cpu"), "", 0, 0, ranks)
        if ranks > 1:
            state.set_federated_scaling((2, 2), 1)
        state.backend = backend  # as if its groups were NCCL's
        patch.setattr(session, "barrier", lambda: wait(None))
        patch.setattr(dist, "destroy_process_group", note)
        if is_late:
            with pytest.raises(LaunchError, match=r"rank 0 could not wait .* \(somebody is missing\)"):
                session.cleanup_distributed_process_group(state, synchronize=synchronize)
        else:
            session.cleanup_distributed_process_group(state, synchronize=synchronize)
        assert not state.is_federated_scaling_setup() and dist.is_initialized() is not destroys
    assert len(barriers) == synchronize
    assert destroyed == (["world"] if destroys else [])


class Mark:
    """A mark on a stream of which a test says when the GPU comes to it."""

    made: ClassVar[list[Mark]] = []

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.milliseconds: float | None = None
        self.is_recorded = False
        Mark.made.append(self)

    def record(self) -> None:
        self.is_recorded = True

    def query(self) -> bool:
        assert self.is_recorded
        return self.milliseconds is not None

    def elapsed_time(self, end: Mark) -> float:
        assert self.milliseconds is not None and end.milliseconds is not None
        return end.milliseconds - self.milliseconds


def test_phases_are_timed_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Mark)
    monkeypatch.setattr(Mark, "made", [])
    marks: list[Any] = []
    profile = GpuProfile(marks)
    with profile.phase("across"):
        profile.record_send(8)
    with profile.phase("across"):
        profile.arrived()
    with profile.capture_failure("combine"):
        raise ValueError("planted")
    assert str(profile.failure) == "planted" and profile.hidden == 0.0
    *come, last = Mark.made
    for mark, moment in zip(come, (1000.0, 1200.0, 2500.0, 8000.0, 9000.0, 9000.0, 9500.0), strict=True):
        mark.milliseconds = moment
    # The GPU has not come to the last mark, so the time that the host took has to do: next to none.
    assert last.is_recorded
    assert profile.hidden == pytest.approx(9.0 - 1.2 - (1.5 + 1.0))
    phases = profile.phases
    assert phases["across"] == pytest.approx(1.5 + 1.0) and 0.0 <= phases["combine"] < 0.1
    assert profile.phases == phases and profile.bytes_across == 8
    profile.add("wait", 2.0)
    assert profile.phases == phases | {"wait": 2.0}
    following = GpuProfile(marks)
    for _ in range(5):
        with following.phase("across"):
            pass
    assert len(Mark.made) == 10  # eight of which were the first round's


class Calls(TorchFunctionMode):
    """Count what is asked of tensors."""

    number = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("cells", [2, 5])
def test_a_bucket_is_combined_in_few_calls_beside_a_cpu(cells: int, dtype: torch.dtype) -> None:
    """The meta device has no values, so to ask for one, as the host would wait for one of a GPU, fails."""
    values = [torch.empty(2**22, dtype=dtype, device="meta") for _ in range(cells)]
    out = torch.empty_like(values[0])
    for call in (
        lambda: weighted_mean(values, [1.0 + cell for cell in range(cells)], out),
        lambda: combined(lambda rows, into: torch.mean(rows, 0, out=into), values, out),
    ):
        with Calls() as calls:
            call()
        assert 0 < calls.number <= 20 * cells  # piece by piece as on a CPU: hundreds


def operators(told: profile) -> int:
    """Return how many operators were called, without those that they have called themselves."""
    return sum(event.cpu_parent is None for event in told.function_events)


def test_a_step_takes_few_operators_for_all_gradients() -> None:
    """On a GPU each is a kernel or more; tensor by tensor they were six for each to unscale, and four for the norm."""
    parameters = [torch.nn.Parameter(torch.ones(8, 8)) for _ in range(100)]
    for number, parameter in enumerate(parameters):
        parameter.grad = torch.full((8, 8), 1.0 + number)
    cpu = torch.device("cpu")
    scale = LossScale(4.0, device=cpu)
    with profile() as told:
        assert not scale.unscale(parameters)
    assert 0 < operators(told) <= 20 and parameters[-1].grad is not None and parameters[-1].grad[0, 0] == 25.0
    with profile() as told:
        norms = norms_of([parameter.grad for parameter in parameters if parameter.grad is not None], 2.0, cpu)
    assert 0 < operators(told) <= 20 and torch.equal(norms, 2.0 * torch.arange(1, 101, dtype=torch.float64))
