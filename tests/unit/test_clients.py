"""Clients and the count of local steps, in one process: each cell is a copy of the model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from xffl.aggregation.algorithms.clients import Client, FedProx, Scaffold, check_step
from xffl.aggregation.rounds.uncounted import digest_of
from xffl.aggregation.steps.normalized_steps import NormalizedSteps
from xffl.aggregation.steps.wrapped_optimizers import unwrap
from xffl.errors import CheckpointError, ConfigError

SGD = torch.optim.SGD


def weight(*values: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values or (1.0,)))


def step(optimizer: torch.optim.Optimizer, *gradients: float) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.tensor(gradients)
    optimizer.step()


def run(
    effort: NormalizedSteps, optimizer: torch.optim.Optimizer, steps: int, gradient: float = 1.0
) -> list[list[float]]:
    told = []
    for _ in range(steps):
        effort.before_step(optimizer)
        step(optimizer, gradient)
        told.append(effort.after_step(optimizer))
    return told


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 12), st.floats(0.01, 0.99))
def test_momentum_s_effort_is_fednova_s(steps: int, rho: float) -> None:
    optimizer = SGD([weight()], lr=0.1, momentum=rho)
    factors = run(NormalizedSteps([optimizer]), optimizer, steps)
    expected = (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)
    assert sum(factor for (factor,) in factors) == pytest.approx(expected, rel=1e-9)


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from([{}, {"momentum": 0.9}, {"momentum": 0.6, "nesterov": True}, {"momentum": 0.8, "dampening": 0.3}]),
    st.lists(st.floats(0.01, 1.0), min_size=1, max_size=6),
    st.lists(st.floats(0.01, 1.0), min_size=1, max_size=6),
)
def test_with_one_gradient_all_along_the_effort_is_what_was_moved(
    options: dict[str, float], first: list[float], second: list[float]
) -> None:
    """The oracle is torch's own SGD, over two rounds: the momentum outlives the first."""
    parameter = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = SGD([parameter], lr=0.1, **options)  # type: ignore[arg-type]
    effort = NormalizedSteps([optimizer])
    for rates in (first, second):
        before, reach = parameter.item(), 0.0
        for rate in rates:
            optimizer.param_groups[0]["lr"] = rate
            effort.before_step(optimizer)
            parameter.grad = torch.full((1,), 2.0, dtype=torch.float64)
            optimizer.step()
            (factor,) = effort.after_step(optimizer)
            reach += rate * factor
        assert before - parameter.item() == pytest.approx(2.0 * reach, rel=1e-9)


def test_other_optimizers_count_steps_and_a_cleared_momentum_starts_anew() -> None:
    adam = torch.optim.AdamW([weight()], lr=0.1)
    assert run(NormalizedSteps([adam]), adam, 3) == [[1.0]] * 3
    sgd = SGD([weight()], lr=0.1, momentum=0.5)
    effort = NormalizedSteps([sgd])
    assert run(effort, sgd, 3) == [[1.0], [1.5], [1.75]]
    sgd.state.clear()
    assert run(effort, sgd, 2) == [[1.0], [1.5]]


def test_a_step_of_several_groups_counts_by_their_elements() -> None:
    first = SGD([{"params": [weight(1.0)], "momentum": 0.5}, {"params": [weight(1.0)]}], lr=0.1)
    second = SGD([weight(1.0), weight(1.0)], lr=0.1, momentum=0.9)
    effort = NormalizedSteps([first, second])
    for expected in (1.0, (1.5 + 1.0 + 2 * 1.9) / 4):
        run(effort, first, 1)
        run(effort, second, 1)
        assert effort.of_step() == pytest.approx(expected)
    resumed = NormalizedSteps([first, second])
    resumed.load_state_dict(effort.state_dict())
    assert run(resumed, second, 1) == run(effort, second, 1) == [[pytest.approx(2.71)]]
    with pytest.raises(CheckpointError, match="1 optimizers, and there are 2"):
        effort.load_state_dict(NormalizedSteps([first]).state_dict())


