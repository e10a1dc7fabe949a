"""Server (outer) optimizers: what turns averaged pseudo-gradients into new global weights.

A pseudo-gradient is the global value minus the cells' mean, so that an optimizer that goes down the gradient goes
towards the mean: SGD with a learning rate of 1 and no momentum ends exactly there.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from xffl.aggregation.algorithms.registry import check_options, locate, read_spec
from xffl.checks import number, one_of, shown
from xffl.errors import CheckpointError, ConfigError, XfflError
from xffl.naming import Writer

__all__ = [
    "PLAIN_MEAN",
    "RULES",
    "Adaptive",
    "ServerOptimizer",
    "asked_of",
    "load_options",
    "load_schedule",
    "options_of",
    "server_of",
]

Factory = Callable[..., Optimizer]
Schedule = Callable[[Optimizer], LRScheduler]

PLAIN_MEAN = ("none", "fedavg")
"""Names that ask for no server optimizer."""

_UNFIT = {
    "LBFGS": "it calls a closure again and again, and takes dot products over the whole model",
    "Adafactor": "its second moments are of a matrix's rows and columns, and it scales by norms of whole tensors",
    "Muon": "it makes whole matrices orthogonal",
    "SparseAdam": "it wants sparse gradients, and pseudo-gradients are dense",
}
"""Classes of torch.optim that cannot step flat pieces of shards, and why."""

_PROBE_ROUNDS = 5

_DEVICE = re.compile(r"(?:cpu|cuda)(?::\d{1,3})?", re.ASCII)
"""A device that somebody else may ask for"""


@dataclass(frozen=True)
class ServerOptimizer:
    """How to make a server optimizer, and how its learning rate goes.

    Making one is local, and tries it out on a few numbers. What it makes steps flat pieces of this rank's shards, cut
    anywhere, so only elementwise optimizers will do. ``str()`` tells the class, its options and its schedule, alike on
    all ranks that were given the same.

    :param factory: A class of :mod:`torch.optim`, or a function that takes a list of tensors and ``options`` and
        returns an optimizer. The same tensors must give the same steps on every rank that holds them.
    :param options: Its keywords.
    :param schedule: Called with the optimizer, returns the schedule of its learning rate: one step for each round that
        the optimizer takes part in.
    :param device: Where the state lives and the step is computed (``cpu`` saves GPU memory); ``None``: where rounds
        communicate from, the parameters' device, or the host's memory where that is gloo's.
    :raises ConfigError: if it cannot be made with these options, needs a closure, or is not elementwise.
    """

    factory: Factory
    options: Mapping[str, Any] = field(default_factory=dict)
    schedule: Schedule | None = None
    device: str | torch.device | None = None
    kept_names: tuple[str, ...] = field(init=False, repr=False, compare=False)
    """What the optimizer keeps for each element, by the names in its state."""
    number_names: tuple[str, ...] = field(init=False, repr=False, compare=False)
    """What it keeps as one number for all elements."""
    _text: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not callable(self.factory):
            raise ConfigError(f"server must be a name, a mapping, a class or a function, got {self.factory!r}")
        if self.device is not None:
            try:
                torch.empty(0, dtype=torch.float32, device=self.device)
            except (AssertionError, RuntimeError, TypeError) as wrong:  # torch asserts that it was built for a device
                reason = " ".join(str(wrong).split())
                raise ConfigError(
                    f"device {self.device!r} of the server is not here ({reason}); give cpu or another"
                ) from wrong
            object.__setattr__(self, "device", torch.device(self.device))  # without a number: each rank's current one
        for name, value in zip(("_text", "kept_names", "number_names"), self._try_out(), strict=True):
            object.__setattr__(self, name, value)

    def __str__(self) -> str:
        return self._text

    def make(self, tensors: list[torch.Tensor]) -> Optimizer:
        """Make the optimizer of some tensors; local."""
        made = self.factory(tensors, **self.options)
        if not isinstance(made, Optimizer):
            raise ConfigError(f"server {_title(self.factory)} must make a torch.optim.Optimizer, but makes {made!r}")
        return made

    def make_schedule(self, optimizer: Optimizer) -> LRScheduler | None:
        """Make the schedule of an optimizer's learning rate; local."""
        if self.schedule is None:
            return None
        made = self.schedule(optimizer)
        if not isinstance(made, LRScheduler):
            raise ConfigError(f"schedule {_title(self.schedule)} must make an LRScheduler, but makes {made!r}")
        return made

    def _try_out(self) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
        """Step a few numbers as one tensor, as two ranks' pieces, and as two pieces that take turns.

        Returns what was made, as text, and the names of what it keeps for each element, and for all of them.
        """
        title = _title(self.factory)
        for parent in inspect.getmro(self.factory) if inspect.isclass(self.factory) else ():
            if parent.__module__.startswith("torch.optim") and parent.__name__ in _UNFIT:
                raise ConfigError(_refusal(title, _UNFIT[parent.__name__]))
        # Uneven, so that means and norms of the pieces differ from those of the whole.
        start = torch.tensor([3.0, -0.5, 0.02, 7.0, -1.0, 0.3, 40.0], dtype=torch.float64, device="cpu")
        try:
            [whole], text, state = self._probe([start])
            pieces = torch.cat([piece for part in (start[:2], start[2:]) for piece in self._probe([part])[0]])
            in_turn = torch.cat(self._probe([start[:2], start[2:]])[0])
        except XfflError:
            raise
        except Exception as wrong:
            raise ConfigError(
                f"server {title} cannot step with the options {dict(self.options)!r}: {type(wrong).__name__}: {wrong}"
            ) from wrong
        if not torch.allclose(whole, pieces, rtol=1e-9, atol=0.0, equal_nan=True):
            raise ConfigError(_refusal(title, "the same numbers, cut in two or stepped again, went elsewhere"))
        if not torch.allclose(whole, in_turn, rtol=1e-9, atol=0.0, equal_nan=True):
            raise ConfigError(
                _refusal(title, "it is stepped once for each bucket, and keeps more than what is in its state")
            )
        kept = {name for name, one in state.items() if getattr(one, "shape", None) == start.shape}
        return text, tuple(sorted(kept)), tuple(sorted(state.keys() - kept))

    def _probe(self, pieces: list[torch.Tensor]) -> tuple[list[torch.Tensor], str, dict[str, Any]]:
        """Make some steps of pieces of one tensor that take turns; return them, what was made, and what it keeps."""
        pieces = [piece.clone() for piece in pieces]
        tensor = torch.cat(pieces)
        optimizer = self.make([tensor])
        schedule = self.make_schedule(optimizer)
        # What was made is told from what it holds: that is data, where a factory may be any function.
        text = f"{_title(type(optimizer))}({_plain(options_of(optimizer))})"
        if schedule is not None:
            text += f", {_title(type(schedule))}({_plain(schedule.state_dict())})"
        rates = []
        states: list[dict[str, Any]] = [{} for _ in pieces]
        for _ in range(_PROBE_ROUNDS):
            options = options_of(optimizer)
            rates.append(options["lr"])
            for turn, piece in enumerate(pieces):
                optimizer.param_groups[0].update(options)
                optimizer.state.pop(tensor, None)
                if states[turn]:
                    optimizer.state[tensor] = states[turn]
                tensor.data, tensor.grad = piece, piece.clone()
                optimizer.step()
                states[turn] = optimizer.state.get(tensor, {})
            if schedule is not None:
                schedule.step()
        # A schedule may be any function; its first rates tell more than the data that it holds.
        text += "" if schedule is None else f", first rates {_plain(rates)}"
        text += "" if self.device is None else f", on {torch.device(self.device).type}"
        return pieces, text, states[0]


