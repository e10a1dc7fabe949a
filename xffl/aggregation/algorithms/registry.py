"""Registry of all algorithms: their names, and how a name with options becomes an object.

Importing this module does not import torch: the entries are data, and the classes that they name are imported on use.

A *spec* describes an object: ``"fedprox"``, ``"fedprox:mu=0.1"``, ``{"name": "fedprox", "mu": 0.1}``, the same with the
dotted path of the user's own class or function (``"mylab.robust.Mine:k=3"``), or the object itself.

Callers say who wrote a spec (:class:`xffl.naming.Writer`). A spec from a file or a peer must name an entry, with
numbers and words as options; otherwise it is refused, and nothing that it names is imported or called.
"""

from __future__ import annotations

import ast
import inspect
import math
import re
from argparse import ArgumentError
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import yaml

from xffl.checks import did_you_mean, number, one_of, real
from xffl.errors import ConfigError
from xffl.message_sizes.codecs import DENSITY, SPARSE_BLOCK, sparse_bytes
from xffl.naming import Writer, check_maker, import_named

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

__all__ = [
    "ENTRIES",
    "KINDS",
    "AlgorithmInfo",
    "describe_entry",
    "entries",
    "find",
    "is_builtin",
    "known_path",
    "make",
    "options_beside",
    "parts_of_algorithm",
    "read_spec",
    "resolve_algorithm",
]

KINDS: Mapping[str, str] = {
    "algorithm": "",
    "server": "xffl.aggregation.algorithms.server_rules.ServerRule",
    "combine": "xffl.aggregation.algorithms.combiners.Combiner",
    "client": "xffl.aggregation.algorithms.clients.Client",
    "schedule": "xffl.aggregation.algorithms.every_steps.Schedule",
    "server_schedule": "",
    "privacy": "",
    "partition": "",
}
"""The kinds of entries, each with the base class of its objects, if there is one."""

_BASES: Mapping[str, tuple[str, ...]] = {
    **{kind: (base,) for kind, base in KINDS.items() if base},
    "privacy": ("xffl.aggregation.privacy.Privacy", "xffl.aggregation.privacy.SecureSum"),
}
"""By kind, the classes of which a class by dotted path must be a subclass, and a function must return an instance."""

_TITLES = {"server_schedule": "server schedule"}
"""Names of kinds in messages, where they differ"""

_BESIDE = {"server": "xffl.aggregation.algorithms.server_optimizer.ServerOptimizer"}
"""By kind, the class that wraps the object: a spec may also have its options, except the first"""

_LEADING = {"server_schedule": 2}
"""By kind, how many leading parameters of an entry's function are not options"""

_OF_TORCH = {"server": "torch.optim.", "server_schedule": "torch.optim.lr_scheduler."}
"""The modules of torch that have the names in :data:`_ALSO`, by kind"""
_SCHEDULES_OF_TORCH = {
    "ConstantLR": "constant",
    "CosineAnnealingLR": "cosine",
    "CosineAnnealingWarmRestarts": "cosine_restarts",
    "ExponentialLR": "exponential",
    "LinearLR": "linear",
    "MultiStepLR": "multi_step",
    "PolynomialLR": "polynomial",
    "StepLR": "step_decay",
}
_ALSO: Mapping[str, Mapping[str, str]] = {
    "server": {
        name: f"xffl.aggregation.algorithms.server_rules.{name}" for name in ("SGD", "Adam", "AdamW", "Adagrad")
    },
    "server_schedule": {
        name: f"xffl.aggregation.algorithms.server_schedules.{function}"
        for name, function in {"step": "step_decay", **_SCHEDULES_OF_TORCH}.items()
    },
}
"""Names beside those of entries, and what they stand for, by kind; those of torch also with its module."""
_ONLY_OF_TORCH = {
    "server": (
        *("ASGD", "Adadelta", "Adafactor", "Adamax", "LBFGS", "Muon", "NAdam", "RAdam", "RMSprop", "Rprop"),
        "SparseAdam",
    ),
    "server_schedule": (
        *("ChainedScheduler", "CyclicLR", "LambdaLR", "MultiplicativeLR", "OneCycleLR", "ReduceLROnPlateau"),
        "SequentialLR",
    ),
}
"""By kind, names of torch that are not supported"""
_INSTEAD = {
    "server": "write it as a ServerRule of your own (the manual's page of algorithms) and give its dotted path",
    "server_schedule": "give a function of the step that returns the factor of the rate, or its dotted path",
}
"""What to use instead."""

