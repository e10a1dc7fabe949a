"""The server (outer) optimizer: a rule, a schedule of its learning rate, and where it works.

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
"""Names that ask for no server optimizer."""

MOST_NUMBERS = 8
"""Numbers of a rule's step, at most: all ranks tell theirs in the vote."""

_RATES_SHOWN = 5
_DEVICE = re.compile(r"(?:cpu|cuda)(?::\d{1,3})?", re.ASCII)
"""A device that somebody else may ask for"""
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
    """How the global model goes on from each round's pseudo-gradient.

    Local. ``str()`` tells the rule, its options and the schedule, alike on all ranks that were given the same.

    :param rule: What is computed; an object of :mod:`xffl.aggregation.algorithms.server_rules`, or one of your own.
    :param schedule: What the learning rate (the number ``lr`` of the rule) is in each step: a name with options, such
        as ``cosine:T_max=100``, or a mapping, which become a :class:`NamedSchedule`; or a function of the step, from 0,
        which returns a factor. One rank calls it. ``None``: it stays.
    :param device: Where the state lives and the step is computed (``cpu`` saves GPU memory); ``None``: where rounds
        communicate from, the parameters' device, or the host's memory where that is gloo's.
    :param clip: Longest pseudo-gradient, L2 over the part of the model that a round exchanges, above 0: a longer one is
        multiplied by ``clip / norm`` before the rule sees it. ``None``: it may have any length.
    :raises ConfigError: if the rule is none, does not step element by element, or the schedule gives no rate.
    """

    rule: ServerRule
    schedule: NamedSchedule | Schedule | str | Mapping[str, Any] | None = None
    device: str | torch.device | None = None
    clip: float | None = None

    def __post_init__(self) -> None:
        _check_rule(self.rule)
        if self.clip is not None:
            limit = number("clip of the server", self.clip, above=0.0, hint="give the longest pseudo-gradient, L2")
            object.__setattr__(self, "clip", limit)
        if self.device is not None:
            try:
                torch.empty(0, dtype=torch.float32, device=self.device)
            except (AssertionError, RuntimeError, TypeError) as wrong:  # torch asserts that it was built for a device
                reason = " ".join(str(wrong).split())
                raise ConfigError(
                    f"device {self.device!r} of the server is not here ({reason}); give cpu or another"
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
        elif self.schedule is not None:  # nothing tells what it holds; its first rates tell something
            rates = [self.numbers(step)["lr"] for step in range(_RATES_SHOWN)]
            text += f", {_title(self.schedule)}, first rates {_plain(rates)}"
        if self.clip is not None:
            text += f", clip={self.clip!r}"
        return text if self.device is None else f"{text}, on {torch.device(self.device).type}"

    def numbers(self, step: int) -> Numbers:
        """Return what one rank computes for a step and all use, with the schedule's learning rate; local.

        Raises ConfigError where the rule or the schedule does not give finite numbers.
        """
        return self._numbers_of(self.rule, step)

    def _numbers_of(self, rule: ServerRule, step: int) -> Numbers:
        """Return the numbers of this rule, or of a copy of it, with the schedule's learning rate."""
        found = _numbers_of(rule, step)
        if self.schedule is not None:
            if "lr" not in found:
                raise ConfigError(
                    f"a schedule changes the number lr, and {_title(self.rule)} has {', '.join(found) or 'none'}; "
                    "leave the schedule out, or name its learning rate lr"
                )
            found = {**found, "lr": self._scheduled(step, found["lr"])}
        return {name: number(f"{name} of {_title(self.rule)}", one) for name, one in found.items()}

    def _scheduled(self, step: int, lr: float) -> float:
        """Return the learning rate that the schedule gives a step."""
        schedule, what = self.schedule, f"the schedule of the server's learning rate, {_title(self.schedule)},"
        hint = "give a function of the step, from 0, that returns a factor of the rate, or a schedule by name"
        assert schedule is not None and not isinstance(schedule, (str, Mapping)), "one that was made with the object"
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
        """What a saved state is compared with: the rule, the schedule, and their options as texts."""
        told = {"class": type(self.rule).__qualname__, "schedule": "none"}
        told |= {name: _plain(value) for name, value in _attributes(self.rule).items()}
        if isinstance(self.schedule, NamedSchedule):
            told["schedule"] = self.schedule.function.__name__
            told |= {f"schedule's {name}": _plain(value) for name, value in self.schedule.options.items()}
        elif self.schedule is not None:
            told["schedule"] = _title(self.schedule)
        told["clip"] = "none" if self.clip is None else _plain(self.clip)
        return told

    def check_saved(self, saved: SavedServer, what: str, hint: str) -> None:
        """Raise CheckpointError where a state is that of a server that was asked for otherwise; local.

        :param saved: The state.
        :param what: Where it stands, to begin the message with.
        :param hint: How to begin without the state, to end the message with.
        """
        asked = self.asked
        others = sorted(key for key in asked.keys() & saved.asked.keys() if not _alike(asked[key], saved.asked[key]))
        if others:
            there, here = (", ".join(f"{key}={one[key]}" for key in others) for one in (saved.asked, asked))
            raise CheckpointError(
                f"{what} is that of a server optimizer with {there}, and this one has {here}; resume with the same "
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
        """What the rule keeps for each element, by name."""
        return tuple(self.rule.init(torch.zeros(1, dtype=torch.float32, device="cpu")))


def take_step(
    rule: ServerRule | None,
    values: torch.Tensor,
    mean: torch.Tensor,
    state: Mapping[str, torch.Tensor],
    numbers: Numbers,
    scale: float = 1.0,
) -> None:
    """Step flat values of the global model, in place, given what the cells have made of them; local.

    The pseudo-gradient is ``scale * (values as they were written - mean)``: what rounding to the model's type has left
    out is not taken for a step. Pieces are taken that stay in the cache: gradient, state and values of one are worked
    on together.

    :param rule: What is computed; ``None`` for the pseudo-gradient itself, as the step towards the mean.
    :param values: Elements of the global model, in fp32 (fp64 for fp64), on the server's device.
    :param mean: The combined values, in the model's type, on the same device; the memory is used.
    :param state: What the rule keeps for these elements.
    :param numbers: What the rule computes this step with.
    :param scale: What the combiner multiplies the way to the mean by.
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
            rule.step(kept, gradient, {name: one[piece] for name, one in state.items()}, numbers)


# By name --------------------------------------------------------------------------------------------------------------


def server_of(spec: object, *, writer: Writer) -> ServerOptimizer | None:
    """Return the server optimizer that a spec of ``writer`` asks for, ``None`` for the plain mean; local.

    A spec of the registry: an entry of kind ``server``, one of torch's names (``AdamW``, ``torch.optim.SGD``) or a
    dotted path of a rule of one's own, with its options, and ``device``, ``schedule`` and ``clip`` among them.
    ``None``, ``none`` and ``fedavg`` are the plain mean. A rule or a :class:`ServerOptimizer` is taken as it is.
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
        raise ConfigError(f"device {str(device)[:40]!r} of the server comes from a file; there it is cpu or cuda")
    target, preset = locate("server", name, writer=writer)
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
    """Return what a text such as ``1.0`` stands for, and anything else as it is."""
    try:
        return float(text) if isinstance(text, str) else text
    except ValueError:
        return text


def schedule_of(spec: object, writer: Writer) -> NamedSchedule | Schedule | None:
    """Return the schedule that a spec of ``writer`` asks for: a name, the dotted path of a function, or a function."""
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
    for one in [*inspect.signature(function).parameters.values()][2:]:
        if one.default is one.empty and one.name not in checked:
            raise ConfigError(f"{what} needs the option {one.name}; it takes {describe_options(function, leading=2)}")
    if then is not None:
        # Of a user's function it takes the factor.
        checked["then"] = then if isinstance(then, NamedSchedule) else NamedSchedule(_factor, {"function": then})
    return NamedSchedule(function, checked)


def _factor(step: int, lr: float, function: Schedule) -> float:
    return lr * function(step)


def _check_schedule(schedule: object) -> None:
    """Refuse a schedule of torch, as a class, an object or a function that makes one, with what to write instead."""
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
    """Refuse what is no rule, with what to write in its place."""
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
    found = rule.numbers(step)
    if not isinstance(found, dict) or len(found) > MOST_NUMBERS:
        raise ConfigError(f"numbers() of {_title(rule)} must be a dict of at most {MOST_NUMBERS}, got {_plain(found)}")
    return found


def _copy_of(rule: ServerRule) -> ServerRule:
    """Return a copy of a rule to try out, or the rule itself where it cannot be copied."""
    try:
        return copy.deepcopy(rule)
    except Exception:  # noqa: BLE001 - a rule may hold what nobody can copy
        return rule


def _probe(rule: ServerRule) -> None:
    """Refuse a rule of somebody's own whose steps do not write into values and state in place; changes the rule.

    What such a rule keeps elsewhere is lost after each piece, and no checkpoint has it.
    """
    title = _title(rule)
    values = torch.tensor([3.0, -0.5, 0.02, 7.0, -1.0, 0.3, 40.0], dtype=torch.float32, device="cpu")
    before = {name: _frozen(value) for name, value in _attributes(rule).items()}
    try:
        with torch.no_grad():
            state = rule.init(values)
            if not isinstance(state, dict) or not all(isinstance(one, torch.Tensor) for one in state.values()):
                raise ConfigError(f"init of server {title} must return a dict of tensors, got {_plain(state)}")
            numbers, places = _numbers_of(rule, 0), {name: _place(one) for name, one in state.items()}
            place = _place(values)
            for _ in range(2):
                given = dict(state)
                returned: Any = _any(rule).step(values, values * 0.3 + 0.1, given, dict(numbers))
                if returned is not None:
                    raise ConfigError(
                        f"step of server {title} returns a {type(returned).__name__}, which is not read; write into "
                        "values and state in place (values.sub_(...)), and return nothing"
                    )
                _check_kept(title, state, given)
                moved = [f"state {name!r}" for name, one in state.items() if _place(one) != places[name]]
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
    """Refuse a step after which the state that it was given has other entries than before."""
    for name in sorted(state.keys() ^ given.keys(), key=str):
        what = "removes the" if name in state else "adds a"
        raise ConfigError(
            f"step of server {title} {what} state {name!r}; its names are those that init returns, in every step"
        )
    for name, one in state.items():
        if given[name] is not one:
            raise ConfigError(
                f"step of server {title} puts another object in the place of state {name!r}, which is lost; write "
                f"into the tensor in place, as state[{name!r}].copy_(...) does"
            )


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return where a tensor lies and how."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _any(value: Any) -> Any:
    """Return a value whose methods may return something else than they promise."""
    return value


def _frozen(value: object, within: tuple[int, ...] = ()) -> object:
    """Return what tells whether an attribute has changed: its text, or for unknown objects which one it is."""
    if id(value) in within:
        return "itself"
    within = (*within, id(value))
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return repr(value)
    if isinstance(value, Mapping):
        return [(repr(key), _frozen(one, within)) for key, one in value.items()]
    if isinstance(value, (list, tuple)):
        return [_frozen(one, within) for one in value]
    if isinstance(value, (set, frozenset)):
        return sorted(repr(one) for one in value)
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return id(type(value)), str(value.dtype), repr(value.tolist())
    if inspect.isclass(value) or inspect.isroutine(value) or inspect.ismodule(value):
        return id(value)
    return id(value), _frozen(dict(getattr(value, "__dict__", {})), within)


def _try_out(rule: ServerRule) -> None:
    """Refuse a rule of somebody's own that does not step elements alone; local.

    A few numbers are stepped as one tensor, and as the pieces that two ranks may hold.
    """
    # Uneven, so that means and norms of the pieces differ from those of the whole.
    start = torch.tensor([3.0, -0.5, 0.02, 7.0, -1.0, 0.3, 40.0], dtype=torch.float64, device="cpu")
    title = _title(rule)

    def stepped(values: torch.Tensor) -> torch.Tensor:
        values = values.clone()
        state = rule.init(values)
        for name, one in state.items():
            if one.shape != values.shape or one.dtype != values.dtype:
                raise ConfigError(
                    f"state {name!r} of server {title} must be like the values, which are {tuple(values.shape)} of "
                    f"{values.dtype}, got {tuple(one.shape)} of {one.dtype}"
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
            f"server {title} cannot step flat pieces of shards: the same numbers, cut in two, went elsewhere; let it "
            "compute each element from that element alone, without norms, means or counts of its own"
        )


# Saved states ---------------------------------------------------------------------------------------------------------

MOST_KEPT = 64
"""What a server optimizer keeps for each element, and as numbers for all, at most"""
MOST_ASKED = 10**6
"""What a server optimizer was made with, at most: values, and characters of one"""
_RENAMED = {
    "exp_avg": "m",
    "exp_avg_sq": "v",
    "max_exp_avg_sq": "v_max",
    "momentum_buffer": "momentum",
    "sum": "v",
}
"""What torch's optimizers called the state, as it was saved before rules took their place"""


@dataclass(frozen=True)
class SavedServer:
    """What was saved of a fragment's server, or is told by a peer, beside the elements themselves."""

    step: int
    """Steps that it has made"""
    elements: Mapping[str, Any]
    """What is kept for each element, by the rule's names: what stands there, or the name that it was saved by"""
    asked: Mapping[str, str]
    """What the server was made with, see :attr:`ServerOptimizer.asked`"""

    @property
    def plain(self) -> dict[str, Any]:
        """What is written of it."""
        return {"step": self.step, "elements": dict(self.elements), "asked": dict(self.asked)}


def read_saved_server(fields: Fields) -> SavedServer:
    """Read the state of a server, which somebody else may have written; local.

    States that were saved before there were rules, with the values of an optimizer of torch, are read, too. Raises the
    error class of ``fields``.
    """
    found = fields.any("elements")
    names = list(found) if isinstance(found, Mapping | list | tuple) else None
    if names is None or len(names) > MOST_KEPT or not all(isinstance(name, str) for name in names):
        fields.fail(f"{fields.place('elements')} must be at most {MOST_KEPT} names, got {str(found)[:200]}")
    if isinstance(found, Mapping):
        fields.mapping_of("elements", MOST_KEPT, Fields.mapping)
    elements = dict(found) if isinstance(found, Mapping) else {name: name for name in names}
    if "step" in fields:
        asked = fields.mapping_of("asked", MOST_ASKED, Fields.text, MOST_ASKED)
        return SavedServer(fields.integer("step"), elements, asked)
    renamed = {_RENAMED.get(name, name): one for name, one in elements.items()}
    if len(renamed) < len(names):
        fields.fail(f"{fields.place('elements')} has two names for one thing: {', '.join(sorted(names))}")
    return SavedServer(_step_before_rules(fields, bool(names)), renamed, _asked_before_rules(fields))


def _step_before_rules(fields: Fields, has_stepped: bool) -> int:
    """Return how many steps an optimizer of torch had made: it or its schedule has counted them, if it depends."""
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
    """Return what an optimizer of torch and its schedule were made with, in the terms of rules."""
    if fields.optional("asked", Fields.mapping) is None:
        return {"class": "unknown"}
    asked = fields.mapping_of("asked", MOST_ASKED, Fields.text, MOST_ASKED)
    if "initial_lr" in asked:  # a schedule may have changed the other one already
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
    asked.pop("schedule's milestones", None)  # were written with how often each is one
    return asked


def _alike(one: str, other: str) -> bool:
    """Tell whether two texts are equal, or write the same number: 0 and 0.0."""
    if one == other:
        return True
    try:
        return float(one) == float(other)
    except ValueError:
        return False


# Texts ----------------------------------------------------------------------------------------------------------------


def _attributes(rule: ServerRule) -> dict[str, Any]:
    """Return the options of a rule: its attributes, also those that its classes keep in slots."""
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
    """Write numbers and words out; of anything else only the type, as its text may differ between processes."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    if isinstance(value, NamedSchedule):
        return repr(value)
    if isinstance(value, torch.Tensor):
        return repr(value.tolist())
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={_plain(value[key])}" for key in sorted(value, key=str))
    if isinstance(value, (list, tuple)):
        return f"({', '.join(_plain(one) for one in value)})"
    return _title(value if hasattr(value, "__qualname__") else type(value))
