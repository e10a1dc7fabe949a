"""Algorithms by name: what a spec means, which options there are, and that every entry leads somewhere."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from xffl.aggregation.aggregator import Aggregator
from xffl.aggregation.algorithms import registry
from xffl.aggregation.algorithms.combiners import Coordinatewise, Mean
from xffl.aggregation.algorithms.every_steps import EverySteps
from xffl.aggregation.algorithms.registry import KINDS, AlgorithmInfo, entries, find, make, read_spec, resolve_algorithm
from xffl.aggregation.algorithms.schedules import PerCell, Warmup
from xffl.aggregation.algorithms.server_optimizer import NamedSchedule, ServerOptimizer
from xffl.aggregation.algorithms.server_rules import SGD, AdamW, Adaptive
from xffl.aggregation.federated_scaling import FederatedScaling
from xffl.errors import ConfigError
from xffl.naming import Writer
from xffl.training.data import partition

ROOT = Path(__file__).resolve().parents[2]


# Entries --------------------------------------------------------------------------------------------------------------


def test_every_kind_has_entries_with_names_of_their_own() -> None:
    assert {entry.kind for entry in entries()} == set(KINDS)
    names = [(entry.kind, entry.name) for entry in entries()]
    assert len(set(names)) == len(names)
    assert [entry.kind for entry in entries()] == sorted((entry.kind for entry in entries()), key=list(KINDS).index)
    for kind in KINDS:
        assert entries(kind) == tuple(entry for entry in entries() if entry.kind == kind)
    with pytest.raises(ConfigError, match="kind must be one of 'algorithm', .*, got 'servers' .did you mean 'server'"):
        entries("servers")


PAPER = re.compile(r"[A-Z]\w+ (et al\.|and [A-Z]\w+), 20\d\d, (arXiv \d{4}\.\d{4,5}|doi 10\.\S+)")


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: f"{entry.kind}-{entry.name}")
def test_an_entry_tells_a_line_and_a_paper(entry: AlgorithmInfo) -> None:
    assert re.fullmatch(r"[a-z_]+", entry.name)
    assert 10 <= len(entry.line) <= 70 and not entry.line.endswith(".")
    assert PAPER.fullmatch(entry.paper) or not entry.paper
    assert bool(entry.target) == (entry.kind != "algorithm")


def test_find_may_find_nothing() -> None:
    found = find("server", "fedadam")
    assert found is not None and found.paper.endswith("2003.00295")
    assert find("server", "fednova") is None


def test_the_registry_loads_neither_torch_nor_numpy() -> None:
    code = (
        "import sys\n"
        "for name in ('torch', 'numpy', 'matplotlib', 'mpi4py'): sys.modules[name] = None\n"
        "from xffl.aggregation.algorithms.registry import entries\n"
        "print(len(entries()))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False, cwd=ROOT
    )
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) == len(entries())


# Specs ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "name", "options"),
    [
        ("krum", "krum", {}),
        (" krum : ", "krum", {}),
        ("a.b.C:k=3", "a.b.C", {"k": "3"}),
        ("x:a=1, b=two ,c=1e-3", "x", {"a": "1", "b": "two", "c": "1e-3"}),
        ("x:a=(0.9,0.99),b=[1,2],c=", "x", {"a": [0.9, 0.99], "b": [1, 2], "c": ""}),
        ("x:a=p=q", "x", {"a": "p=q"}),
        ({"name": "x", "a": (1, 2)}, "x", {"a": (1, 2)}),
    ],
)
def test_a_spec_is_a_name_with_options(spec: object, name: str, options: dict[str, Any]) -> None:
    assert read_spec("combine", spec) == (name, options)


@pytest.mark.parametrize(
    "spec", ["", "  ", "x:a", "x:=1", "x:a=1,a=2", "x:a=1,,b=2", "x:a=(1,", {"a": 1}, {"name": 3}, 3]
)
def test_what_is_no_spec_is_refused(spec: object) -> None:
    with pytest.raises(ConfigError, match="combine|not a list"):
        read_spec("combine", spec)


def test_reading_a_mapping_leaves_it_alone() -> None:
    spec = {"name": "fedadam", "lr": 0.5}
    read_spec("server", spec)
    make("server", spec, writer=Writer.USER)
    assert spec == {"name": "fedadam", "lr": 0.5}


# Making ---------------------------------------------------------------------------------------------------------------


class Lowest(Coordinatewise):
    """Somebody's own combiner."""

    def __init__(self, power: float = 1.0, *, keep: tuple[int, int] = (0, 1), label: str | None = None) -> None:
        self.power, self.keep, self.label = power, keep, label

    def combine(self, values: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(values.amin(0))


def lowest(power: float) -> Lowest:
    return Lowest(power)


class Stranger:
    """No combiner."""


OWN = f"{__name__}.Lowest"


@pytest.mark.parametrize(
    ("spec", "wanted"),
    [
        (OWN, (1.0, (0, 1), None)),
        (f"{OWN}:power=2", (2.0, (0, 1), None)),
        (f"{OWN}:power=1e-3,keep=(3,4),label=a b", (0.001, (3, 4), "a b")),
        ({"name": OWN, "keep": [5, 6]}, (1.0, (5, 6), None)),
        (f"{__name__}.lowest:power=3", (3.0, (0, 1), None)),
    ],
)
def test_ones_own_class_by_dotted_path_with_typed_options(spec: object, wanted: tuple[Any, ...]) -> None:
    made = make("combine", spec, writer=Writer.USER)
    assert type(made) is Lowest
    assert (made.power, made.keep, made.label) == wanted
    assert isinstance(made.power, float) and isinstance(made.keep, tuple)


def test_what_is_made_already_is_returned_as_it_is() -> None:
    for kind, made in (("combine", Lowest()), ("schedule", EverySteps(3)), ("partition", len)):
        assert make(kind, made, writer=Writer.USER) is made


@pytest.mark.parametrize(
    ("kind", "spec", "told"),
    [
        (
            "combine",
            "krumm",
            r"combine 'krumm' is unknown \(did you mean 'krum'\?\); choose one of mean, fednova, median",
        ),
        ("combine", "mean:power=2", "combine 'mean' has no option power; there are: none"),
        (
            "combine",
            f"{OWN}:pow=2,power=2",
            r"has no option pow \(did you mean 'power'\?\); there are: power, keep, label",
        ),
        (
            "server",
            "fedadm:lr=0.1",
            r"server 'fedadm' is unknown \(did you mean 'fedadam'\?\); choose one of sgd",
        ),
        (
            "server",
            "sgd:clp=0.1",
            r"no option clp \(did you mean 'clip'\?\); there are: lr, .*, schedule, device, clip",
        ),
        ("server", "torch.optim.SGDD", "of torch is not supported: choose one of sgd"),
        (
            "server_schedule",
            "cosin:T_max=3",
            r"server schedule 'cosin' is unknown \(did you mean 'cosine'\?\); ch",
        ),
        (
            "server_schedule",
            "cosine:T_mx=3",
            r"server schedule 'cosine' has no option T_mx \(did you mean 'T_max'\?\); ",
        ),
        ("server", {"name": "sgd", "schedule": "cosin:T_max=3"}, r"'cosin' is unknown \(did you mean 'cosine'\?\)"),
        (
            "client",
            "fedprocs:mu=0.1",
            r"client 'fedprocs' is unknown \(did you mean 'fedprox'\?\); choose",
        ),
        ("schedule", "secondss:every=3", r"schedule 'secondss' is unknown \(did you mean 'seconds'\?\); choose one of"),
        ("server", "sgd:lr=nan", r"^lr of server 'sgd' must be a finite number, got nan; it takes lr: float"),
        ("client", "fedprox:mu=-inf", r"^mu of client 'fedprox' must be a finite number, got -inf; it takes mu: float"),
        ("combine", f"{OWN}:power=nan", "must be a finite number, got nan; it takes power: float = 1.0"),
        ("combine", f"{OWN}:power=high", "power='high'.*it takes power: float = 1.0"),
        ("combine", f"{OWN}:keep=(1,2,3)", "keep="),
        ("combine", {"name": OWN, "power": "2", "label": 3}, "label=3"),
        (
            "combine",
            f"{__name__}.Stranger",
            "must be .* of xffl.aggregation.algorithms.combiners.Combiner, got",
        ),
        ("combine", f"{__name__}.Nobody", "Nobody cannot be imported"),
        ("combine", "no.such.module", "no.such.module cannot be imported .* set PYTHONPATH to the folder of"),
        ("combine", Stranger(), "must be .* of xffl.aggregation.algorithms.combiners.Combiner, got"),
        ("combine", Lowest, "must be .* of xffl.aggregation.algorithms.combiners.Combiner, got"),
        ("combine", None, "must be .* of xffl.aggregation.algorithms.combiners.Combiner, got"),
        ("schedule", "steps", "required: every"),
        ("schedule", "steps:every=0", "every must be a positive integer, got 0"),
        ("partition", 3, "must be a name or a function, got 3"),
        ("aggregate", "mean", "kind must be one of .* got 'aggregate'"),
    ],
)
def test_a_wrong_spec_tells_what_there_is(kind: str, spec: object, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        make(kind, spec, writer=Writer.USER)


def test_specs_may_be_nested() -> None:
    made = make(
        "schedule", {"name": "warmup", "rounds": 2, "every": 1, "then": "per_cell:counts=(4,8)"}, writer=Writer.USER
    )
    assert made == Warmup(2, 1, PerCell((4, 8)))
    assert make("schedule", "warmup:rounds=2,every=1,then=50", writer=Writer.USER) == Warmup(2, 1, EverySteps(50))


def test_a_server_is_made_by_its_own_rules() -> None:
    made = make("server", "AdamW:lr=0.1", writer=Writer.USER)
    assert isinstance(made, ServerOptimizer) and made.rule == AdamW(lr=0.1)
    assert make("server", "none", writer=Writer.USER) is None and make("server", made, writer=Writer.USER) is made


# Algorithms -----------------------------------------------------------------------------------------------------------


def server_options(spec: object) -> dict[str, Any]:
    aggregator, _ = resolve_algorithm(spec, writer=Writer.USER)
    return dict(vars(aggregator["server"].rule))


def test_fedavg_sets_nothing() -> None:
    assert resolve_algorithm("fedavg", writer=Writer.USER) == ({}, {})


def test_options_go_to_the_part_that_knows_them() -> None:
    preset = {"betas": (0.9, 0.99), "tau": 1e-3, "rule": "adam", "initial": 1e-3**2, "is_bias_corrected": False}
    assert server_options("fedadam") == {"lr": 0.1, **preset}
    assert server_options("fedadam:lr=0.03") == {"lr": 0.03, **preset}
    assert server_options({"name": "fedadam", "lr": 0.03, "betas": [0.5, 0.9]}) == {
        "lr": 0.03,
        **preset,
        "betas": (0.5, 0.9),
    }


def test_none_leaves_a_part_out() -> None:
    assert resolve_algorithm({"name": "scaffold", "client": None, "privacy": None}, writer=Writer.USER) == ({}, {})
    assert resolve_algorithm({"name": "streaming_diloco", "alpha": "1e-1"}, writer=Writer.USER)[1]["alpha"] == 0.1


def test_options_may_name_their_part_or_replace_it() -> None:
    assert server_options({"name": "diloco", "server": {"lr": 0.5}}) == vars(SGD(0.5, 0.9, nesterov=True))
    assert server_options({"name": "diloco", "server": "sgd"}) == vars(SGD(1.0))
    assert server_options({"name": "diloco", "server": {"name": "sgd", "lr": 2}, "momentum": 0.5}) == vars(SGD(2, 0.5))


def test_parts_may_be_put_together() -> None:
    aggregator, scaling = resolve_algorithm({"name": "fednova", "server": "fedyogi", "lr": 0.2}, writer=Writer.USER)
    assert aggregator["server"].rule == Adaptive(0.2, rule="yogi")
    assert type(aggregator["combine"]).__name__ == "NormalizedMean" and scaling == {}
    mine = Lowest()
    assert resolve_algorithm({"name": "fedavg", "combine": mine}, writer=Writer.USER) == ({"combine": mine}, {})


def test_streaming_diloco_sets_the_round_as_well() -> None:
    aggregator, scaling = resolve_algorithm("streaming_diloco", writer=Writer.USER)
    server = aggregator.pop("server")
    assert server.rule == SGD(0.4, 0.9, nesterov=True)
    assert aggregator == {"fragments": 3, "overlap": True} and scaling == {"delay": 1, "alpha": 0.5}
    aggregator, scaling = resolve_algorithm(
        {"name": "streaming_diloco", "fragments": 2, "delay": 5, "lr": 0.7}, writer=Writer.USER
    )
    assert aggregator["fragments"] == 2 and aggregator["server"].rule.lr == 0.7 and scaling["delay"] == 5


def test_the_clip_of_a_server_is_an_option_of_its_algorithm() -> None:
    aggregator, scaling = resolve_algorithm("fedadam:clip=1", writer=Writer.USER)
    assert aggregator["server"].clip == 1.0 and aggregator["server"].rule.lr == 0.1 and not scaling
    with pytest.raises(ConfigError, match="clip of the server must be a number > 0, got -1.0"):
        resolve_algorithm("fedadam:clip=-1", writer=Writer.USER)


def test_resolving_leaves_the_presets_alone() -> None:
    before = repr(entries())
    resolve_algorithm({"name": "streaming_diloco", "fragments": 9, "lr": 0.1, "combine": "median"}, writer=Writer.USER)
    assert repr(entries()) == before


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("fedsgd", "algorithm 'fedsgd' is unknown .*; choose one of fedavg, fedavgm"),
        ("fedadam:mu=1", "no option mu; there are: server, combine, privacy, client, lr .server., betas .server."),
        ("fedavg:lr=1", "no option lr; there are: server"),
        ("fedadam:lr=x", "lr='x'"),
        ({"name": "fedavg", "server": {"lr": 1.0}}, "give its name, too"),
        ({"name": "fedadam", "server": "nothing"}, "server 'nothing' is unknown"),
        ({"name": "fedadam", "combine": f"{__name__}.Twin", "lr": 1.0}, "several options lr.*server.*or.*combine"),
        (3, "algorithm 3"),
    ],
)
def test_an_option_that_belongs_nowhere_is_refused(spec: object, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        resolve_algorithm(spec, writer=Writer.USER)


class Twin(Mean):
    """A combiner with an option that server optimizers have, too."""

    def __init__(self, lr: float = 1.0) -> None:
        self.lr = lr


# All of them ----------------------------------------------------------------------------------------------------------

NEEDED = {
    ("algorithm", "dp_fedavg"): {"clip": 1.0, "noise": 1.0},
    ("privacy", "dp_fedavg"): {"clip": 1.0, "noise": 1.0},
    ("algorithm", "norm_clipping"): {"clip": 1.0},
    ("combine", "norm_clipping"): {"clip": 1.0},
    ("schedule", "steps"): {"every": 5},
    ("schedule", "epochs"): {"epochs": 1, "steps_per_epoch": 10},
    ("schedule", "seconds"): {"seconds": 30},
    ("schedule", "balanced"): {"every": 5},
    ("schedule", "per_cell"): {"counts": [5, 10]},
    ("schedule", "divergence"): {"every": 5, "threshold": 0.1},
    ("schedule", "warmup"): {"rounds": 3, "every": 1, "then": 10},
    ("server_schedule", "cosine"): {"T_max": 10},
    ("server_schedule", "cosine_restarts"): {"T_0": 10},
    ("server_schedule", "exponential"): {"gamma": 0.9},
    ("server_schedule", "multi_step"): {"milestones": [5, 10]},
    ("server_schedule", "step_decay"): {"step_size": 10},
    ("server_schedule", "warmup"): {"steps": 5, "then": "cosine:T_max=10"},
}
"""What cannot be left out."""


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: f"{entry.kind}-{entry.name}")
def test_every_entry_can_be_made(entry: AlgorithmInfo) -> None:
    made = make(entry.kind, {"name": entry.name, **NEEDED.get((entry.kind, entry.name), {})}, writer=Writer.USER)
    if entry.kind == "server":
        assert isinstance(made, ServerOptimizer)
    elif entry.kind == "server_schedule":
        assert isinstance(made, NamedSchedule) and made(0, 1.0) >= 0.0
    elif entry.kind == "partition":
        assert callable(made)
    elif entry.kind != "algorithm":
        assert type(made) is registry.load(entry, "entry")


@pytest.mark.parametrize("entry", entries("algorithm"), ids=lambda entry: entry.name)
def test_an_algorithm_sets_keywords_that_there_are(entry: AlgorithmInfo) -> None:
    assert entry.aggregator.keys() <= inspect.signature(Aggregator).parameters.keys()
    assert entry.scaling.keys() <= inspect.signature(FederatedScaling).parameters.keys()


def test_a_partition_is_a_function_with_its_options_bound() -> None:
    bound = make("partition", "dirichlet:alpha=0.5", writer=Writer.USER)
    assert bound.func is partition.dirichlet and bound.keywords == {"alpha": 0.5}
    with pytest.raises(ConfigError, match="alpha='x'"):
        make("partition", "dirichlet:alpha=x", writer=Writer.USER)
