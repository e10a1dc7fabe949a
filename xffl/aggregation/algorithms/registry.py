"""Every algorithm by its name: what there is, and how a name with options becomes an object.

Importing this needs no torch: the entries are data, and what they name is imported when it is made.

A *spec* says what is wanted: ``"fedprox"``, ``"fedprox:mu=0.1"``, ``{"name": "fedprox", "mu": 0.1}``, the same with
the dotted path of a class or function of one's own (``"mylab.robust.Mine:k=3"``), or an object that is made already.
"""

from __future__ import annotations

import ast
import inspect
import re
from argparse import ArgumentError
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any

import yaml
from jsonargparse import ArgumentParser

from xffl.errors import ConfigError

__all__ = [
    "ENTRIES",
    "KINDS",
    "AlgorithmInfo",
    "check_options",
    "describe_options",
    "entries",
    "find",
    "find_algorithm",
    "load",
    "locate",
    "make",
    "read_spec",
    "resolve_algorithm",
]


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

_PARTS = {"server": "aggregator", "combine": "aggregator", "privacy": "aggregator", "client": "scaling"}
"""The kinds that an algorithm is put together from, and whose keywords they are."""
_OPTIONAL = ("client", "privacy")
"""Those of which ``None`` means none."""


def entries(kind: str | None = None) -> tuple[AlgorithmInfo, ...]:
    """Return what there is; local, without torch.

    :param kind: One of :data:`KINDS`; ``None`` for all.
    :return: The entries, kind by kind.
    :raises ConfigError: if there is no such kind.
    """
    if kind is not None:
        _check_kind(kind)
    return tuple(entry for one in KINDS for entry in ENTRIES if entry.kind == one and kind in (None, one))


def find(kind: str, name: str) -> AlgorithmInfo | None:
    """Return the entry of a name, if there is one; local, without torch.

    :param kind: One of :data:`KINDS`.
    :param name: Its name.
    :return: The entry, or ``None``.
    :raises ConfigError: if there is no such kind.
    """
    return next((entry for entry in entries(kind) if entry.name == name), None)


def make(kind: str, spec: object) -> Any:
    """Make what a spec says; local.

    :param kind: One of :data:`KINDS`.
    :param spec: A spec (see the module); what is no text and no mapping counts as made already.
    :return: An instance of the kind's class; for ``server`` what :func:`xffl.aggregation.algorithms.server.server_of`
        returns, for ``partition`` a function with its options bound, for ``algorithm`` what :func:`resolve_algorithm`
        returns.
    :raises ConfigError: if there is nothing of that name, or an option is unknown, missing, or of another type.
    """
    _check_kind(kind)
    if kind == "algorithm":
        return resolve_algorithm(spec)
    if kind == "server":
        # The server's module needs torch, and reads this one.
        return import_module("xffl.aggregation.algorithms.server").server_of(spec)
    if not isinstance(spec, (str, Mapping)):
        return _checked_instance(kind, spec)
    name, given = read_spec(kind, spec)
    target, preset = locate(kind, name)
    options = {**preset, **check_options(f"{kind} {name!r}", target, given, bound=preset)}
    if kind == "partition":
        return partial(target, **options)
    try:
        made = target(**options)
    except TypeError as wrong:
        raise ConfigError(f"{kind} {name!r} cannot be made with {_shown(options)}: {wrong}") from wrong
    return _checked_instance(kind, made)


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
    for piece in re.split(r",(?![^(\[]*[)\]])", rest) if rest.strip() else ():
        key, is_pair, value = (part.strip() for part in piece.partition("="))
        if not key or not is_pair or key in options:
            raise ConfigError(f"{kind} {spec!r} has no option=value in {piece!r}; write name:option=value,option=value")
        options[key] = _parsed(value)
    return name.strip(), options