# The kinds of an algorithm's parts, and whether they are keywords of the aggregator or of the training loop.
_SIDES = {"server": "aggregator", "combine": "aggregator", "privacy": "aggregator", "client": "scaling"}
_OPTIONAL = ("client", "privacy")  # kinds that may be None


def entries(kind: str | None = None) -> tuple[AlgorithmInfo, ...]:
    """Return the entries of a kind, by default of all, kind by kind; local, without torch."""
    if kind is not None:
        one_of("kind", kind, KINDS)
    return tuple(entry for entry in ENTRIES if kind in (None, entry.kind))


def find(kind: str, name: str) -> AlgorithmInfo | None:
    """Return the entry of a name, or ``None``; local, without torch."""
    return next((entry for entry in entries(kind) if entry.name == name), None)


def make(kind: str, spec: object, *, writer: Writer) -> Any:
    """Make the object of a spec (see the module), or check one that is neither text nor mapping; local.

    Returns an instance of the kind's class; for ``partition`` a function with its options bound, for ``server`` and
    ``algorithm`` the results of ``server_of`` and :func:`resolve_algorithm`. ``writer`` wrote the spec.
    """
    one_of("kind", kind, KINDS)
    if kind == "algorithm":
        return resolve_algorithm(spec, writer=writer)
    if kind == "server":
        # The server's module needs torch, and reads this one.
        server_of = import_named("xffl.aggregation.algorithms.server_optimizer.server_of", kind, writer=Writer.USER)
        return server_of(spec, writer=writer)
    if kind == "server_schedule":
        schedule_of = import_named("xffl.aggregation.algorithms.server_optimizer.schedule_of", kind, writer=Writer.USER)
        return schedule_of(spec, writer)
    if not isinstance(spec, (str, Mapping)):
        return _checked_instance(kind, spec)
    name, given = read_spec(kind, spec)
    target, preset = locate(kind, name, writer=writer)
    options = {**preset, **check_options(f"{kind} {name!r}", target, given, bound=preset, writer=writer)}
    if kind == "partition":
        return partial(target, **options)
    try:
        instance = target(**options)
    except TypeError as wrong:
        raise ConfigError(f"{kind} {name!r} cannot be made with {_shown(options)}: {wrong}") from wrong
    return _checked_instance(kind, instance)


def read_spec(kind: str, spec: object) -> tuple[str, dict[str, Any]]:
    """Split a spec into a name and options; local."""
    what = title_of(kind)
    if isinstance(spec, Mapping):
        options = dict(spec)
        name = options.pop("name", None)
        if not isinstance(name, str) or not all(isinstance(key, str) for key in options):
            raise ConfigError(f'{what} {spec!r} has no name; give {{"name": ..., option: value}}')
        return name, options
    if not isinstance(spec, str) or not spec.strip():
        raise ConfigError(f"{what} {spec!r} is neither a name nor a mapping; give name, or name:option=value")
    if len(spec) > LONGEST_SPEC:
        raise ConfigError(f"{what} {_cut(spec)!r} has {len(spec)} characters; give {LONGEST_SPEC} at most")
    name, _, rest = spec.partition(":")
    options = {}
    for piece in re.split(r",(?![^(\[]*[)\]])", rest) if rest.strip() else ():  # at commas outside brackets
        key, is_pair, value = (part.strip() for part in piece.partition("="))
        if not key or not is_pair or key in options:
            raise ConfigError(f"{what} {spec!r} has no option=value in {piece!r}; write name:option=value,option=value")
        if value[:1] in ("(", "["):  # which the types' parser does not read
            try:
                options[key] = list(ast.literal_eval(value))
            except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as wrong:
                raise ConfigError(f"{value!r} is not a list of values; write (1,2)") from wrong
        else:
            options[key] = value
    return name.strip(), options


def is_builtin(kind: str, name: str) -> bool:
    """Tell whether a name is that of an entry, or a supported one of torch: no user's code is imported; local."""
    return find(kind, name) is not None or known_path(kind, name) is not None