def server_of(spec: object, *, writer: Writer) -> ServerOptimizer | None:
    """Return the server optimizer that a spec of ``writer`` asks for, ``None`` for the plain mean; local.

    A spec of the registry: an entry of kind ``server`` or a class of :mod:`torch.optim`, by name (``AdamW``) or dotted
    path, with options, ``device`` and ``schedule`` among them: a function, or a spec of a class in
    :mod:`torch.optim.lr_scheduler`. ``None``, ``none`` and ``fedavg`` are the plain mean. A :class:`ServerOptimizer` is
    returned as it is; another callable becomes its factory.
    """
    if spec is None or isinstance(spec, ServerOptimizer):
        return spec
    if not isinstance(spec, (str, Mapping)):
        return ServerOptimizer(spec)  # type: ignore[arg-type]
    name, options = read_spec("server", spec)
    if name in PLAIN_MEAN:
        if options:
            raise ConfigError(f"server {name!r} is the plain mean, which has no options such as {', '.join(options)}")
        return None
    device, schedule = options.pop("device", None), options.pop("schedule", None)
    if writer is not Writer.USER and device is not None and not _DEVICE.fullmatch(str(device)):
        raise ConfigError(f"device {str(device)[:40]!r} of the server comes from a file; there it is cpu or cuda")
    factory, preset = locate("server", name, writer=writer)
    checked = check_options(f"server {name!r}", factory, options, bound=preset, leading=1, writer=writer)
    return ServerOptimizer(factory, {**preset, **checked}, _schedule_of(schedule, writer), device)


