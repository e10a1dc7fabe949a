"""The server (outer) optimizer: a rule, a schedule of its learning rate, and the device where it steps.

See :mod:`xffl.aggregation.algorithms.server_rules` for what a rule computes.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.optim.lr_scheduler import LRScheduler

from xffl.aggregation.algorithms.registry import (
    check_options,
    describe_options,
    known_path,
    locate,
    options_beside,
    read_spec,
)
from xffl.aggregation.algorithms.server_rules import Numbers, ServerRule
from xffl.aggregation.arithmetic import is_built_in, piece_length
from xffl.checks import number
from xffl.errors import CheckpointError, ConfigError, XfflError
from xffl.naming import Writer
from xffl.reading import Fields

__all__ = [
    "PLAIN_MEAN",
    "NamedSchedule",
    "SavedServer",
    "ServerOptimizer",
    "read_saved_server",
    "schedule_of",
    "server_of",
    "take_step",
]

Schedule = Callable[[int], float]
"""A user's function of the step, from 0: the factor by which the learning rate is multiplied"""

PLAIN_MEAN = ("none", "fedavg")
"""Names of the plain mean, without a server optimizer."""

MOST_NUMBERS = 8
"""The most numbers of a rule's step: every rank sends its numbers in the vote."""

_RATES_SHOWN = 5
_DEVICE = re.compile(r"(?:cpu|cuda)(?::\d{1,3})?", re.ASCII)
"""Devices that a file or a peer may name"""
_BUILT_IN = "xffl.aggregation.algorithms."


@dataclass(frozen=True)
class NamedSchedule:
    """A schedule by name: a function of :mod:`xffl.aggregation.algorithms.server_schedules`, with its options."""

    function: Callable[..., float]
    options: Mapping[str, Any]

    def __call__(self, step: int, lr: float) -> float:
        """Return the learning rate of a step; pure."""
        return self.function(step, lr, **self.options)

    def __repr__(self) -> str:
        return f"{self.function.__name__}({_plain(self.options)})"


