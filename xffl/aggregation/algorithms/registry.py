"""Registry of all algorithms: their names, and how a name with options becomes an object.

Importing this needs no torch: the entries are data, and what they name is imported when it is made.

A *spec* says what is wanted: ``"fedprox"``, ``"fedprox:mu=0.1"``, ``{"name": "fedprox", "mu": 0.1}``, the same with
the dotted path of a class or function of one's own (``"mylab.robust.Mine:k=3"``), or an object that is made already.
"""

from __future__ import annotations

import ast
import inspect
import re
from argparse import ArgumentError
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any

import yaml
from jsonargparse import ArgumentParser

from xffl.checks import one_of
from xffl.errors import ConfigError

__all__ = ["ENTRIES", "KINDS", "AlgorithmInfo", "entries", "find", "make", "read_spec", "resolve_algorithm"]

KINDS: Mapping[str, str] = {
    "algorithm": "",
    "server": "torch.optim.Optimizer",
    "combine": "xffl.aggregation.algorithms.combiners.Combiner",
    "client": "xffl.aggregation.algorithms.clients.Client",
    "schedule": "xffl.aggregation.algorithms.schedules.Schedule",
    "privacy": "",
    "partition": "",
}
"""The kinds of entries, each with the class that what it makes is an instance of, where there is one."""

# The kinds that an algorithm is put together from, and whose keywords they are.
_SIDES = {"server": "aggregator", "combine": "aggregator", "privacy": "aggregator", "client": "scaling"}
_OPTIONAL = ("client", "privacy")  # those of which ``None`` means none


def entries(kind: str | None = None) -> tuple[AlgorithmInfo, ...]:
    """Return the entries of a kind, by default of all, kind by kind; local, without torch."""
    if kind is not None:
        one_of("kind", kind, KINDS)
    return tuple(entry for entry in ENTRIES if kind in (None, entry.kind))


def find(kind: str, name: str) -> AlgorithmInfo | None:
    """Return the entry of a name, ``None`` where there is none; local, without torch."""
    return next((entry for entry in entries(kind) if entry.name == name), None)


def make(kind: str, spec: object) -> Any:
    """Make what a spec (see the module) of a kind says; what is neither text nor mapping is made already; local.

    That is an instance of the kind's class; for ``partition`` a function with its options bound, for ``server`` and
    ``algorithm`` what ``server_of`` and :func:`resolve_algorithm` return.
    """
    one_of("kind", kind, KINDS)
    if kind == "algorithm":
        return resolve_algorithm(spec)
    if kind == "server":
        # The server's module needs torch, and reads this one.
        return import_module("xffl.aggregation.algorithms.server").server_of(spec)
    if not isinstance(spec, (str, Mapping)):
        return _checked_instance(kind, spec)
    name, own = read_spec(kind, spec)
    target, preset = locate(kind, name)
    options = {**preset, **check_options(f"{kind} {name!r}", target, own, bound=preset)}
    if kind == "partition":
        return partial(target, **options)
    try:
        instance = target(**options)
    except TypeError as wrong:
        raise ConfigError(f"{kind} {name!r} cannot be made with {_shown(options)}: {wrong}") from wrong
    return _checked_instance(kind, instance)


def read_spec(kind: str, spec: object) -> tuple[str, dict[str, Any]]:
    """Split a spec into a name and options; local."""
    if isinstance(spec, Mapping):
        options = dict(spec)
        name = options.pop("name", None)
        if not isinstance(name, str) or not all(isinstance(key, str) for key in options):
            raise ConfigError(f'{kind} {spec!r} has no name; give {{"name": ..., option: value}}')
        return name, options
    if not isinstance(spec, str) or not spec.strip():
        raise ConfigError(f"{kind} {spec!r} is neither a name nor a mapping; give name, or name:option=value")
    name, _, rest = spec.partition(":")
    options = {}
    for piece in re.split(r",(?![^(\[]*[)\]])", rest) if rest.strip() else ():  # at commas outside brackets
        key, is_pair, value = (part.strip() for part in piece.partition("="))
        if not key or not is_pair or key in options:
            raise ConfigError(f"{kind} {spec!r} has no option=value in {piece!r}; write name:option=value,option=value")
        if value[:1] in ("(", "["):  # which the types' parser does not read
            try:
                options[key] = list(ast.literal_eval(value))
            except (ValueError, SyntaxError, TypeError) as wrong:
                raise ConfigError(f"{value!r} is not a list of values; write (1,2)") from wrong
        else:
            options[key] = value
    return name.strip(), options


