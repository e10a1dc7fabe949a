"""The algorithms that come with xffl, as data: no torch, and nothing is imported from what is named."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["ENTRIES", "Entry"]


@dataclass(frozen=True)
class Entry:
    """An algorithm, or a part of one, by name.

    :param kind: One of :data:`xffl.aggregation.registry.KINDS`.
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
_ADAPTIVE = "xffl.aggregation.adaptive.Adaptive"
_ROBUST = "xffl.aggregation.robust"
_SCHEDULES = "xffl.aggregation.schedules"
_PARTITION = "xffl.training.partition"


def _adaptive(rule: str, beta1: float) -> dict[str, Any]:
    """Return the paper's betas and tau; it tunes the learning rate for each task, 0.1 is a start."""
    return {"lr": 0.1, "betas": (beta1, 0.99), "tau": 1e-3, "rule": rule}


_SERVERS = (
    Entry("server", "sgd", _SGD, "a plain step towards the mean; lr 1 ends there", _REDDI, {"lr": 1.0}),
    Entry("server", "fedavgm", _SGD, "the mean with server momentum", _HSU, {"lr": 1.0, "momentum": 0.9}),
    Entry("server", "fedadagrad", _ADAPTIVE, "adaptive steps, squares summed up", _REDDI, _adaptive("adagrad", 0.0)),
    Entry("server", "fedadam", _ADAPTIVE, "adaptive steps, squares averaged over time", _REDDI, _adaptive("adam", 0.9)),
    Entry("server", "fedyogi", _ADAPTIVE, "adaptive steps, squares that change slowly", _REDDI, _adaptive("yogi", 0.9)),
    Entry(
        "server",
        "diloco",
        _SGD,
        "Nesterov momentum on rare rounds, for language models",
        _DILOCO,
        {"lr": 0.7, "momentum": 0.9, "nesterov": True},
    ),
)

_COMBINERS = (
    Entry("combine", "mean", "xffl.aggregation.combine.Mean", "the weighted mean", _MCMAHAN),
    Entry(
        "combine",
        "fednova",
        "xffl.aggregation.combine.NormalizedMean",
        "the mean of updates divided by each cell's local steps",
        _WANG,
    ),
    Entry("combine", "median", f"{_ROBUST}.CoordinateMedian", "the median of each coordinate", _YIN),
    Entry("combine", "trimmed_mean", f"{_ROBUST}.TrimmedMean", "each coordinate's mean without its extremes", _YIN),
    Entry("combine", "krum", f"{_ROBUST}.Krum", "the cell that is closest to its neighbours", _BLANCHARD),
    Entry("combine", "multi_krum", f"{_ROBUST}.MultiKrum", "the mean of several cells that Krum prefers", _BLANCHARD),
    Entry(
        "combine",
        "geometric_median",
        f"{_ROBUST}.GeometricMedian",
        "the point of least summed distance to all cells",
        _PILLUTLA,
    ),
    Entry("combine", "norm_clipping", f"{_ROBUST}.NormClipping", "the mean of updates cut to a greatest norm", _SUN),
)

_CLIENTS = (
    Entry(
        "client", "fedprox", "xffl.aggregation.clients.prox.FedProx", "pull local steps to the global weights", _PROX
    ),
    Entry(
        "client",
        "scaffold",
        "xffl.aggregation.clients.scaffold.Scaffold",
        "correct local gradients by control variates",
        _KARIMIREDDY,
    ),
)

_TIMES = (
    Entry("schedule", "steps", f"{_SCHEDULES}.EverySteps", "a round after every n local steps", _MCMAHAN),
    Entry("schedule", "epochs", f"{_SCHEDULES}.EveryEpochs", "a round after every n passes over the data", _MCMAHAN),
    Entry("schedule", "seconds", f"{_SCHEDULES}.EverySeconds", "a round about every so many seconds", ""),
    Entry(
        "schedule",
        "balanced",
        f"{_SCHEDULES}.Balanced",
        "more local steps in faster cells, so that all arrive at once",
        "",
    ),
    Entry("schedule", "per_cell", f"{_SCHEDULES}.PerCell", "a fixed number of local steps for each cell", _WANG),
    Entry(
        "schedule",
        "divergence",
        f"{_SCHEDULES}.Divergence",
        "rounds only where cells have moved apart",
        "Kamp et al., 2018, arXiv 1807.03210",
    ),
    Entry(
        "schedule",
        "warmup",
        f"{_SCHEDULES}.Warmup",
        "frequent rounds first, then another schedule",
        "Lin et al., 2020, arXiv 1808.07217",
    ),
)

_PRIVATE_ROUNDS = (
    Entry(
        "privacy", "dp_fedavg", "xffl.aggregation.privacy.Privacy", "clip each cell's update and add noise", _PRIVATE
    ),
    Entry(
        "privacy",
        "secure_sum",
        "xffl.aggregation.secure.SecureSum",
        "sum masked values, so that no cell's own is seen",
        _BONAWITZ,
    ),
)

_PARTITIONS = (
    Entry("partition", "iid", f"{_PARTITION}.iid", "shuffle and deal out evenly", _MCMAHAN),
    Entry("partition", "dirichlet", f"{_PARTITION}.dirichlet", "each class over the cells by a Dirichlet", _YUROCHKIN),
    Entry("partition", "shards", f"{_PARTITION}.shards", "sort by label, deal out a few shards to each", _MCMAHAN),
    Entry("partition", "quantity", f"{_PARTITION}.quantity", "cells of very different size", _SILOS),
    Entry("partition", "by_key", f"{_PARTITION}.by_key", "keep together what has one key: writer, hospital, site", ""),
    Entry(
        "partition",
        "inner_dirichlet",
        f"{_PARTITION}.inner_dirichlet",
        "label shares from a Dirichlet, at fixed sizes of cells",
        _ACAR,
    ),
)


def _algorithm(name: str, line: str, paper: str, **keywords: Mapping[str, Any]) -> Entry:
    return Entry("algorithm", name, "", line, paper, **keywords)


def _served(name: str) -> Entry:
    """Return the algorithm that has the server optimizer of its name, and nothing else."""
    part = next(entry for entry in _SERVERS if entry.name == name)
    return _algorithm(name, part.line, part.paper, aggregator={"server": name})


def _combined(name: str) -> Entry:
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

ENTRIES: tuple[Entry, ...] = (
    *_ALGORITHMS,
    *_SERVERS,
    *_COMBINERS,
    *_CLIENTS,
    *_TIMES,
    *_PRIVATE_ROUNDS,
    *_PARTITIONS,
)
"""All entries, kind by kind."""