def locate(kind: str, name: str, *, home: str | None = None) -> tuple[Any, Mapping[str, Any]]:
    """Import what a name stands for; local."""
    entry = find(kind, name) if kind in KINDS else None
    if entry is not None:
        return load(entry.target, f"{kind} {name!r}"), entry.options
    if "." in name:
        return load(name, f"{kind} {name!r}"), {}
    if home is not None and inspect.isclass(found := getattr(import_module(home), name, None)):
        return found, {}
    known = [one.name for one in entries(kind)] if kind in KINDS else []
    choices = ", ".join([*known, *([f"a class of {home}"] if home else [])])
    raise ConfigError(f"{kind} {name!r} is unknown; choose one of {choices}, or give the dotted path of your own")


def load(path: str, what: str) -> Any:
    """Import an object by its dotted path; local."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError, TypeError, ValueError) as wrong:
        raise ConfigError(
            f"{what}: {path} cannot be imported ({wrong}); give the path of a class or function"
        ) from wrong


def check_options(
    what: str, target: Any, given: Mapping[str, Any], *, bound: Mapping[str, Any] | None = None, leading: int = 0
) -> dict[str, Any]:
    """Check options against the types that a class or function asks for; local."""
    names = _option_names(what, target, leading)
    unknown = [key for key in given if key not in names]
    if unknown:
        raise ConfigError(f"{what} has no option {', '.join(unknown)}; there are: {', '.join(names) or 'none'}")
    absent = {name for name in names if name not in given}
    # What is not given keeps its default, which may be of any type; a class must get what has none.
    left_out = absent - _required(target) if inspect.isclass(target) else absent
    parser, _ = _parser(what, target, {*left_out, *(bound or {}).keys() - given.keys()}, leading)
    try:
        parsed = parser.parse_object(dict(given))
    except (ArgumentError, TypeError, ValueError) as wrong:
        known, told = describe_options(target, leading=leading), " ".join(str(wrong).split())
        raise ConfigError(
            f"{what} cannot be made with {_shown(given) or 'no options'}: {told}; it takes {known}"
        ) from wrong
    return {name: parsed[name] for name in given}


def describe_options(target: Any, *, leading: int = 0, preset: Mapping[str, Any] | None = None) -> str:
    """Tell the options of a class or function, with types and defaults; local."""
    told = []
    for one in list(inspect.signature(target).parameters.values())[leading:]:
        if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD):
            default = (preset or {}).get(one.name, one.default)
            told.append(str(one.replace(default=default)).replace("'", ""))
    return ", ".join(told) or "none"


def find_algorithm(spec: object) -> tuple[AlgorithmInfo, dict[str, Any]]:
    """Return an algorithm's entry and the options that are given; local, without torch."""
    name, given = read_spec("algorithm", spec)
    entry = find("algorithm", name)
    if entry is None:
        raise ConfigError(
            f"algorithm {name!r} is unknown; choose one of {', '.join(one.name for one in entries('algorithm'))}"
        )
    return entry, given


def resolve_algorithm(spec: object) -> tuple[dict[str, Any], dict[str, Any]]:
    """Turn a named algorithm into keywords of the aggregator and of the training loop; local.

    An option goes where it belongs: to a keyword that the algorithm sets (``fragments``, ``delay``), or to the one of
    its parts that knows it (``lr`` to the server optimizer, ``mu`` to the client). ``server``, ``combine``, ``client``
    and ``privacy`` replace a part, or, as a mapping without a name, change options of the one that is there.

    :param spec: A spec of kind ``algorithm``; ``{"name": "fedadam", "lr": 0.03}``.
    :return: Keywords for :class:`xffl.Aggregator`, and for :class:`xffl.FederatedScaling`.
    :raises ConfigError: if there is no such algorithm, or an option belongs nowhere, or to several parts.
    """
    entry, given = find_algorithm(spec)
    name = entry.name
    keywords = {"aggregator": dict(entry.aggregator), "scaling": dict(entry.scaling)}
    parts = {kind: keywords[side].pop(kind) for kind, side in _PARTS.items() if kind in keywords[side]}
    for kind in _PARTS.keys() & given.keys():
        parts[kind] = _changed(kind, parts.get(kind), given[kind])
    changes: dict[str, dict[str, Any]] = {}
    for key in given.keys() - _PARTS.keys():
        side = next((side for side, words in keywords.items() if key in words), None)
        if side is not None:
            # No class says which type a keyword has: a text is what it would be in a configuration file.
            keywords[side][key] = _plain(given[key]) if isinstance(given[key], str) else given[key]
        else:
            changes.setdefault(_owner(name, key, parts, keywords), {})[key] = given[key]
    for kind, options in changes.items():
        parts[kind] = _changed(kind, parts[kind], options)
    for kind, part in parts.items():
        if part is not None or kind not in _OPTIONAL:
            keywords[_PARTS[kind]][kind] = make(kind, part)
    return keywords["aggregator"], keywords["scaling"]