def start(client: Client, parameters: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    client.setup({f"layer.{index}": one for index, one in enumerate(parameters)}, [optimizer])


def test_fedprox_pulls_to_the_last_agreed_weights() -> None:
    parameter, other, idle = weight(1.0, 2.0), weight(5.0), weight(3.0)
    optimizer = SGD([parameter, other, idle], lr=1.0)
    client = FedProx(mu=0.5)
    client.setup({"one": parameter, "idle": idle}, [optimizer])
    with torch.no_grad():
        parameter.add_(torch.tensor([4.0, -2.0]))
        other.add_(7.0)
        idle.add_(1.0)
    parameter.grad, other.grad = torch.tensor([1.0, 1.0]), torch.tensor([1.0])
    client.before_step(optimizer)
    assert parameter.grad.tolist() == [3.0, 0.0]
    assert other.grad.tolist() == [1.0]  # no round averages it
    assert idle.grad is None  # it is not trained
    saved = client.state_dict()
    client.after_round(is_dropped=False)
    client.before_step(optimizer)
    assert parameter.grad.tolist() == [3.0, 0.0]  # it is where the round left it
    client.load_state_dict(saved)
    client.before_step(optimizer)
    assert parameter.grad.tolist() == [5.0, -1.0]
    with pytest.raises(CheckpointError, match="idle"):
        client.load_state_dict({"anchors": {"one": torch.zeros(2)}})


@pytest.mark.parametrize("kind", [SGD, torch.optim.Adagrad, torch.optim.SparseAdam])
def test_clients_leave_sparse_gradients_sparse(kind: type[torch.optim.Optimizer]) -> None:
    """The oracle is the same training with dense gradients; SparseAdam takes none, and leaves other rows alone."""
    for make in (lambda: FedProx(mu=0.5), Scaffold)[: 2 if kind is SGD else 1]:
        found = []
        for is_sparse in (True, False) if kind is not torch.optim.SparseAdam else (True,):
            torch.manual_seed(0)
            table = nn.Embedding(5, 2, sparse=is_sparse)
            start = table.weight.detach().clone()
            optimizer = kind(table.parameters(), lr=0.25)
            client = make()
            client.setup({"weight": table.weight}, [optimizer])
            if isinstance(client, Scaffold):
                client._corrections[table.weight][3] = 2.0
            for words in ([1, 1, 2], [2, 4], [1, 4]):
                optimizer.zero_grad()
                table(torch.tensor(words)).square().sum().backward()
                client.before_step(optimizer)
                assert table.weight.grad is not None and table.weight.grad.is_sparse == is_sparse
                optimizer.step()
                client.after_step(optimizer, [1.0])
            client.before_round()
            client.after_round(is_dropped=False)
            found.append(table.weight.detach().clone())
        for other in found[1:]:
            torch.testing.assert_close(found[0], other)
        if kind is torch.optim.SparseAdam:
            assert found[0][[0, 3]].equal(start[[0, 3]]) and not (found[0] == start)[[1, 2, 4]].any()


def test_fedprox_without_a_pull_leaves_every_bit() -> None:
    parameter = weight(1.0, 2.0, 3.0)
    optimizer = SGD([parameter], lr=1.0)
    client = FedProx(mu=0)
    start(client, [parameter], optimizer)
    with torch.no_grad():
        parameter.copy_(torch.tensor([float("inf"), 0.0, 1.0]))
    parameter.grad = torch.tensor([1.0, -0.0, 2.0])
    client.before_step(optimizer)
    assert parameter.grad.view(torch.int32).tolist() == torch.tensor([1.0, -0.0, 2.0]).view(torch.int32).tolist()


class Cells:
    """Cells of a federation, each with a parameter ``[2]``, and rounds with equal weights."""

    def __init__(self, cells: int, **options: float) -> None:
        self.parameters = [weight(0.5, -0.5) for _ in range(cells)]
        self.optimizers = [SGD([one], **options) for one in self.parameters]  # type: ignore[arg-type]
        self.clients = [Scaffold() for _ in range(cells)]
        self.efforts = [NormalizedSteps([one]) for one in self.optimizers]
        for client, parameter, optimizer in zip(self.clients, self.parameters, self.optimizers, strict=True):
            start(client, [parameter], optimizer)

    def train(self, cell: int, gradients: Sequence[Sequence[float]]) -> None:
        optimizer = self.optimizers[cell]
        for gradient in gradients:
            self.efforts[cell].before_step(optimizer)
            self.parameters[cell].grad = torch.tensor(gradient)
            self.clients[cell].before_step(optimizer)
            optimizer.step()
            self.clients[cell].after_step(optimizer, self.efforts[cell].after_step(optimizer))

    def extra(self, cell: int) -> torch.Tensor:
        assert self.clients[cell].extra is not None
        return self.clients[cell].extra.get_parameter("layer.0").detach()  # type: ignore[union-attr]

    @torch.no_grad()
    def meet(self, *, is_taken: bool = True, dropped: Sequence[int] = ()) -> list[list[float]]:
        for client in self.clients:
            client.before_round()
        sent = [self.extra(cell).tolist() for cell in range(len(self.clients))]
        if is_taken:
            for tensors in (self.parameters, [self.extra(cell) for cell in range(len(self.clients))]):
                mean = torch.stack([one for cell, one in enumerate(tensors) if cell not in dropped]).mean(0)
                for tensor in tensors:
                    tensor.copy_(mean)
            for cell, client in enumerate(self.clients):
                client.after_round(is_dropped=cell in dropped)
        return sent

    def corrections(self) -> list[list[float]]:
        return [one.state_dict()["corrections"]["layer.0"].tolist() for one in self.clients]


@pytest.mark.parametrize(
    "options", [{}, {"momentum": 0.75}, {"maximize": True}, {"momentum": 0.5, "nesterov": True}], ids=str
)
def test_scaffold_sends_the_mean_gradient_and_corrects_by_the_difference(options: dict[str, float]) -> None:
    cells = Cells(2, lr=0.25, **options)
    gradients = [[[4.0, 1.0]] * 3, [[-2.0, 3.0]] * 5]
    for number in range(30):
        for cell, own in enumerate(gradients):
            cells.train(cell, own)
        sent = cells.meet()
        corrections = cells.corrections()
        assert [sum(both) for both in zip(*corrections, strict=True)] == pytest.approx([0.0, 0.0], abs=1e-5)
        # What the momentum holds from before the first round was corrected otherwise; that wears off.
        if "momentum" not in options or number in (0, 29):
            assert sent[0] == pytest.approx([4.0, 1.0], rel=1e-4) and sent[1] == pytest.approx([-2.0, 3.0], rel=1e-4)
            assert corrections[0] == pytest.approx([-3.0, 1.0], rel=1e-4)


def test_scaffold_is_the_paper_s_update() -> None:
    """Gradients that change and learning rates that change, against option II written out with c and c_i."""
    cells = Cells(3, lr=0.1)
    x = torch.tensor([0.5, -0.5], dtype=torch.float64)
    c, own = torch.zeros(2, dtype=torch.float64), [torch.zeros(2, dtype=torch.float64) for _ in range(3)]
    for number in range(4):
        locals_, fresh = [], []
        for cell in range(3):
            y, reach = x.clone(), 0.0
            generator = torch.Generator().manual_seed(10 * number + cell)
            for k in range(2 + cell):
                gradient = torch.randn(2, generator=generator)
                rate = 0.1 / (1 + k)
                cells.optimizers[cell].param_groups[0]["lr"] = rate
                cells.train(cell, [gradient.tolist()])
                y -= rate * (gradient.double() - own[cell] + c)
                reach += rate
            fresh.append(own[cell] - c + (x - y) / reach)
            locals_.append(y)
        cells.meet()
        x, c, own = torch.stack(locals_).mean(0), torch.stack(fresh).mean(0), fresh
        for cell in range(3):
            torch.testing.assert_close(cells.parameters[cell].detach().double(), x, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(cells.extra(cell).double(), c, rtol=1e-5, atol=1e-5)
            got = torch.tensor(cells.corrections()[cell]).double()
            torch.testing.assert_close(got, c - own[cell], rtol=1e-5, atol=1e-5)


def test_a_rejected_round_leaves_the_corrections_and_the_steps() -> None:
    rejected, plain = Cells(2, lr=0.5), Cells(2, lr=0.5)
    for cells in (rejected, plain):
        for is_taken in (True, cells is plain, True):
            cells.train(0, [[1.0, 2.0]])
            cells.train(1, [[3.0, -2.0]])
            if cells is rejected and not is_taken:
                before = cells.corrections()
                cells.meet(is_taken=False)
                assert cells.corrections() == before
            elif cells is rejected or is_taken:
                cells.meet()
    once = Cells(2, lr=0.5)
    for gradients in (1, 2):
        once.train(0, [[1.0, 2.0]] * gradients)
        once.train(1, [[3.0, -2.0]] * gradients)
        once.meet()
    assert rejected.corrections() == once.corrections()
    assert [one.tolist() for one in rejected.parameters] == [one.tolist() for one in once.parameters]


def test_a_dropped_cell_keeps_its_correction_and_sends_its_mean_gradient_again() -> None:
    cells = Cells(3, lr=0.5)
    own = [[1.0, 0.0], [3.0, 0.0], [8.0, 0.0]]
    for cell, gradient in enumerate(own):
        cells.train(cell, [gradient])
    cells.meet()
    before = cells.corrections()
    cells.train(0, [own[0]])
    cells.train(1, [own[1]])
    cells.train(2, [[float("nan"), 0.0]])
    cells.meet(dropped=[2])
    assert cells.corrections() == [[1.0, 0.0], [-1.0, 0.0], before[2]]
    for cell, gradient in enumerate(own):
        cells.train(cell, [gradient])
    assert cells.meet() == own
    assert cells.corrections() == before


def test_what_was_not_stepped_sends_what_was_agreed() -> None:
    cells = Cells(2, lr=0.5)
    cells.train(0, [[1.0, 2.0]])
    cells.train(1, [[3.0, 2.0]])
    cells.meet()
    cells.optimizers[0].param_groups[0]["lr"] = 0.0
    cells.train(0, [[9.0, 9.0]])
    cells.train(1, [[4.0, 2.0]])
    for _ in range(2):  # the second time after a rejected round
        assert cells.meet(is_taken=False) == [[2.0, 2.0], [4.0, 2.0]]
    cells.meet()
    assert [sum(both) for both in zip(*cells.corrections(), strict=True)] == [0.0, 0.0]


def test_scaffold_resumes() -> None:
    one = Cells(2, lr=0.5, momentum=0.5)
    for cell in range(2):
        one.train(cell, [[1.0 + cell, 2.0]])
    one.meet()
    one.train(0, [[5.0, 1.0]])
    two = Cells(2, lr=0.5, momentum=0.5)
    for cell in range(2):
        two.clients[cell].load_state_dict(copy.deepcopy(one.clients[cell].state_dict()))
        two.optimizers[cell].load_state_dict(copy.deepcopy(one.optimizers[cell].state_dict()))
        two.efforts[cell].load_state_dict(one.efforts[cell].state_dict())
        with torch.no_grad():
            two.parameters[cell].copy_(one.parameters[cell])
    for cells in (one, two):
        for cell in range(2):
            cells.train(cell, [[0.5, 2.0], [1.0, 1.0]])
        cells.meet()
    assert one.corrections() == two.corrections()
    assert [p.tolist() for p in one.parameters] == [p.tolist() for p in two.parameters]
    state = one.clients[0].state_dict()
    with pytest.raises(CheckpointError, match="layer"):
        one.clients[0].load_state_dict({**state, "corrections": {"layer.0": torch.zeros(3)}})


def test_scaffold_of_low_precision_keeps_variates_in_fp32_and_leaves_the_rest_alone() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)).bfloat16()
    inner, outer = (layer.weight for layer in model)
    optimizer = SGD([inner], lr=0.5)
    client = Scaffold()
    client.setup({"0.weight": inner, "1.weight": outer}, [optimizer])
    assert client.extra is not None
    assert [(name, one.dtype) for name, one in client.extra.named_parameters()] == [("0.weight", torch.float32)]
    client.state_dict()
    inner.grad = torch.ones(2, 2, dtype=torch.bfloat16)
    client.before_step(optimizer)
    assert inner.grad.dtype == torch.bfloat16