def locate(kind: str, name: str, *, home: str | None = None) -> tuple[Any, Mapping[str, Any]]:
    """Import what a name stands for; local."""
    entry = find(kind, name) if kind in KINDS else None
    if entry is not None:
        return load(entry.target, f"{kind} {name!r}"), entry.options
    if "." in name:
        return load(name, f"{kind} {name!r}"), {}
    if home is not None and inspect.isclass(candidate := getattr(import_module(home), name, None)):
        return candidate, {}
    known = [one.name for one in entries(kind)] if kind in KINDS else []
    choices = ", ".join([*known, *([f"a class of {home}"] if home else [])])
    raise ConfigError(f"{kind} {name!r} is unknown; choose one of {choices}, or give the dotted path of your own")


def load(path: str, what: str) -> Any:
    """Import an object by its dotted path; local."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError, TypeError, ValueError) as wrong:
        raise ConfigError(f"{what}: {path} cannot be imported ({wrong}); give that of a class or function") from wrong


def check_options(
    what: str, target: Any, options: Mapping[str, Any], *, bound: Mapping[str, Any] | None = None, leading: int = 0
) -> dict[str, Any]:
    """Check options against the types that a class or function asks for; local."""
    with suppress(TypeError, ValueError):  # what has no signature is the parser's to refuse
        asked = [one for one in _options_of(target, leading) if one.default is one.empty]
        if not options and not asked:
            return {}  # as most aggregators are made; a parser takes tens of milliseconds
    _, names = _parser(what, target, set(), leading)
    unknown = [key for key in options if key not in names]
    if unknown:
        raise ConfigError(f"{what} has no option {', '.join(unknown)}; there are: {', '.join(names) or 'none'}")
    left_out = {name for name in names if name not in options}
    if inspect.isclass(target):
        # What is not given keeps its default, which may be of any type; a class must get what has none.
        parameters = inspect.signature(target).parameters.values()
        left_out -= {one.name for one in parameters if one.default is inspect.Parameter.empty}
    # Another parser, of the options that are there: jsonargparse would check defaults, too.
    parser, _ = _parser(what, target, {*left_out, *(bound or {}).keys() - options.keys()}, leading)
    try:
        parsed = parser.parse_object(dict(options))
    except (ArgumentError, TypeError, ValueError) as wrong:
        known, reason = describe_options(target, leading=leading), " ".join(str(wrong).split())
        raise ConfigError(
            f"{what} cannot be made with {_shown(options) or 'no options'}: {reason}; it takes {known}"
        ) from wrong
    return {name: parsed[name] for name in options}


def describe_options(target: Any, *, leading: int = 0, preset: Mapping[str, Any] | None = None) -> str:
    """Write the options of a class or function, with types and defaults; local."""
    known = [one.replace(default=(preset or {}).get(one.name, one.default)) for one in _options_of(target, leading)]
    return ", ".join(str(one).replace("'", "") for one in known) or "none"


def _options_of(target: Any, leading: int) -> list[inspect.Parameter]:
    """Return the named parameters of a class or function behind the first ones; local."""
    parameters = [*inspect.signature(target).parameters.values()][leading:]
    return [one for one in parameters if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]


def find_algorithm(spec: object) -> tuple[AlgorithmInfo, dict[str, Any]]:
    """Return an algorithm's entry and the options that are given; local, without torch."""
    name, options = read_spec("algorithm", spec)
    entry = find("algorithm", name)
    if entry is None:
        known = ", ".join(one.name for one in entries("algorithm"))
        raise ConfigError(f"algorithm {name!r} is unknown; choose one of {known}")
    return entry, options