def asked_of(optimizer: Optimizer, schedule: LRScheduler | None) -> dict[str, str]:
    """Write what a server optimizer was made with; local."""
    description = {"class": type(optimizer).__qualname__, "schedule": "none"}
    description |= {key: _plain(value) for key, value in options_of(optimizer).items()}
    if schedule is not None:
        description["schedule"] = type(schedule).__qualname__
        description |= {f"schedule's {key}": _plain(value) for key, value in schedule.state_dict().items()}
    return description


def _schedule_of(spec: object, writer: Writer) -> Schedule | None:
    if spec is None:
        return None
    if not isinstance(spec, (str, Mapping)):
        if not callable(spec):
            raise ConfigError(f"schedule of the server must be a name, a mapping or a function, got {spec!r}")
        return spec
    name, options = read_spec("schedule of the server", spec)
    factory, _ = locate("schedule of the server", name, writer=writer)
    what = f"schedule {name!r} of the server"
    return partial(factory, **check_options(what, factory, options, leading=1, writer=writer))


def _refusal(title: str, why: str) -> str:
    return f"server {title} cannot step flat pieces of shards: {why}; take an elementwise one, such as SGD or AdamW"


def _title(factory: object) -> str:
    kind = factory if hasattr(factory, "__qualname__") else type(factory)
    return f"{kind.__module__}.{kind.__qualname__}"


def options_of(optimizer: Optimizer) -> dict[str, Any]:
    """Return the options of an optimizer's only group."""
    return {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}


def load_options(optimizer: Optimizer, saved: object) -> None:
    """Take over the options of a saved state, which somebody else may have written; local.

    Raises CheckpointError where one is of another kind than the optimizer's own.
    """
    own = options_of(optimizer)
    checked = _alike(own, saved, "option")
    if "params" in checked:
        raise CheckpointError("the saved options of the server optimizer have params, which is no option")
    optimizer.param_groups[0].update(checked)


def load_schedule(schedule: LRScheduler, saved: object) -> None:
    """Take over the saved state of a schedule, which somebody else may have written; local.

    Raises CheckpointError where it is of another kind of schedule, or would take the place of the schedule's methods.
    """
    # LRScheduler.load_state_dict writes whatever it is given over the object's attributes.
    checked = _alike(schedule.state_dict(), saved, "value of the schedule")
    for name in checked:
        if name == "optimizer" or callable(getattr(type(schedule), name, None)):
            raise CheckpointError(f"the saved schedule of the server has {name!r}, which is no state of a schedule")
    try:
        schedule.load_state_dict(checked)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"the saved schedule of the server does not fit {_title(type(schedule))} ({type(error).__name__}: "
            f"{error}); go on with the same server"
        ) from error


def _alike(own: Mapping[str, Any], saved: object, what: str) -> dict[str, Any]:
    """Return saved values by name, copied, if those that are here, too, are of the same kind."""
    if not isinstance(saved, Mapping):
        raise CheckpointError(
            f"the saved {what}s of the server are {shown(saved)}, no mapping; go on with the same server"
        )
    for name, value in saved.items():
        mine = own.get(name) if isinstance(name, str) else None
        if not isinstance(name, str) or not (mine is None or _kind(mine) == _kind(value)):
            raise CheckpointError(
                f"the saved {what} {shown(name)} of the server is {shown(value)}, here {shown(mine)}; go on with the "
                "same server"
            )
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in saved.items()}


def _kind(value: object) -> str:
    """Return what a saved value may be replaced by."""
    if isinstance(value, bool):
        return "a switch"
    if isinstance(value, (int, float)):
        return "a number" if math.isfinite(value) else "a number that is not finite"
    if isinstance(value, (list, tuple)):
        return f"{len(value)} numbers" if all(_kind(one) == "a number" for one in value) else "a list"
    return type(value).__name__