def locate(kind: str, name: str, *, writer: Writer) -> tuple[Any, Mapping[str, Any]]:
    """Return the class or function of a name, and its preset options; local.

    The module says which names ``writer`` may use.
    """
    what = f"{title_of(kind)} {name!r}"
    entry = find(kind, name)
    if entry is not None:
        return load(entry, what), entry.options
    if (path := known_path(kind, name)) is not None:
        return import_named(path, what, writer=Writer.USER), {}
    known = dict.fromkeys([*(entry.name for entry in entries(kind)), *_ALSO.get(kind, ())])
    choices = ", ".join(known)
    if kind in _OF_TORCH and (name.startswith(_OF_TORCH[kind]) or name in _ONLY_OF_TORCH[kind]):
        raise ConfigError(f"{what} of torch is not supported: choose one of {choices}, or {_INSTEAD[kind]}")
    if "." in name and len(name) <= LONGEST_NAME:
        target = import_named(name, what, writer=writer)
        if kind in _BASES:
            bases = [import_named(base, what, writer=Writer.USER) for base in _BASES[kind]]
            check_maker(target, bases, what)
        return target, {}
    raise ConfigError(
        f"{title_of(kind)} {_cut(name)!r} is unknown{did_you_mean(name, known)}; choose one of {choices}, or give the "
        "dotted path of your own"
    )


def title_of(kind: str) -> str:
    """Return the name of a kind in messages; pure."""
    return _TITLES.get(kind, kind)


def options_beside(kind: str) -> tuple[str, ...]:
    """Return the options of a kind's wrapping class, which any spec of the kind may have; local, imports that class."""
    return tuple(option.name for option in _beside(kind))


def _beside(kind: str) -> list[inspect.Parameter]:
    if kind not in _BESIDE:
        return []
    holder = import_named(_BESIDE[kind], kind, writer=Writer.USER)
    return _options_of(holder, 1)


def known_path(kind: str, name: str) -> str | None:
    """Return the dotted path of a known name that is not an entry, or ``None``; local, without torch."""
    names = _ALSO.get(kind, {})
    bare = name.removeprefix(_OF_TORCH.get(kind, ""))
    is_torchs = bare in _SCHEDULES_OF_TORCH or kind == "server"
    return names.get(bare if is_torchs else name)


def load(entry: AlgorithmInfo, what: str) -> Any:
    """Import the class or function of an entry; local."""
    return import_named(entry.target, what, writer=Writer.USER)


def check_options(
    what: str,
    target: Any,
    options: Mapping[str, Any],
    *,
    writer: Writer,
    bound: Mapping[str, Any] | None = None,
    leading: int = 0,
    beside: Collection[str] = (),
) -> dict[str, Any]:
    """Check options against the annotations of a class or function; local.

    Messages also list the options ``beside``, which are checked elsewhere.
    """
    if writer is not Writer.USER:
        _check_plain(what, options)
    with suppress(TypeError, ValueError):  # the parser refuses a target without a signature
        asked = [option for option in _options_of(target, leading) if option.default is option.empty]
        if not options and not asked:
            return {}  # the most frequent case; making a parser takes tens of milliseconds
    _, names = _parser(what, target, set(), leading)
    unknown = [key for key in options if key not in names]
    if unknown:
        known = [*names, *beside]
        misspelled = ", ".join(f"{_cut(key)}{did_you_mean(key, known)}" for key in unknown)
        raise ConfigError(f"{what} has no option {misspelled}; there are: {', '.join(known) or 'none'}")
    left_out = {name for name in names if name not in options}
    if inspect.isclass(target):
        # Options that are not given keep their defaults, of any type; those without a default are required.
        parameters = inspect.signature(target).parameters.values()
        left_out -= {option.name for option in parameters if option.default is inspect.Parameter.empty}
    # Another parser, with the given options only: jsonargparse would check defaults, too.
    parser, _ = _parser(what, target, {*left_out, *(bound or {}).keys() - options.keys()}, leading)
    try:
        parsed = parser.parse_object(dict(options))
    except (ArgumentError, TypeError, ValueError, OverflowError) as wrong:
        takes = describe_options(target, leading=leading)
        _refuse_nonfinite(what, options, takes)
        reason = " ".join(str(wrong).split())
        raise ConfigError(
            f"{what} cannot be made with {_shown(options) or 'no options'}: {reason}; it takes {takes}"
        ) from wrong
    if writer is not Writer.USER:
        _check_plain(what, {name: parsed[name] for name in options})  # a word could stand for a class or function
    return {name: parsed[name] for name in options}