@dataclass(frozen=True)
class ServerOptimizer:
    """How a round's pseudo-gradient changes the global model.

    Local. ``str()`` names the rule, its options and the schedule, with the same text on all ranks.

    :param rule: What is computed: an object of :mod:`xffl.aggregation.algorithms.server_rules`, or of your own class.
    :param schedule: The learning rate (the number ``lr`` of the rule) in each step: a name with options, such as
        ``cosine:T_max=100``, or a mapping, which become a :class:`NamedSchedule`; or a function of the step, from 0,
        that returns a factor. Only the first rank's result is used. ``None`` for a constant rate.
    :param device: Where the state is kept and the step is computed (``cpu`` saves GPU memory). ``None`` for the device
        from which rounds communicate: the parameters' device, or with gloo the host's memory.
    :param clip: Greatest L2 norm of the pseudo-gradient, over the part of the model that a round exchanges, above 0: if
        the norm is greater, the pseudo-gradient is multiplied by ``clip / norm`` before the rule gets it. ``None`` for
        no limit.
    :raises ConfigError: if ``rule`` is not a rule or does not step element by element, or the schedule fails.
    """

    rule: ServerRule
    schedule: NamedSchedule | Schedule | str | Mapping[str, Any] | None = None
    device: str | torch.device | None = None
    clip: float | None = None

    def __post_init__(self) -> None:
        _check_rule(self.rule)
        if self.clip is not None:
            limit = number("clip of the server", self.clip, above=0.0, hint="give the pseudo-gradient's greatest norm")
            object.__setattr__(self, "clip", limit)
        if self.device is not None:
            try:
                torch.empty(0, dtype=torch.float32, device=self.device)
            except (AssertionError, RuntimeError, TypeError) as wrong:  # torch asserts that it was built for a device
                reason = " ".join(str(wrong).split())
                raise ConfigError(
                    f"device {self.device!r} of the server is not available ({reason}); give cpu or another"
                ) from wrong
            object.__setattr__(self, "device", torch.device(self.device))  # without a number: each rank's current one
        object.__setattr__(self, "schedule", schedule_of(self.schedule, Writer.USER))
        is_own = not is_built_in(self.rule)
        rule = _copy_of(self.rule) if is_own else self.rule
        for step in range(_RATES_SHOWN):
            self._numbers_of(rule, step)
        if is_own:
            _probe(rule)
            _try_out(rule)

    def __str__(self) -> str:
        text = f"{_title(self.rule)}({_plain(_attributes(self.rule))})"
        if isinstance(self.schedule, NamedSchedule):
            text += f", {self.schedule!r}"
        elif self.schedule is not None:  # a function has no text of its options; its first rates stand for them
            rates = [self.numbers(step)["lr"] for step in range(_RATES_SHOWN)]
            text += f", {_title(self.schedule)}, first rates {_plain(rates)}"
        if self.clip is not None:
            text += f", clip={self.clip!r}"
        return text if self.device is None else f"{text}, on {torch.device(self.device).type}"

    def numbers(self, step: int) -> Numbers:
        """Return the numbers of a step, which one rank computes for all, with the schedule's learning rate; local.

        Raises ConfigError if the rule or the schedule does not return finite numbers.
        """
        return self._numbers_of(self.rule, step)

    def _numbers_of(self, rule: ServerRule, step: int) -> Numbers:
        """Return the numbers of this rule, or of a copy of it, with the schedule's learning rate."""
        numbers = _numbers_of(rule, step)
        if self.schedule is not None:
            if "lr" not in numbers:
                raise ConfigError(
                    f"a schedule changes the number lr, and {_title(self.rule)} has {', '.join(numbers) or 'none'}; "
                    "leave the schedule out, or name its learning rate lr"
                )
            numbers = {**numbers, "lr": self._scheduled(step, numbers["lr"])}
        return {name: number(f"{name} of {_title(self.rule)}", value) for name, value in numbers.items()}

    def _scheduled(self, step: int, lr: float) -> float:
        """Return the learning rate that the schedule gives a step."""
        schedule, what = self.schedule, f"the schedule of the server's learning rate, {_title(self.schedule)},"
        hint = "give a function of the step, from 0, that returns a factor of the rate, or a schedule by name"
        assert schedule is not None and not isinstance(schedule, (str, Mapping)), "__post_init__ has made it a function"
        try:
            rate: Any = schedule(step, lr) if isinstance(schedule, NamedSchedule) else schedule(step)
        except XfflError:
            raise
        except Exception as wrong:
            raise ConfigError(f"{what} fails at step {step}: {type(wrong).__name__}: {wrong}; {hint}") from wrong
        checked = number(f"what {what} returns at step {step}", rate, 0.0, hint=hint)
        return checked if isinstance(schedule, NamedSchedule) else lr * checked

    @property
    def asked(self) -> dict[str, str]:
        """The rule, the schedule, the clip and their options as texts, with which a saved state is compared."""
        asked = {"class": type(self.rule).__qualname__, "schedule": "none"}
        asked |= {name: _plain(value) for name, value in _attributes(self.rule).items()}
        if isinstance(self.schedule, NamedSchedule):
            asked["schedule"] = self.schedule.function.__name__
            asked |= {f"schedule's {name}": _plain(value) for name, value in self.schedule.options.items()}
        elif self.schedule is not None:
            asked["schedule"] = _title(self.schedule)
        asked["clip"] = "none" if self.clip is None else _plain(self.clip)
        return asked

    def check_saved(self, saved: SavedServer, what: str, hint: str) -> None:
        """Raise CheckpointError if a state was saved by a server with another rule, options or schedule; local.

        :param saved: The state.
        :param what: What the state belongs to: the first words of the message.
        :param hint: How to start without the state: the last words of the message.
        """
        asked = self.asked
        others = sorted(key for key in asked.keys() & saved.asked.keys() if not _alike(asked[key], saved.asked[key]))
        if others:
            theirs = ", ".join(f"{key}={saved.asked[key]}" for key in others)
            ours = ", ".join(f"{key}={asked[key]}" for key in others)
            raise CheckpointError(
                f"{what} is that of a server optimizer with {theirs}, and this one has {ours}; resume with the same "
                f"server, options and schedule, or {hint}"
            )
        names = self.state_names if saved.step else ()
        if {*saved.elements} != {*names}:
            raise CheckpointError(
                f"{what} has {', '.join(sorted(saved.elements)) or 'nothing'} for each element after {saved.step} "
                f"steps, and the server keeps {', '.join(sorted(names)) or 'nothing'}; load another one, or {hint}"
            )

    @property
    def state_names(self) -> tuple[str, ...]:
        """The names of the rule's state tensors."""
        return tuple(self.rule.init(torch.zeros(1, dtype=torch.float32, device="cpu")))