def _plain(value: object) -> str:
    """Write numbers and words out; of anything else only the type, as its text may differ between processes."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    if isinstance(value, torch.Tensor):
        return repr(value.tolist())
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={_plain(value[key])}" for key in sorted(value, key=str))
    if isinstance(value, (list, tuple)):
        return f"({', '.join(_plain(one) for one in value)})"
    return _title(type(value))


RULES = ("adagrad", "adam", "yogi")
"""How the second moment ``v`` takes in a new pseudo-gradient."""


class Adaptive(Optimizer):
    """Step by ``lr * m / (sqrt(v) + tau)``, with moments of the pseudo-gradients (global minus mean).

    Elementwise, so it may run on any cut of the parameters. Each tensor has the state ``m``, ``v`` (in its dtype, on
    its device) and ``step``. With ``g`` the pseudo-gradient, ``m = beta1 m + (1 - beta1) g``, and ``v`` becomes

    - ``adagrad``: ``v + g^2`` (``beta2`` is not read),
    - ``adam``: ``beta2 v + (1 - beta2) g^2``,
    - ``yogi``: ``v - (1 - beta2) g^2 sign(v - g^2)``.

    Source: Reddi et al., 2021, arXiv 2003.00295, algorithm 2, which wants ``v`` to start from ``tau^2`` at least; the
    manual says where other programs differ.

    :param params: Tensors to step, or parameter groups.
    :param lr: Server learning rate, 0 or more.
    :param betas: Decay of ``m`` and of ``v``, each from 0 to below 1.
    :param tau: Added to the root of ``v``, above 0: the larger, the closer to a plain step.
    :param rule: One of :data:`RULES`.
    :param initial: ``v`` before the first step, 0 or more; ``None`` for ``tau^2``.
    :param is_bias_corrected: Multiply the learning rate of step ``t`` by ``sqrt(1 - beta2^t) / (1 - beta1^t)`` (Kingma
        and Ba, 2015, arXiv 1412.6980). Not with ``adagrad``, whose ``v`` is a sum.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.99),
        tau: float = 1e-3,
        *,
        rule: str = "adam",
        initial: float | None = None,
        is_bias_corrected: bool = False,
    ) -> None:
        one_of("rule", rule, RULES)
        number("lr", lr, 0.0, hint="give the server's learning rate")
        if len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
            raise ConfigError(f"betas must be two numbers >= 0 and < 1, got {betas!r}; give the decays of m and v")
        number("tau", tau, above=0.0, hint="the paper's is 1e-3")
        if initial is not None:
            number("initial", initial, 0.0, hint=f"leave it out for tau^2 = {tau**2}")
        if is_bias_corrected and rule == "adagrad":
            raise ConfigError("is_bias_corrected=True needs rule adam or yogi: adagrad's v is a sum without a bias")
        defaults = {
            "lr": lr,
            "betas": tuple(betas),
            "tau": tau,
            "rule": rule,
            "initial": tau**2 if initial is None else initial,
            "is_bias_corrected": is_bias_corrected,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step along the gradients; local."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for tensor in group["params"]:
                if tensor.grad is not None:
                    self._step_tensor(tensor, tensor.grad, group)
        return loss

    def _step_tensor(self, tensor: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[tensor]
        if not state:
            state["step"] = torch.tensor(0.0, dtype=torch.float32)
            state["m"] = torch.zeros_like(tensor)
            state["v"] = torch.full_like(tensor, group["initial"])
        m, v = state["m"], state["v"]
        beta1, beta2 = group["betas"]
        state["step"] += 1
        m.lerp_(grad, 1 - beta1)
        if group["rule"] == "adagrad":
            v.addcmul_(grad, grad)
        elif group["rule"] == "adam":
            v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        else:
            square = grad * grad
            v.addcmul_(square, (v - square).sign_(), value=beta2 - 1)
        lr = group["lr"]
        if group["is_bias_corrected"]:
            count = state["step"].item()
            lr = lr * math.sqrt(1 - beta2**count) / (1 - beta1**count)
        tensor.addcdiv_(m, v.sqrt().add_(group["tau"]), value=-lr)