def closure_step() -> None:
    optimizer = SGD([weight()], lr=0.1)
    check_step(optimizer, (optimizer,), {"closure": lambda: 1.0})


def positional_closure_step() -> None:
    optimizer = SGD([weight()], lr=0.1)
    check_step(optimizer, (optimizer, lambda: 1.0), {})


def scaled_step() -> None:
    optimizer = SGD([weight()], lr=0.1)
    optimizer.grad_scale = torch.ones(())  # type: ignore[attr-defined]
    check_step(optimizer, (optimizer,), {})


def with_adam() -> None:
    parameter = weight()
    start(Scaffold(), [parameter], torch.optim.Adam([parameter]))


@pytest.mark.parametrize(
    "make, told",
    [
        (lambda: FedProx(mu=-1.0), "mu must be a number >= 0, got -1.0"),
        (lambda: FedProx(mu=float("nan")), "mu .* got nan"),
        (lambda: FedProx(mu=True), "mu .* got True"),
        (with_adam, "Adam"),
        (closure_step, r"step\(closure\)"),
        (positional_closure_step, r"step\(closure\)"),
        (scaled_step, "unscale_"),
    ],
)
def test_what_cannot_be_meant_is_refused(make: Callable[[], object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        make()


def test_the_text_names_the_options() -> None:
    assert str(FedProx(mu=0.5)) == "FedProx(mu=0.5)" and str(Scaffold()) == "Scaffold"
    optimizer = SGD([weight()], lr=0.1)
    check_step(optimizer, (optimizer, None), {"closure": None})


def wrapped(wrapper: str, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return an optimizer in one of the wrappers that do not call their parent's __init__."""
    if wrapper == "opacus":
        from opacus.optimizers import DPOptimizer

        return DPOptimizer(optimizer, noise_multiplier=0.0, max_grad_norm=1e6, expected_batch_size=1)
    # accelerate's is made like this; Lookahead changes the parameters after the inner step, and so has no round there.
    made = type(wrapper, (Holder,), {"__module__": f"{wrapper.lower()}.optimizer"})
    return made(optimizer)  # type: ignore[no-any-return]


class Holder(torch.optim.Optimizer):
    """An optimizer that was never initialized as one."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups

    def step(self, closure: None = None) -> None:
        self.optimizer.step()


def test_the_optimizer_in_a_known_wrapper_is_followed() -> None:
    model = nn.Linear(2, 2)
    optimizer = SGD(model.parameters(), lr=0.1)
    private = wrapped("opacus", optimizer)
    accelerated = wrapped("accelerate", private)
    assert (
        [one is optimizer for one in unwrap([accelerated])] == [True] == [one is optimizer for one in unwrap([private])]
    )
    steps = []
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    for is_skipped in (True, True, False, False):  # a virtual batch of three, and one of one
        for parameter in model.parameters():
            parameter.grad_sample = torch.ones(1, *parameter.shape)  # type: ignore[attr-defined]
        private.signal_skip_step(is_skipped)  # type: ignore[attr-defined]
        accelerated.step()
        private.zero_grad()
    assert len(steps) == 2
    with pytest.raises(ConfigError, match="SGD is given twice"):
        unwrap([private, optimizer])
    for strange in (wrapped("Lookahead", optimizer), wrapped("accelerate", wrapped("Lookahead", optimizer))):
        with pytest.raises(ConfigError, match=r"Lookahead does not call .*__init__.*optimizer=None.*scaling.step\(\)"):
            unwrap([strange])


def test_a_digest_tells_of_every_change() -> None:
    """A sum of bits and places alone misses that of all elements from 1 to 0.5, which are many powers of two."""
    model = nn.Module()
    model.register_parameter("row", nn.Parameter(torch.ones(2**21)))
    model.register_parameter("empty", nn.Parameter(torch.zeros(0)))
    model.register_parameter("complex", nn.Parameter(torch.zeros(3, dtype=torch.complex64)))
    model.register_parameter("frozen", nn.Parameter(torch.zeros(3), requires_grad=False))
    model.register_parameter("wide", nn.Parameter(torch.arange(4.0).double()))
    model.register_parameter("strided", nn.Parameter(torch.arange(12.0).bfloat16().reshape(3, 4).t()))
    kept = copy.deepcopy(model.state_dict())
    seen = {tuple(digest_of(model))}
    assert all(torch.equal(kept[name], value) for name, value in model.state_dict().items())
    model.frozen.data.add_(1.0)
    assert tuple(digest_of(model)) in seen
    changes: list[Callable[[], object]] = [
        lambda: model.row.data.mul_(0.5),
        lambda: model.row.data[-1].neg_(),
        lambda: model.row.data.copy_(model.row.data.flip(0)),
        lambda: model.complex.data[1].add_(1j),
        lambda: model.wide.data[2].mul_(1 + 1e-15),
        lambda: model.strided.data[2, 1].add_(1.0),
    ]
    for change in changes:
        change()
        now = tuple(digest_of(model))
        assert now not in seen
        seen.add(now)


def test_an_optimizer_that_steps_more_often_counts_as_often() -> None:
    critic, generator = SGD([weight(1.0, 1.0, 1.0)], lr=0.1), SGD([weight()], lr=0.1)
    effort = NormalizedSteps([critic, generator])
    for optimizer in (critic, critic, generator):
        effort.before_step(optimizer)
        effort.after_step(optimizer)
    again = NormalizedSteps([critic, generator])
    again.load_state_dict(effort.state_dict())
    assert effort.of_step() == again.of_step() == (2 * 3 + 1) / 4
    assert effort.of_step() == 0.0  # nothing was stepped since
    again.load_state_dict({"held": [[0.0], [0.0]]})  # as it was saved before there was more
    assert again.of_step() == NormalizedSteps([]).of_step() == 0.0