def _check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise ConfigError(f"kind {kind!r} is unknown; choose one of {', '.join(KINDS)}")


def _owner(name: str, key: str, parts: Mapping[str, Any], keywords: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the part of an algorithm that an option belongs to."""
    takes = {kind: _options_of_part(kind, part) for kind, part in parts.items()}
    owners = [kind for kind, options in takes.items() if key in options]
    if len(owners) == 1:
        return owners[0]
    if owners:
        choice = " or ".join(f'"{owner}": {{"{key}": ...}}' for owner in owners)
        raise ConfigError(f"algorithm {name!r} has several options {key}; say which is meant: {choice}")
    there = [*(word for words in keywords.values() for word in words), *_PARTS]
    there += [f"{option} ({kind})" for kind, options in takes.items() for option in options]
    raise ConfigError(f"algorithm {name!r} has no option {key}; there are: {', '.join(there)}")


def _options_of_part(kind: str, part: object) -> list[str]:
    if not isinstance(part, (str, Mapping)):
        return []
    name, _ = read_spec(kind, part)
    leading = 1 if kind == "server" else 0
    home = "torch.optim" if kind == "server" else None
    return _option_names(f"{kind} {name!r}", locate(kind, name, home=home)[0], leading)


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


def _checked_instance(kind: str, made: Any) -> Any:
    base = load(KINDS[kind], kind) if KINDS[kind] else None
    if base is not None and not isinstance(made, base):
        raise ConfigError(f"{kind} {made!r} is no {KINDS[kind]}; give a name, or an object of such a class")
    if kind == "partition" and not callable(made):
        raise ConfigError(f"partition {made!r} cannot be called; give a name, or a function")
    return made


def _parser(what: str, target: Any, left_out: set[str], leading: int) -> tuple[ArgumentParser, list[str]]:
    """Return a parser of the options that are not left out, and their names."""
    parser = ArgumentParser(exit_on_error=False)
    skip: set[str | int] = {*left_out, *([leading] if leading else [])}
    add: Callable[..., list[str]] = (
        parser.add_class_arguments if inspect.isclass(target) else parser.add_function_arguments
    )
    try:
        names = add(target, skip=skip, fail_untyped=False)
    except (TypeError, ValueError) as wrong:
        raise ConfigError(
            f"{what}: the options of {target!r} cannot be read ({wrong}); give a class or function"
        ) from wrong
    return parser, names


def _option_names(what: str, target: Any, leading: int) -> list[str]:
    _, names = _parser(what, target, set(), leading)
    return names


def _required(target: Any) -> set[str]:
    return {one.name for one in inspect.signature(target).parameters.values() if one.default is inspect.Parameter.empty}


def _parsed(text: str) -> Any:
    """Read brackets, which the types' parser does not; leave the rest to it."""
    if text[:1] not in ("(", "["):
        return text
    try:
        return list(ast.literal_eval(text))
    except (ValueError, SyntaxError, TypeError) as wrong:
        raise ConfigError(f"{text!r} is no list of values; write (1,2)") from wrong


def _shown(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in options.items())


@dataclass(frozen=True)
class AlgorithmInfo:
    """An algorithm, or a part of one, by name.

    :param kind: One of :data:`xffl.aggregation.algorithms.registry.KINDS`.
    :param name: Its name, one of its kind.
    :param target: Dotted path of the class or function; empty for the kind ``algorithm``.
    :param line: What it does, in a line.
    :param paper: Author, year and number of the paper, or empty.
    :param options: Keywords of the target that the name stands for.
    :param aggregator: For an algorithm: the keywords of :class:`xffl.Aggregator` that it sets.
    :param scaling: For an algorithm: the keywords of :class:`xffl.FederatedScaling` that it sets.
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

_SGD = "torch.optim.SGD"
_ADAPTIVE = "xffl.aggregation.algorithms.server.Adaptive"
_COMBINE = "xffl.aggregation.algorithms.combiners"
_SCHEDULES = "xffl.aggregation.algorithms.schedules"
_PARTITION = "xffl.training.partition"


def _adaptive(rule: str, beta1: float) -> dict[str, Any]:
    """Return the paper's betas and tau; it tunes the learning rate for each task, 0.1 is a start."""
    return {"lr": 0.1, "betas": (beta1, 0.99), "tau": 1e-3, "rule": rule}


_server = partial(AlgorithmInfo, "server")
_combine = partial(AlgorithmInfo, "combine")
_client = partial(AlgorithmInfo, "client")
_schedule = partial(AlgorithmInfo, "schedule")
_privacy = partial(AlgorithmInfo, "privacy")
_partition = partial(AlgorithmInfo, "partition")

_SERVERS = (
    _server("sgd", _SGD, "a plain step towards the mean; lr 1 ends there", _REDDI, {"lr": 1.0}),
    _server("fedavgm", _SGD, "the mean with server momentum", _HSU, {"lr": 1.0, "momentum": 0.9}),
    _server("fedadagrad", _ADAPTIVE, "adaptive steps, squares summed up", _REDDI, _adaptive("adagrad", 0.0)),
    _server("fedadam", _ADAPTIVE, "adaptive steps, squares averaged over time", _REDDI, _adaptive("adam", 0.9)),
    _server("fedyogi", _ADAPTIVE, "adaptive steps, squares that change slowly", _REDDI, _adaptive("yogi", 0.9)),
    _server(
        "diloco",
        _SGD,
        "Nesterov momentum on rare rounds, for language models",
        _DILOCO,
        {"lr": 0.7, "momentum": 0.9, "nesterov": True},
    ),
)

_COMBINERS = (
    _combine("mean", f"{_COMBINE}.Mean", "the weighted mean", _MCMAHAN),
    _combine("fednova", f"{_COMBINE}.NormalizedMean", "the mean of updates divided by each cell's local steps", _WANG),
    _combine("median", f"{_COMBINE}.CoordinateMedian", "the median of each coordinate", _YIN),
    _combine("trimmed_mean", f"{_COMBINE}.TrimmedMean", "each coordinate's mean without its extremes", _YIN),
    _combine("krum", f"{_COMBINE}.Krum", "the cell that is closest to its neighbours", _BLANCHARD),
    _combine("multi_krum", f"{_COMBINE}.MultiKrum", "the mean of several cells that Krum prefers", _BLANCHARD),
    _combine(
        "geometric_median", f"{_COMBINE}.GeometricMedian", "the point of least summed distance to all cells", _PILLUTLA
    ),
    _combine("norm_clipping", f"{_COMBINE}.NormClipping", "the mean of updates cut to a greatest norm", _SUN),
)

_CLIENTS = (
    _client("fedprox", "xffl.aggregation.algorithms.clients.FedProx", "pull local steps to the global weights", _PROX),
    _client(
        "scaffold",
        "xffl.aggregation.algorithms.clients.Scaffold",
        "correct local gradients by control variates",
        _KARIMIREDDY,
    ),
)

_TIMES = (
    _schedule("steps", f"{_SCHEDULES}.EverySteps", "a round after every n local steps", _MCMAHAN),
    _schedule("epochs", f"{_SCHEDULES}.EveryEpochs", "a round after every n passes over the data", _MCMAHAN),
    _schedule("seconds", f"{_SCHEDULES}.EverySeconds", "a round about every so many seconds", ""),
    _schedule("balanced", f"{_SCHEDULES}.Balanced", "more local steps in faster cells, so that all arrive at once", ""),
    _schedule("per_cell", f"{_SCHEDULES}.PerCell", "a fixed number of local steps for each cell", _WANG),
    _schedule(
        "divergence",
        f"{_SCHEDULES}.Divergence",
        "rounds only where cells have moved apart",
        "Kamp et al., 2018, arXiv 1807.03210",
    ),
    _schedule(
        "warmup",
        f"{_SCHEDULES}.Warmup",
        "frequent rounds first, then another schedule",
        "Lin et al., 2020, arXiv 1808.07217",
    ),
)

_PRIVATE_ROUNDS = (
    _privacy(
        "dp_fedavg", "xffl.aggregation.privacy.differential.Privacy", "clip each cell's update and add noise", _PRIVATE
    ),
    _privacy(
        "secure_sum",
        "xffl.aggregation.privacy.secure_sum.SecureSum",
        "sum masked values, so that no cell's own is seen",
        _BONAWITZ,
    ),
)

_PARTITIONS = (
    _partition("iid", f"{_PARTITION}.iid", "shuffle and deal out evenly", _MCMAHAN),
    _partition("dirichlet", f"{_PARTITION}.dirichlet", "each class over the cells by a Dirichlet", _YUROCHKIN),
    _partition("shards", f"{_PARTITION}.shards", "sort by label, deal out a few shards to each", _MCMAHAN),
    _partition("quantity", f"{_PARTITION}.quantity", "cells of very different size", _SILOS),
    _partition("by_key", f"{_PARTITION}.by_key", "keep together what has one key: writer, hospital, site", ""),
    _partition(
        "inner_dirichlet",
        f"{_PARTITION}.inner_dirichlet",
        "label shares from a Dirichlet, at fixed sizes of cells",
        _ACAR,
    ),
)


def _algorithm(name: str, line: str, paper: str, **keywords: Mapping[str, Any]) -> AlgorithmInfo:
    return AlgorithmInfo("algorithm", name, "", line, paper, **keywords)


def _served(name: str) -> AlgorithmInfo:
    """Return the algorithm that has the server optimizer of its name, and nothing else."""
    part = next(entry for entry in _SERVERS if entry.name == name)
    return _algorithm(name, part.line, part.paper, aggregator={"server": name})


def _combined(name: str) -> AlgorithmInfo:
    """Return the algorithm that has the combiner of its name, and nothing else."""
    part = next(entry for entry in _COMBINERS if entry.name == name)
    return _algorithm(name, part.line, part.paper, aggregator={"combine": name})


_ALGORITHMS = (
    _algorithm("fedavg", "the weighted mean of the cells, exactly", _MCMAHAN),
    *map(_served, ("fedavgm", "fedadagrad", "fedadam", "fedyogi", "diloco")),
    _algorithm(
        "streaming_diloco",
        "DiLoCo in parts that cross while training goes on",
        _STREAMING,
        aggregator={"server": {"name": "diloco", "lr": 0.4}, "fragments": 3, "overlap": True},
        scaling={"delay": 1, "alpha": 0.5},
    ),
    _algorithm("fedprox", "FedAvg with a pull to the global weights", _PROX, scaling={"client": "fedprox"}),
    _algorithm("scaffold", "FedAvg with corrected local gradients", _KARIMIREDDY, scaling={"client": "scaffold"}),
    *map(
        _combined,
        ("fednova", "median", "trimmed_mean", "krum", "multi_krum", "geometric_median", "norm_clipping"),
    ),
    _algorithm("dp_fedavg", "FedAvg with clipped, noisy updates", _PRIVATE, aggregator={"privacy": "dp_fedavg"}),
    _algorithm("secure_sum", "FedAvg over masked values", _BONAWITZ, aggregator={"secure": True}),
)

ENTRIES: tuple[AlgorithmInfo, ...] = (
    *_ALGORITHMS,
    *_SERVERS,
    *_COMBINERS,
    *_CLIENTS,
    *_TIMES,
    *_PRIVATE_ROUNDS,
    *_PARTITIONS,
)
"""All entries, kind by kind."""