def resolve_algorithm(spec: object) -> tuple[dict[str, Any], dict[str, Any]]:
    """Turn a named algorithm into keywords of the aggregator and of the training loop; local.

    An option goes where it belongs: to a keyword that the algorithm sets (``fragments``, ``delay``), or to the one of
    its parts that knows it (``lr`` to the server optimizer, ``mu`` to the client). ``server``, ``combine``, ``client``
    and ``privacy`` replace a part, or, as a mapping without a name, change options of the one that is there.
    """
    entry, options = find_algorithm(spec)
    name = entry.name
    keywords = {"aggregator": dict(entry.aggregator), "scaling": dict(entry.scaling)}
    parts = {kind: keywords[side].pop(kind) for kind, side in _SIDES.items() if kind in keywords[side]}
    for kind in _SIDES.keys() & options.keys():
        parts[kind] = _changed(kind, parts.get(kind), options[kind])
    changes: dict[str, dict[str, Any]] = {}
    for key in options.keys() - _SIDES.keys():
        side = next((side for side, words in keywords.items() if key in words), None)
        if side is not None:
            # No class says which type a keyword has: a text is what it would be in a configuration file.
            keywords[side][key] = _plain(options[key]) if isinstance(options[key], str) else options[key]
        else:
            changes.setdefault(_owner(name, key, parts, keywords), {})[key] = options[key]
    for kind, change in changes.items():
        parts[kind] = _changed(kind, parts[kind], change)
    for kind, part in parts.items():
        if part is not None or kind not in _OPTIONAL:
            keywords[_SIDES[kind]][kind] = make(kind, part)
    return keywords["aggregator"], keywords["scaling"]