def take_step(
    rule: ServerRule | None,
    values: torch.Tensor,
    mean: torch.Tensor,
    state: Mapping[str, torch.Tensor],
    numbers: Numbers,
    scale: float = 1.0,
) -> None:
    """Step flat values of the global model in place, towards the cells' combined values; local.

    The pseudo-gradient is ``scale * (written - mean)``, where ``written`` are the values rounded to the model's type,
    as the model got them; so the rounding error does not count as a step of the cells. The values are stepped in pieces
    that fit in the cache together with their gradient and state.

    :param rule: The rule; ``None`` to subtract the pseudo-gradient itself.
    :param values: Elements of the global model, in fp32 (fp64 for fp64), on the server's device.
    :param mean: The combined values, in the model's type, on the same device; may be overwritten.
    :param state: The rule's state of these elements.
    :param numbers: The rule's numbers of this step.
    :param scale: The combiner's scale of the step.
    """
    length = piece_length(values.device)
    is_alike = mean.dtype == values.dtype
    for start in range(0, len(values), length):
        piece = slice(start, start + length)
        kept, new = values[piece], mean[piece]
        if is_alike:
            gradient = torch.sub(kept, new, out=new)
        else:
            gradient = torch.sub(kept.to(mean.dtype).to(kept.dtype), new.to(kept.dtype))
        if scale != 1.0:
            gradient.mul_(scale)
        if rule is None:
            kept.sub_(gradient)
        else:
            rule.step(kept, gradient, {name: tensor[piece] for name, tensor in state.items()}, numbers)


# By name --------------------------------------------------------------------------------------------------------------