def _refuse_nonfinite(what: str, options: Mapping[str, Any], takes: str) -> None:
    """Raise ConfigError where an option that was refused is NaN or infinite; pure."""
    # The parser reads the word as a text, and would only say that it is not a number.
    for key, value in options.items():
        for item in value if isinstance(value, (list, tuple)) else [value]:
            numeral = real(item) if isinstance(item, str) else item
            if isinstance(numeral, float) and not math.isfinite(numeral):
                number(f"{key} of {what}", numeral, hint=f"it takes {takes}")


LONGEST_SPEC = 4096
"""The most characters of a spec; the time to find its commas grows with their square"""
LONGEST_NAME = 200
"""The most characters of a name"""
MOST_OPTIONS = 32
"""The most options of a spec from a file or peer, and items of a list among them"""
_WORD = re.compile(r"[A-Za-z_]\w{0,63}|[-+]?(?:\d{1,20}\.?\d{0,20}|\.\d{1,20})(?:[eE][-+]?\d{1,3})?", re.ASCII)
"""A word or a number: a value that a file or peer may give an option, because it cannot be a dotted path."""


def _check_plain(what: str, options: Mapping[str, Any]) -> None:
    """Refuse options from a file or peer that could be more than numbers and words; pure."""
    # The parser would import a class that a dotted path or a mapping names.
    for key, value in options.items():
        items = value if isinstance(value, (list, tuple)) else [value]
        is_plain = all(item is None or isinstance(item, (bool, float)) or _is_word(item) for item in items)
        if not is_plain or not _WORD.fullmatch(key) or max(len(options), len(items)) > MOST_OPTIONS:
            raise ConfigError(
                f"{what} has the option {_cut(key)}={_cut(repr(value))} in a file or message; options there are "
                f"numbers, single words or {MOST_OPTIONS} of them in a list at most; give this by an option of your own"
            )


def _is_word(value: object) -> bool:
    if isinstance(value, int):
        return abs(value) < 2**63
    return isinstance(value, str) and (not value or _WORD.fullmatch(value) is not None)


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST_NAME else f"{text[:LONGEST_NAME]}..."


def describe_options(target: Any, *, leading: int = 0, preset: Mapping[str, Any] | None = None) -> str:
    """Return the options of a class or function as text, with types and defaults; local."""
    return _written(_options_of(target, leading), preset or {}) or "none"


def describe_entry(entry: AlgorithmInfo) -> str:
    """Return the options of an entry as text; local, imports its class or function, and so torch."""
    if not entry.target:
        words = {**entry.aggregator, **entry.scaling}
        return ", ".join(f"{key} = {value}" for key, value in words.items()) or "none"
    target = load(entry, f"{entry.kind} {entry.name!r}")
    known = [*_options_of(target, _LEADING.get(entry.kind, 0)), *_beside(entry.kind)]
    return _written(known, entry.options) or "none"


def _written(options: Collection[inspect.Parameter], preset: Mapping[str, Any]) -> str:
    known = [option.replace(default=preset.get(option.name, option.default)) for option in options]
    return ", ".join(str(option).replace("'", "") for option in known)


def _options_of(target: Any, leading: int) -> list[inspect.Parameter]:
    """Return the named parameters of a class or function after the leading ones; local."""
    parameters = [*inspect.signature(target).parameters.values()][leading:]
    return [option for option in parameters if option.kind not in (option.VAR_POSITIONAL, option.VAR_KEYWORD)]


def find_algorithm(spec: object) -> tuple[AlgorithmInfo, dict[str, Any]]:
    """Return an algorithm's entry and the given options; local, without torch."""
    name, options = read_spec("algorithm", spec)
    entry = find("algorithm", name)
    if entry is None:
        known = [entry.name for entry in entries("algorithm")]
        raise ConfigError(
            f"algorithm {_cut(name)!r} is unknown{did_you_mean(name, known)}; choose one of {', '.join(known)}"
        )
    return entry, options