def _owner(name: str, key: str, parts: Mapping[str, Any], keywords: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the part of an algorithm that an option belongs to."""
    takes: dict[str, list[str]] = {}
    for kind, part in parts.items():
        if isinstance(part, (str, Mapping)):
            title, _ = read_spec(kind, part)
            is_server = kind == "server"  # a class of torch.optim, called with parameters first
            target, _ = locate(kind, title, home="torch.optim" if is_server else None)
            takes[kind] = _parser(f"{kind} {title!r}", target, set(), int(is_server))[1]
    owners = [kind for kind, options in takes.items() if key in options]
    if len(owners) == 1:
        return owners[0]
    if owners:
        choice = " or ".join(f'"{owner}": {{"{key}": ...}}' for owner in owners)
        raise ConfigError(f"algorithm {name!r} has several options {key}; say which is meant: {choice}")
    there = [*(word for words in keywords.values() for word in words), *_SIDES]
    there += [f"{option} ({kind})" for kind, options in takes.items() for option in options]
    raise ConfigError(f"algorithm {name!r} has no option {key}; there are: {', '.join(there)}")


def _plain(text: str) -> object:
    """Read a text as a configuration file's value; YAML takes ``1e-1`` for a text."""
    value = yaml.safe_load(text)
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _changed(kind: str, part: object, change: object) -> object:
    """Return a part with other options, or the one that takes its place."""
    if not isinstance(change, Mapping) or "name" in change:
        return change
    if not isinstance(part, (str, Mapping)):
        raise ConfigError(f"{kind} {change!r} changes options of a part that has no name; give its name, too")
    name, options = read_spec(kind, part)
    return {"name": name, **options, **change}


def _checked_instance(kind: str, instance: Any) -> Any:
    base = load(KINDS[kind], kind) if KINDS[kind] else None
    if base is not None and not isinstance(instance, base):
        raise ConfigError(f"{kind} must be a name or an object of {KINDS[kind]}, got {instance!r}")
    if kind == "partition" and not callable(instance):
        raise ConfigError(f"partition must be a name or a function, got {instance!r}")
    return instance


def _parser(what: str, target: Any, left_out: set[str], leading: int) -> tuple[ArgumentParser, list[str]]:
    """Return a parser of the options that are not left out, and their names."""
    parser = ArgumentParser(exit_on_error=False)
    skip: set[str | int] = {*left_out, *([leading] if leading else [])}
    add: Any = parser.add_class_arguments if inspect.isclass(target) else parser.add_function_arguments
    try:
        names: list[str] = add(target, skip=skip, fail_untyped=False)
    except (TypeError, ValueError) as wrong:
        raise ConfigError(
            f"{what}: the options of {target!r} cannot be read ({wrong}); give a class or function"
        ) from wrong
    return parser, names


def _shown(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in options.items())


@dataclass(frozen=True)
class AlgorithmInfo:
    """An algorithm, or a part of one, by name: what it does in a line, and its paper (or nothing).

    ``target`` is the dotted path of a part's class or function, ``options`` the keywords of it that the name stands
    for. An algorithm sets keywords of :class:`xffl.Aggregator` and of :class:`xffl.FederatedScaling` instead.
    """

    kind: str
    name: str
    target: str
    line: str
    paper: str
    options: Mapping[str, Any] = field(default_factory=dict)
    aggregator: Mapping[str, Any] = field(default_factory=dict)
    scaling: Mapping[str, Any] = field(default_factory=dict)


_ACAR = "Acar et al., 2021, arXiv 2111.04263"
_BLANCHARD = "Blanchard et al., 2017, arXiv 1703.02757"
_BONAWITZ = "Bonawitz et al., 2017, doi 10.1145/3133956.3133982"
_DILOCO = "Douillard et al., 2023, arXiv 2311.08105"
_YUROCHKIN = "Yurochkin et al., 2019, arXiv 1905.12022"
_HSU = "Hsu et al., 2019, arXiv 1909.06335"
_KARIMIREDDY = "Karimireddy et al., 2020, arXiv 1910.06378"
_MCMAHAN = "McMahan et al., 2017, arXiv 1602.05629"
_PILLUTLA = "Pillutla et al., 2022, arXiv 1912.13445"
_PRIVATE = "McMahan et al., 2018, arXiv 1710.06963"
_PROX = "Li et al., 2020, arXiv 1812.06127"
_REDDI = "Reddi et al., 2021, arXiv 2003.00295"
_SILOS = "Li et al., 2022, arXiv 2102.02079"
_STREAMING = "Douillard et al., 2025, arXiv 2501.18512"
_SUN = "Sun et al., 2019, arXiv 1911.07963"
_WANG = "Wang et al., 2020, arXiv 2007.07481"
_YIN = "Yin et al., 2018, arXiv 1803.01498"
_KAMP = "Kamp et al., 2018, arXiv 1807.03210"
_LIN = "Lin et al., 2020, arXiv 1808.07217"

_SGD = "torch.optim.SGD"
_NESTEROV = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
_ADAPTIVE = "xffl.aggregation.algorithms.server.Adaptive"


def _adaptive(rule: str, beta1: float) -> dict[str, Any]:
    """Return the paper's betas and tau; it tunes the learning rate for each task, 0.1 is a start."""
    return {"lr": 0.1, "betas": (beta1, 0.99), "tau": 1e-3, "rule": rule}


_ROOMS = {
    "server": "",
    "combine": "xffl.aggregation.algorithms.combiners.",
    "client": "xffl.aggregation.algorithms.clients.",
    "schedule": "xffl.aggregation.algorithms.schedules.",
    "privacy": "xffl.aggregation.privacy.",
    "partition": "xffl.training.data.partition.",
}
# The parts by kind: name, class or function, line, paper, and maybe options.
_ROWS: dict[str, tuple[tuple[Any, ...], ...]] = {
    "server": (
        ("sgd", _SGD, "a plain step towards the mean; lr 1 ends there", _REDDI, {"lr": 1.0}),
        ("fedavgm", _SGD, "the mean with server momentum", _HSU, {"lr": 1.0, "momentum": 0.9}),
        ("fedadagrad", _ADAPTIVE, "adaptive steps, squares summed up", _REDDI, _adaptive("adagrad", 0.0)),
        ("fedadam", _ADAPTIVE, "adaptive steps, squares averaged over time", _REDDI, _adaptive("adam", 0.9)),
        ("fedyogi", _ADAPTIVE, "adaptive steps, squares that change slowly", _REDDI, _adaptive("yogi", 0.9)),
        ("diloco", _SGD, "Nesterov momentum on rare rounds, for language models", _DILOCO, _NESTEROV),
    ),
    "combine": (
        ("mean", "Mean", "the weighted mean", _MCMAHAN),
        ("fednova", "NormalizedMean", "the mean of updates divided by each cell's local steps", _WANG),
        ("median", "CoordinateMedian", "the median of each coordinate", _YIN),
        ("trimmed_mean", "TrimmedMean", "each coordinate's mean without its extremes", _YIN),
        ("krum", "Krum", "the cell that is closest to its neighbours", _BLANCHARD),
        ("multi_krum", "MultiKrum", "the mean of several cells that Krum prefers", _BLANCHARD),
        ("geometric_median", "GeometricMedian", "the point of least summed distance to all cells", _PILLUTLA),
        ("norm_clipping", "NormClipping", "the mean of updates cut to a greatest norm", _SUN),
    ),
    "client": (
        ("fedprox", "FedProx", "pull local steps to the global weights", _PROX),
        ("scaffold", "Scaffold", "correct local gradients by control variates", _KARIMIREDDY),
    ),
    "schedule": (
        ("steps", "EverySteps", "a round after every n local steps", _MCMAHAN),
        ("epochs", "EveryEpochs", "a round after every n passes over the data", _MCMAHAN),
        ("seconds", "EverySeconds", "a round about every so many seconds", ""),
        ("balanced", "Balanced", "more local steps in faster cells, so that all arrive at once", ""),
        ("per_cell", "PerCell", "a fixed number of local steps for each cell", _WANG),
        ("divergence", "Divergence", "rounds only where cells have moved apart", _KAMP),
        ("warmup", "Warmup", "frequent rounds first, then another schedule", _LIN),
    ),
    "privacy": (
        ("dp_fedavg", "Privacy", "clip each cell's update and add noise", _PRIVATE),
        ("secure_sum", "SecureSum", "sum masked values, so that no cell's own is seen", _BONAWITZ),
    ),
    "partition": (
        ("iid", "iid", "shuffle and deal out evenly", _MCMAHAN),
        ("dirichlet", "dirichlet", "each class over the cells by a Dirichlet", _YUROCHKIN),
        ("shards", "shards", "sort by label, deal out a few shards to each", _MCMAHAN),
        ("quantity", "quantity", "cells of very different size", _SILOS),
        ("by_key", "by_key", "keep together what has one key: writer, hospital, site", ""),
        ("inner_dirichlet", "inner_dirichlet", "label shares from a Dirichlet, at fixed sizes of cells", _ACAR),
    ),
}
_PARTS = tuple(
    AlgorithmInfo(kind, name, f"{_ROOMS[kind]}{target}", *more)
    for kind, rows in _ROWS.items()
    for name, target, *more in rows
)


def _algorithm(name: str, line: str, paper: str, **keywords: Mapping[str, Any]) -> AlgorithmInfo:
    return AlgorithmInfo("algorithm", name, "", line, paper, **keywords)


def _of_parts(kind: str, plain: str) -> list[AlgorithmInfo]:
    """Return the algorithms that have one part of a kind, of the same name, and nothing else; all but the plain one."""
    parts = [part for part in _PARTS if part.kind == kind and part.name != plain]
    return [_algorithm(part.name, part.line, part.paper, aggregator={kind: part.name}) for part in parts]


_ALGORITHMS = (
    _algorithm("fedavg", "the weighted mean of the cells, exactly", _MCMAHAN),
    *_of_parts("server", "sgd"),
    _algorithm(
        *("streaming_diloco", "DiLoCo in parts that cross while training goes on", _STREAMING),
        aggregator={"server": {"name": "diloco", "lr": 0.4}, "fragments": 3, "overlap": True},
        scaling={"delay": 1, "alpha": 0.5},
    ),
    _algorithm("fedprox", "FedAvg with a pull to the global weights", _PROX, scaling={"client": "fedprox"}),
    _algorithm("scaffold", "FedAvg with corrected local gradients", _KARIMIREDDY, scaling={"client": "scaffold"}),
    *_of_parts("combine", "mean"),
    _algorithm("dp_fedavg", "FedAvg with clipped, noisy updates", _PRIVATE, aggregator={"privacy": "dp_fedavg"}),
    _algorithm("secure_sum", "FedAvg over masked values", _BONAWITZ, aggregator={"secure": True}),
)

ENTRIES: tuple[AlgorithmInfo, ...] = (*_ALGORITHMS, *_PARTS)
"""All entries, kind by kind."""