def server_of(spec: object, *, writer: Writer) -> ServerOptimizer | None:
    """Return the server optimizer of a spec that ``writer`` wrote, ``None`` for the plain mean; local.

    A spec names an entry of kind ``server``, an optimizer by torch's name (``AdamW``, ``torch.optim.SGD``) or, by its
    dotted path, a rule of the user's. Its options are those of the rule, and ``device``, ``schedule`` and ``clip``.
    ``None``, ``none`` and ``fedavg`` stand for the plain mean. A :class:`ServerOptimizer` is returned as it is; any
    other object is taken for a rule.
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
    beside = {name: options.pop(name, None) for name in options_beside("server")}
    device = beside["device"]
    if writer is not Writer.USER and device is not None and not _DEVICE.fullmatch(str(device)):
        raise ConfigError(
            f"device {str(device)[:40]!r} of the server comes from a file, where only cpu and cuda are allowed"
        )
    target, preset = locate("server", name, writer=writer)
    if "rule" in preset and "rule" in options:
        raise ConfigError(
            f"server {name!r} has the rule {preset['rule']}, got the option rule={options['rule']}; leave rule out, or "
            "give the server with that rule: fedadagrad, fedadam or fedyogi"
        )
    checked = check_options(
        f"server {name!r}", target, options, bound=preset, writer=writer, beside=options_beside("server")
    )
    try:
        rule = target(**{**preset, **checked})
    except TypeError as wrong:
        raise ConfigError(f"server {name!r} cannot be made with {options}: {wrong}") from wrong
    schedule = schedule_of(beside["schedule"], writer)
    return ServerOptimizer(rule, schedule=schedule, device=device, clip=_number_of(beside["clip"]))


def _number_of(text: Any) -> Any:
    """Return the number of a text such as ``1.0``, and anything else as it is."""
    try:
        return float(text) if isinstance(text, str) else text
    except ValueError:
        return text


def schedule_of(spec: object, writer: Writer) -> NamedSchedule | Schedule | None:
    """Return the schedule of a spec that ``writer`` wrote: a name, the dotted path of a function, or a function."""
    if spec is None or isinstance(spec, NamedSchedule):
        return spec
    if not isinstance(spec, (str, Mapping)):
        _check_schedule(spec)
        if not callable(spec):
            raise ConfigError(f"the server's schedule must be a name, a mapping or a function, got {spec!r}")
        return spec
    name, options = read_spec("server_schedule", spec)
    what = f"server schedule {name!r}"
    function, _ = locate("server_schedule", name, writer=writer)
    if not getattr(function, "__module__", "").startswith(_BUILT_IN):
        return partial(function, **check_options(what, function, options, leading=1, writer=writer))
    then = schedule_of(options.pop("then", None), writer)
    checked = check_options(what, function, options, leading=2, writer=writer)
    for option in [*inspect.signature(function).parameters.values()][2:]:
        if option.default is option.empty and option.name not in checked:
            takes = describe_options(function, leading=2)
            raise ConfigError(f"{what} needs the option {option.name}; it takes {takes}")
    if then is not None:
        # A user's function returns a factor, not a rate.
        checked["then"] = then if isinstance(then, NamedSchedule) else NamedSchedule(_factor, {"function": then})
    return NamedSchedule(function, checked)


def _factor(step: int, lr: float, function: Schedule) -> float:
    return lr * function(step)


def _check_schedule(schedule: object) -> None:
    """Refuse a scheduler of torch (a class, an object, or a partial of one), and say what to write instead."""
    made = schedule
    while isinstance(made, partial):
        made = made.func
    kind = made if inspect.isclass(made) else type(made)
    if issubclass(kind, LRScheduler):
        raise ConfigError(
            f"server schedule {kind.__module__}.{kind.__qualname__} is a scheduler of torch, which changes the "
            "learning rate of an optimizer, and a server has none; give schedule='cosine:T_max=100', another name, or "
            "a function of the step"
        )


def _check_rule(rule: object) -> None:
    """Refuse an object that is not a rule, and say what to write instead."""
    missing = [name for name in ("init", "numbers", "step") if not callable(getattr(rule, name, None))]
    is_class = inspect.isclass(rule)
    if not missing and not is_class:
        return
    hint = "a name, a mapping, or an object with the methods of xffl.aggregation.algorithms.server_rules.ServerRule"
    kind = rule if inspect.isclass(rule) else type(rule)
    if any(parent.__module__.partition(".")[0] == "torch" for parent in inspect.getmro(kind)):
        raise ConfigError(
            f"server {_title(kind)} is an optimizer of torch, whose steps differ between processors; give {hint}, such "
            "as 'adamw:lr=0.01' (sgd, adam, adamw and adagrad step as torch's do)"
        )
    if is_class:
        raise ConfigError(f"server {_title(kind)} is a class; give an object of it: write {kind.__name__}()")
    if len(missing) < 3:
        plural = "s" if len(missing) > 1 else ""
        raise ConfigError(f"{_title(kind)} has no method{plural} {' and '.join(missing)}; server must be {hint}")
    if callable(rule):
        raise ConfigError(
            f"server {_title(rule)}: a server is no factory of an optimizer; give a name such as 'sgd:lr=0.7', or an "
            "object of a rule (ServerRule)"
        )
    raise ConfigError(f"server must be {hint}, got {_plain(rule)}")


def _numbers_of(rule: ServerRule, step: int) -> Numbers:
    """Return the numbers of a rule for a step, without a schedule."""
    numbers = rule.numbers(step)
    if not isinstance(numbers, dict) or len(numbers) > MOST_NUMBERS:
        text = _plain(numbers)
        raise ConfigError(f"numbers() of {_title(rule)} must be a dict of at most {MOST_NUMBERS}, got {text}")
    return numbers


def _copy_of(rule: ServerRule) -> ServerRule:
    """Return a copy of a rule for trial steps, or the rule itself if it cannot be copied."""
    try:
        return copy.deepcopy(rule)
    except Exception:  # noqa: BLE001 - a rule may hold objects that cannot be copied
        return rule


def _probe(rule: ServerRule) -> None:
    """Refuse a user's rule whose steps do not write into values and state in place; makes steps with the rule.

    Whatever such a rule keeps elsewhere is lost after each piece, and is in no checkpoint.
    """
    title = _title(rule)
    values = torch.tensor([3.0, -0.5, 0.02, 7.0, -1.0, 0.3, 40.0], dtype=torch.float32, device="cpu")
    before = {name: _frozen(value) for name, value in _attributes(rule).items()}
    try:
        with torch.no_grad():
            state = rule.init(values)
            if not isinstance(state, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in state.values()):
                raise ConfigError(f"init of server {title} must return a dict of tensors, got {_plain(state)}")
            numbers = _numbers_of(rule, 0)
            places = {name: _place(tensor) for name, tensor in state.items()}
            place = _place(values)
            for _ in range(2):
                given = dict(state)
                returned: Any = _any(rule).step(values, values * 0.3 + 0.1, given, dict(numbers))
                if returned is not None:
                    raise ConfigError(
                        f"step of server {title} returns a {type(returned).__name__}, which is ignored; write into "
                        "values and state in place (values.sub_(...)), and return nothing"
                    )
                _check_kept(title, state, given)
                moved = [f"state {name!r}" for name, tensor in state.items() if _place(tensor) != places[name]]
                if _place(values) != place:
                    moved.append("values")
                if moved:
                    raise ConfigError(
                        f"step of server {title} moves {', '.join(moved)} to other memory, which is lost; write into "
                        "the same tensor in place, as values.sub_(...) does"
                    )
    except XfflError:
        raise
    except Exception as wrong:
        raise ConfigError(f"server {title} cannot step: {type(wrong).__name__}: {wrong}") from wrong
    after = {name: _frozen(value) for name, value in _attributes(rule).items()}
    if changed := sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name)):
        raise ConfigError(
            f"server {title} changes its attribute{'s' if len(changed) > 1 else ''} {', '.join(changed)} in its steps, "
            "and attributes are options, which stay as they are; count steps by the argument of numbers(step), and "
            "keep what belongs to elements in the state of init, without counts of its own"
        )


def _check_kept(title: str, state: Mapping[str, torch.Tensor], given: Mapping[str, torch.Tensor]) -> None:
    """Refuse a step that adds, removes or replaces entries of its state."""
    for name in sorted(state.keys() ^ given.keys(), key=str):
        what = "removes the" if name in state else "adds a"
        raise ConfigError(
            f"step of server {title} {what} state {name!r}; its names must be those that init returns, in every step"
        )
    for name, tensor in state.items():
        if given[name] is not tensor:
            raise ConfigError(
                f"step of server {title} puts another object in the place of state {name!r}, which is lost; write "
                f"into the tensor in place, as state[{name!r}].copy_(...) does"
            )


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return a tensor's memory address and layout."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _any(value: Any) -> Any:
    """Return a value without its type: a user's method may not return what its annotation says."""
    return value