def resolve_algorithm(spec: object, *, writer: Writer) -> tuple[dict[str, Any], dict[str, Any]]:
    """Turn a named algorithm into keywords of the aggregator and of the training loop; local.

    An option sets a keyword of the algorithm (``fragments``, ``delay``), or is passed to the part that has it (``lr``
    to the server optimizer, ``mu`` to the client). ``server``, ``combine``, ``client`` and ``privacy`` replace a part,
    or, as a mapping without a name, change its options. ``writer`` wrote the spec.
    """
    keywords, parts = parts_of_algorithm(spec, writer=writer)
    for kind, part in parts.items():
        if part is not None or kind not in _OPTIONAL:
            keywords[_SIDES[kind]][kind] = make(kind, part, writer=writer)
    return keywords["aggregator"], keywords["scaling"]


def parts_of_algorithm(
    spec: object, *, writer: Writer, replaced: Collection[str] = ()
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Return an algorithm's keywords, and the specs of its parts by kind, without making the parts; local.

    Parts of the kinds in ``replaced`` are given by the caller: options that may belong to them are ignored, and their
    names are not looked up.
    """
    entry, options = find_algorithm(spec)
    name = entry.name
    if writer is not Writer.USER:
        _check_plain(f"algorithm {name!r}", {key: value for key, value in options.items() if key not in _SIDES})
    keywords = {"aggregator": dict(entry.aggregator), "scaling": dict(entry.scaling)}
    parts = {kind: keywords[side].pop(kind) for kind, side in _SIDES.items() if kind in keywords[side]}
    for kind in _SIDES.keys() & options.keys():
        parts[kind] = _changed(kind, parts.get(kind), options[kind])
    changes: dict[str, dict[str, Any]] = {}
    looked_at = {kind: part for kind, part in parts.items() if kind not in replaced}
    for key in options.keys() - _SIDES.keys():
        side = next((side for side, words in keywords.items() if key in words), None)
        if side is not None:
            # Keywords have no annotation here: a text is read as in a configuration file.
            keywords[side][key] = _plain(options[key]) if isinstance(options[key], str) else options[key]
            continue
        owner = _owner(name, key, looked_at, keywords, writer=writer, is_required=len(looked_at) == len(parts))
        if owner is not None:
            changes.setdefault(owner, {})[key] = options[key]
    for kind, change in changes.items():
        parts[kind] = _changed(kind, parts[kind], change)
    return keywords, parts


def _owner(
    name: str,
    key: str,
    parts: Mapping[str, Any],
    keywords: Mapping[str, Mapping[str, Any]],
    *,
    writer: Writer,
    is_required: bool,
) -> str | None:
    """Return the part of an algorithm that has an option; ``None`` if none has it and ``is_required`` is false."""
    takes: dict[str, list[str]] = {}
    for kind, part in parts.items():
        if isinstance(part, (str, Mapping)):
            title, _ = read_spec(kind, part)
            target, _ = locate(kind, title, writer=writer)
            takes[kind] = [*_parser(f"{kind} {title!r}", target, set(), 0)[1], *options_beside(kind)]
    owners = [kind for kind, options in takes.items() if key in options]
    if len(owners) == 1:
        return owners[0]
    if owners:
        choice = " or ".join(f'"{owner}": {{"{key}": ...}}' for owner in owners)
        raise ConfigError(f"algorithm {name!r} has several options {key}; say which is meant: {choice}")
    if not is_required:
        return None
    known = [*(word for words in keywords.values() for word in words), *_SIDES]
    there = [*known, *(f"{option} ({kind})" for kind, options in takes.items() for option in options)]
    meant = did_you_mean(key, [*known, *(option for options in takes.values() for option in options)])
    raise ConfigError(f"algorithm {name!r} has no option {_cut(key)}{meant}; there are: {', '.join(there)}")


def _plain(text: str) -> object:
    """Read a text as a configuration file's value; YAML takes ``1e-1`` for a text."""
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as wrong:  # the latter for numbers of thousands of digits
        raise ConfigError(f"option {_cut(text)!r} is no value of YAML ({' '.join(str(wrong).split())})") from wrong
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _changed(kind: str, part: object, change: object) -> object:
    """Return a part with changed options, or its replacement."""
    if not isinstance(change, Mapping) or "name" in change:
        return change
    if not isinstance(part, (str, Mapping)):
        raise ConfigError(f"{kind} {change!r} changes options of a part that has no name; give its name, too")
    name, options = read_spec(kind, part)
    return {"name": name, **options, **change}


def _checked_instance(kind: str, instance: Any) -> Any:
    base = import_named(KINDS[kind], kind, writer=Writer.USER) if KINDS[kind] else None
    if base is not None and not isinstance(instance, base):
        raise ConfigError(f"{kind} must be a name or an object of {KINDS[kind]}, got {instance!r}")
    if kind == "partition" and not callable(instance):
        raise ConfigError(f"partition must be a name or a function, got {instance!r}")
    return instance


def _parser(what: str, target: Any, left_out: set[str], leading: int) -> tuple[ArgumentParser, list[str]]:
    """Return a parser of the options, without those in ``left_out``, and their names."""
    from jsonargparse import ArgumentParser  # a tenth of what a rank imports, and most make nothing with options

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
    """An algorithm, or a part of an algorithm, by name, with a line that describes it, and its paper or an empty text.

    ``target`` is the dotted path of a part's class or function, and ``options`` its preset options. An algorithm sets
    keywords of :class:`xffl.Aggregator` and of :class:`xffl.FederatedScaling` instead, and says what moves in a round,
    and how many bytes of it there are for each fp32 parameter in the mean over rounds, with no codec but its own.
    """

    kind: str
    name: str
    target: str
    line: str
    paper: str
    options: Mapping[str, Any] = field(default_factory=dict)
    aggregator: Mapping[str, Any] = field(default_factory=dict)
    scaling: Mapping[str, Any] = field(default_factory=dict)
    moves: str = ""
    nbytes: float | None = None


_ACAR = "Acar et al., 2021, arXiv 2111.04263"
_BLANCHARD = "Blanchard et al., 2017, arXiv 1703.02757"
_BONAWITZ = "Bonawitz et al., 2017, doi 10.1145/3133956.3133982"
_DILOCO = "Douillard et al., 2023, arXiv 2311.08105"
_MULOCO = "Thérien et al., 2025, arXiv 2505.23725"
_DESLOC = "Iacob et al., 2025, arXiv 2505.22549"
_YUROCHKIN = "Yurochkin et al., 2019, arXiv 1905.12022"
_DUCHI = "Duchi et al., 2011, doi 10.5555/1953048.2021068"
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
_SARFI = "Sarfi et al., 2025, arXiv 2508.15706"
_YIN = "Yin et al., 2018, arXiv 1803.01498"
_KINGMA = "Kingma and Ba, 2015, arXiv 1412.6980"
_LOSHCHILOV = "Loshchilov and Hutter, 2019, arXiv 1711.05101"
_KAMP = "Kamp et al., 2018, arXiv 1807.03210"
_LIN = "Lin et al., 2020, arXiv 1808.07217"
_SGDR = "Loshchilov and Hutter, 2017, arXiv 1608.03983"

_RULES = "xffl.aggregation.algorithms.server_rules."
_SGD = f"{_RULES}SGD"
_NESTEROV = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
_ADAPTIVE = f"{_RULES}Adaptive"


def _adaptive(rule: str, beta1: float) -> dict[str, Any]:
    """Return the paper's betas and tau; it tunes the learning rate for each task, 0.1 is a start."""
    return {"lr": 0.1, "betas": (beta1, 0.99), "tau": 1e-3, "rule": rule}


_ROOMS = {
    "server": "",
    "combine": "xffl.aggregation.algorithms.",
    "client": "xffl.aggregation.algorithms.clients.",
    "schedule": "xffl.aggregation.algorithms.schedules.",
    "server_schedule": "xffl.aggregation.algorithms.server_schedules.",
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
        ("adam", f"{_RULES}Adam", "torch's Adam on the pseudo-gradient", _KINGMA),
        ("adamw", f"{_RULES}AdamW", "torch's AdamW on the pseudo-gradient", _LOSHCHILOV),
        ("adagrad", f"{_RULES}Adagrad", "torch's Adagrad on the pseudo-gradient", _DUCHI),
        ("diloco", _SGD, "Nesterov momentum on rare rounds, for language models", _DILOCO, _NESTEROV),
    ),
    "combine": (
        ("mean", "combiners.Mean", "the weighted mean", _MCMAHAN),
        ("fednova", "scaled_means.NormalizedMean", "the mean of updates divided by each cell's local steps", _WANG),
        ("median", "robust.CoordinateMedian", "the median of each coordinate", _YIN),
        ("trimmed_mean", "robust.TrimmedMean", "each coordinate's mean without its extremes", _YIN),
        ("krum", "robust.Krum", "the cell that is closest to its neighbours", _BLANCHARD),
        ("multi_krum", "robust.MultiKrum", "the mean of several cells that Krum prefers", _BLANCHARD),
        ("geometric_median", "robust.GeometricMedian", "the point of least summed distance to all cells", _PILLUTLA),
        ("norm_clipping", "scaled_means.NormClipping", "the mean of updates cut to a greatest norm", _SUN),
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
    "server_schedule": (
        ("constant", "constant", "a part of the learning rate in the first steps, then all of it", ""),
        ("cosine", "cosine", "down to eta_min along half a cosine", _SGDR),
        ("cosine_restarts", "cosine_restarts", "down along half a cosine again and again", _SGDR),
        ("exponential", "exponential", "times gamma after each step", ""),
        ("linear", "linear", "from one part of the learning rate to another in a line", ""),
        ("multi_step", "multi_step", "times gamma at each milestone", ""),
        ("polynomial", "polynomial", "down to 0 along a power of the steps that are left", ""),
        ("step_decay", "step_decay", "times gamma after every step_size steps; also called step", ""),
        ("warmup", "warmup", "up to the whole rate in a number of steps, then another schedule", ""),
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


def _algorithm(
    name: str, line: str, paper: str, *, moves: str = "weights", nbytes: float = 4.0, **keywords: Mapping[str, Any]
) -> AlgorithmInfo:
    return AlgorithmInfo(
        "algorithm", name=name, target="", line=line, paper=paper, moves=moves, nbytes=nbytes, **keywords
    )


def _of_parts(kind: str, *left_out: str) -> list[AlgorithmInfo]:
    """Return the algorithms that have one part of a kind, of the same name, and nothing else; but for some parts."""
    parts = [part for part in _PARTS if part.kind == kind and part.name not in left_out]
    return [_algorithm(part.name, part.line, part.paper, aggregator={kind: part.name}) for part in parts]


_ALGORITHMS = (
    _algorithm("fedavg", "the weighted mean of the cells, exactly", _MCMAHAN),
    *_of_parts("server", "sgd", "adam", "adamw", "adagrad"),
    _algorithm(
        *("streaming_diloco", "DiLoCo in parts that cross while training goes on", _STREAMING),
        aggregator={"server": {"name": "diloco", "lr": 0.4}, "fragments": 3, "overlap": True},
        scaling={"delay": 1, "alpha": 0.5},
        moves="a third of the weights",
        nbytes=4 / 3,
    ),
    _algorithm(
        *("muloco", "DiLoCo with Muon as the optimizer of the cells", _MULOCO),
        aggregator={"server": "diloco"},
    ),
    _algorithm(
        *("desloc", "means of weights, and more rarely of Adam's moments", _DESLOC),
        scaling={"moments": "average:exp_avg=3,exp_avg_sq=6"},
        moves="weights; moments in some rounds",
        nbytes=4 + 4 / 3 + 4 / 6,
    ),
    _algorithm(
        *("sparseloco", "a few values of each block in two bits, with residuals that decay", _SARFI),
        aggregator={"codec": "sparseloco", "form": "all_gather"},
        moves="1/64 of the weights, in two bits",
        nbytes=sparse_bytes(SPARSE_BLOCK, DENSITY) / SPARSE_BLOCK,
    ),
    _algorithm("fedprox", "FedAvg with a pull to the global weights", _PROX, scaling={"client": "fedprox"}),
    _algorithm(
        *("scaffold", "FedAvg with corrected local gradients", _KARIMIREDDY),
        scaling={"client": "scaffold"},
        moves="weights and control variates",
        nbytes=8.0,
    ),
    *_of_parts("combine", "mean"),
    _algorithm("dp_fedavg", "FedAvg with clipped, noisy updates", _PRIVATE, aggregator={"privacy": "dp_fedavg"}),
    _algorithm(
        *("secure_sum", "FedAvg over masked values", _BONAWITZ),
        aggregator={"secure": True},
        moves="masked weights, in 64 bits",
        nbytes=8.0,
    ),
)

ENTRIES: tuple[AlgorithmInfo, ...] = (*_ALGORITHMS, *_PARTS)
"""All entries, kind by kind."""