def _frozen(value: object, within: tuple[int, ...] = ()) -> object:
    """Return a snapshot of an attribute that differs after a change: texts, or identities of unknown objects."""
    if id(value) in within:
        return "itself"
    within = (*within, id(value))
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return repr(value)
    if isinstance(value, Mapping):
        return [(repr(key), _frozen(item, within)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return [_frozen(item, within) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(repr(item) for item in value)
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return id(type(value)), str(value.dtype), repr(value.tolist())
    if inspect.isclass(value) or inspect.isroutine(value) or inspect.ismodule(value):
        return id(value)
    return id(value), _frozen(dict(getattr(value, "__dict__", {})), within)


def _try_out(rule: ServerRule) -> None:
    """Refuse a user's rule that does not step each element by itself; local.

    A few numbers are stepped as a whole tensor, and as two pieces of it.
    """
    # Uneven numbers, so that means and norms of the pieces differ from those of the whole.
    start = torch.tensor([3.0, -0.5, 0.02, 7.0, -1.0, 0.3, 40.0], dtype=torch.float64, device="cpu")
    title = _title(rule)

    def stepped(values: torch.Tensor) -> torch.Tensor:
        values = values.clone()
        state = rule.init(values)
        for name, tensor in state.items():
            if tensor.shape != values.shape or tensor.dtype != values.dtype:
                raise ConfigError(
                    f"state {name!r} of server {title} must be like the values, which are {tuple(values.shape)} of "
                    f"{values.dtype}, got {tuple(tensor.shape)} of {tensor.dtype}"
                )
        for step in range(_RATES_SHOWN):
            rule.step(values, values * 0.3 + 0.1 * step, state, rule.numbers(step))
        return values

    try:
        with torch.no_grad():
            whole, pieces = stepped(start), torch.cat([stepped(part) for part in (start[:2], start[2:])])
    except XfflError:
        raise
    except Exception as wrong:
        raise ConfigError(f"server {title} cannot step: {type(wrong).__name__}: {wrong}") from wrong
    rates = [rule.numbers(step).get("lr") for step in range(_RATES_SHOWN)]
    if torch.equal(whole, start) and any(rate != 0.0 for rate in rates):
        raise ConfigError(
            f"step of server {title} leaves values as they are, for pseudo-gradients that are not 0; write into values "
            "in place: values.sub_(g) instead of values = values - g, which only binds the name to another tensor"
        )
    if not torch.allclose(whole, pieces, rtol=1e-9, atol=0.0, equal_nan=True):
        raise ConfigError(
            f"server {title} cannot step flat pieces of shards: two pieces gave other results than the whole; "
            "compute each element from that element alone, without norms, means or counts of its own"
        )


# Saved states ---------------------------------------------------------------------------------------------------------

MOST_KEPT = 64
"""The most state tensors of a server optimizer"""
MOST_ASKED = 10**6
"""The most options of a server optimizer, and characters of an option"""
_RENAMED = {
    "exp_avg": "m",
    "exp_avg_sq": "v",
    "max_exp_avg_sq": "v_max",
    "momentum_buffer": "momentum",
    "sum": "v",
}
"""Names of state tensors in states that were saved when servers were torch's optimizers"""


@dataclass(frozen=True)
class SavedServer:
    """The saved state of a fragment's server, or the state that a peer sends, without the elements themselves."""

    step: int
    """Number of steps so far"""
    elements: Mapping[str, Any]
    """By the rule's names the state tensors, or the names by which they were saved"""
    asked: Mapping[str, str]
    """The server's rule and options, see :attr:`ServerOptimizer.asked`"""

    @property
    def plain(self) -> dict[str, Any]:
        """The state as plain values, to be saved or sent."""
        return {"step": self.step, "elements": dict(self.elements), "asked": dict(self.asked)}


def read_saved_server(fields: Fields) -> SavedServer:
    """Read the state of a server, whose values may come from anybody; local.

    States that were saved when servers were torch's optimizers are read, too. Raises the error class of ``fields``.
    """
    given = fields.any("elements")
    names = list(given) if isinstance(given, Mapping | list | tuple) else None
    if names is None or len(names) > MOST_KEPT or not all(isinstance(name, str) for name in names):
        fields.fail(f"{fields.place('elements')} must be at most {MOST_KEPT} names, got {str(given)[:200]}")
    if isinstance(given, Mapping):
        fields.mapping_of("elements", MOST_KEPT, Fields.mapping)
    elements = dict(given) if isinstance(given, Mapping) else {name: name for name in names}
    if "step" in fields:
        asked = fields.mapping_of("asked", MOST_ASKED, Fields.text, MOST_ASKED)
        return SavedServer(fields.integer("step"), elements, asked)
    renamed = {_RENAMED.get(name, name): saved for name, saved in elements.items()}
    if len(renamed) < len(names):
        fields.fail(f"{fields.place('elements')} has two names of the same state: {', '.join(sorted(names))}")
    return SavedServer(_step_before_rules(fields, bool(names)), renamed, _asked_before_rules(fields))


def _step_before_rules(fields: Fields, has_stepped: bool) -> int:
    """Return the number of steps of an optimizer of torch, from its own count or its schedule's, if there is one."""
    numbers = fields.mapping("numbers")
    counts = [numbers.any("step")] if "step" in numbers else []
    schedule = fields.optional("schedule", Fields.mapping)
    if schedule is not None and "last_epoch" in schedule:
        counts.append(schedule.any("last_epoch"))
    for count in counts:
        value: Any = count.get("value") if isinstance(count, Mapping) else count
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        if type(value) not in (int, float) or not 0 <= value < 2**53 or value != int(value):
            fields.fail(f"step of {fields.what} must be a number of steps, got {str(count)[:200]}")
        return int(value)
    return int(has_stepped)


def _asked_before_rules(fields: Fields) -> dict[str, str]:
    """Return the options of an optimizer of torch and its schedule, by the names of rules."""
    if fields.optional("asked", Fields.mapping) is None:
        return {"class": "unknown"}
    asked = fields.mapping_of("asked", MOST_ASKED, Fields.text, MOST_ASKED)
    if "initial_lr" in asked:  # the schedule may have changed "lr" since
        asked["lr"] = asked["initial_lr"]
    is_decoupled = asked.get("decoupled_weight_decay") == "True" and asked.get("class") == "Adam"
    if asked.get("maximize") == "True" or is_decoupled:
        fields.fail(
            f"{fields.what} is of {asked.get('class')} with {'decoupled_weight_decay' if is_decoupled else 'maximize'}"
            "=True, which no server has any more"
        )
    schedule = asked.get("schedule", "none")
    if schedule != "none":
        path = known_path("server_schedule", schedule)
        asked["schedule"] = schedule if path is None else path.rpartition(".")[2]
    asked.pop("schedule's milestones", None)  # were saved in another form, as a Counter
    return asked


def _alike(text: str, other: str) -> bool:
    """Tell whether two texts are equal, or stand for the same number, such as 0 and 0.0."""
    if text == other:
        return True
    try:
        return float(text) == float(other)
    except ValueError:
        return False


# Texts ----------------------------------------------------------------------------------------------------------------


def _attributes(rule: ServerRule) -> dict[str, Any]:
    """Return the options of a rule: its attributes, including those in slots."""
    slots = {
        name
        for kind in type(rule).__mro__
        for name, member in vars(kind).items()
        if inspect.ismemberdescriptor(member) and hasattr(rule, name)
    }
    return {**getattr(rule, "__dict__", {}), **{name: getattr(rule, name) for name in sorted(slots)}}


def _title(made: object) -> str:
    if isinstance(made, partial):
        return _title(made.func)
    if isinstance(made, NamedSchedule):
        return made.function.__name__
    kind = made if hasattr(made, "__qualname__") else type(made)
    name, module = str(kind.__qualname__), str(kind.__module__)
    return name if module.startswith(_BUILT_IN) else f"{module}.{name}"


def _plain(value: object) -> str:
    """Return the text of numbers and words; of other objects the type only, since their text may have an address."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    if isinstance(value, NamedSchedule):
        return repr(value)
    if isinstance(value, torch.Tensor):
        return repr(value.tolist())
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={_plain(value[key])}" for key in sorted(value, key=str))
    if isinstance(value, (list, tuple)):
        return f"({', '.join(_plain(item) for item in value)})"
    return _title(value if hasattr(value, "__qualname__") else type(value))
