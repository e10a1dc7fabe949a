"""The table of cases: which layout, and what is done there. Data only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["CASES", "EXACT", "Case"]

Options = dict[str, Any]
Layout = tuple[tuple[int, ...], int | None]


@dataclass(frozen=True)
class Case:
    """One case.

    :param kind: What is done, see :mod:`tests.golden.cases`.
    :param sizes: Ranks of the cells.
    :param hsdp: Ranks of a replica.
    :param options: What it is done with.
    """

    kind: str
    sizes: tuple[int, ...]
    hsdp: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


PAIR: Layout = ((1, 1), None)
SHARDS: Layout = ((2, 2), None)
COPIES: Layout = ((2, 2), 1)
WHOLE: Layout = ((2, 2), 2)
UNLIKE: Layout = ((4, 2), 2)
CUT: Layout = ((3, 1), None)
THREE: Layout = ((1, 2, 3), None)
FOUR: Layout = ((1, 1, 1, 1), None)
FIVE: Layout = ((2, 1, 1, 1, 1), None)
FOUR_OF_TWO: Layout = ((2, 2, 2, 2), None)
LAYOUTS = (PAIR, SHARDS, COPIES, WHOLE, UNLIKE, CUT, THREE, FOUR)

LEVELS: Options = {"levels": [{}, {"every": 2, "groups": [2, 2]}]}
TWO_LEVELS: Options = {"levels": [{"codec": "bf16"}, {"every": 2, "codec": "int8", "groups": [2, 2]}]}
UPPER: Options = {"levels": [{}, {"every": 2, "groups": [2, 2], "options": {"server": "diloco"}}], "server": "fedavgm"}
NOISE: Options = {"name": "dp_fedavg", "clip": 0.5, "noise": 0.25, "seed": 3}
HIDDEN: Options = {"policies": {"*running*": "local", "*num_batches*": "local"}}
LATE: Options = {"late": True, "overlap": True}

ROUNDS: list[tuple[str, Options, tuple[Layout, ...]]] = [
    ("plain", {}, LAYOUTS),
    ("unweighted", {"weights": None}, (PAIR, CUT, THREE)),
    ("equal parts", {"weights": "equal parts"}, LAYOUTS),
    ("mixed", {"mixed": True}, LAYOUTS),
    ("mixed, small buckets", {"mixed": True, "bucket_bytes": 40, "form": "all_gather"}, (COPIES, UNLIKE, THREE)),
    ("policies", {"policies": "by layer"}, (SHARDS, THREE)),
    ("averaged fixed", {"policies": {"*fixed": "average"}}, (CUT, UNLIKE)),
    ("in place", {"atomic": False, "bucket_bytes": 64}, (PAIR, UNLIKE, THREE)),
    ("all_gather", {"form": "all_gather"}, (SHARDS, UNLIKE, FOUR)),
    ("two_hop", {"form": "two_hop", "bucket_bytes": 64}, (PAIR, COPIES, UNLIKE, THREE, FOUR)),
    ("rails", {"rails": True, "bucket_bytes": 48}, (COPIES, UNLIKE)),
    ("rails, two_hop, int8", {"rails": True, "form": "two_hop", "codec": "int8", "bucket_bytes": 64}, (COPIES, UNLIKE)),
    ("bf16", {"codec": "bf16"}, (PAIR, SHARDS, THREE)),
    ("fp16", {"codec": "fp16"}, (CUT, FOUR)),
    ("int8", {"codec": "int8"}, (PAIR, SHARDS, UNLIKE, CUT, THREE, FOUR)),
    ("int8, stochastic", {"codec": "int8:block=16,scale=fp32,rounding=stochastic"}, (SHARDS, THREE)),
    ("int4", {"codec": "int4"}, (COPIES, THREE)),
    ("topk", {"codec": "topk:0.25"}, (PAIR, UNLIKE, THREE)),
    ("codecs by name", {"codec": {"*.bias": "none", "*": "int8"}, "bucket_bytes": 64}, (SHARDS, UNLIKE)),
    ("fragments", {"fragments": 2, "count": 5}, (PAIR, UNLIKE, THREE)),
    ("fragments, int8", {"fragments": 2, "codec": "int8", "count": 5}, (SHARDS, FOUR)),
    ("fragments, diloco", {"fragments": 2, "server": "diloco", "count": 5}, (COPIES, CUT)),
    ("norms", {"norms": True}, (SHARDS, UNLIKE)),
    *((name, {"server": name}, (UNLIKE, CUT)) for name in ("sgd", "fedavgm", "fedadagrad", "fedyogi", "diloco")),
    ("fedadam", {"server": "fedadam"}, (PAIR, COPIES, UNLIKE, CUT, THREE)),
    ("AdamW", {"server": "torch.optim.AdamW:lr=0.01"}, (SHARDS, THREE)),
    ("fedadam, int8", {"server": "fedadam", "codec": "int8"}, (SHARDS, THREE)),
    ("fedyogi, rails", {"server": "fedyogi", "rails": True, "bucket_bytes": 48}, (COPIES, UNLIKE)),
    ("median", {"combine": "median"}, (UNLIKE, THREE, FOUR)),
    ("median, rails", {"combine": "median", "form": "two_hop", "rails": True}, (UNLIKE, THREE)),
    ("trimmed_mean", {"combine": "trimmed_mean:share=0.34"}, (THREE, FIVE)),
    ("krum", {"combine": "krum:faulty=1"}, (FIVE,)),
    ("krum, in place", {"combine": "krum:faulty=1", "atomic": False, "bucket_bytes": 40}, (FIVE,)),
    ("multi_krum", {"combine": "multi_krum:faulty=1,selected=3"}, (FIVE,)),
    ("geometric_median", {"combine": "geometric_median:iterations=20"}, (UNLIKE, FIVE)),
    ("geometric_median, int8", {"combine": "geometric_median:iterations=20", "codec": "int8"}, (THREE, FOUR)),
    ("norm_clipping", {"combine": "norm_clipping:clip=0.5"}, (UNLIKE, THREE)),
    ("fednova", {"combine": "fednova"}, (SHARDS, THREE)),
    ("fednova, fedavgm, two_hop", {"combine": "fednova", "server": "fedavgm", "form": "two_hop"}, (UNLIKE, THREE)),
    ("reject", {"bad": 1}, (PAIR, UNLIKE, THREE)),
    ("reject, int8", {"bad": 0, "codec": "int8"}, (SHARDS, THREE)),
    ("drop_cell", {"bad": 1, "nonfinite": "drop_cell"}, (PAIR, UNLIKE, THREE, FOUR)),
    ("drop_cell, fedadam", {"bad": 1, "nonfinite": "drop_cell", "server": "fedadam"}, (SHARDS, THREE)),
    ("drop_cell, int8", {"bad": 1, "nonfinite": "drop_cell", "codec": "int8"}, (COPIES, FOUR)),
    ("drop_cell, median", {"bad": 1, "nonfinite": "drop_cell", "combine": "median"}, (THREE, FIVE)),
    ("late", LATE, (PAIR, UNLIKE, THREE)),
    ("late, alpha, int8", {**LATE, "alpha": 0.25, "codec": "int8"}, (SHARDS, FOUR)),
    ("late, drop_cell", {**LATE, "bad": 1, "nonfinite": "drop_cell"}, (SHARDS, THREE)),
    ("late, fragments, diloco", {**LATE, "alpha": 0.5, "fragments": 2, "server": "diloco"}, (COPIES, CUT)),
    ("privacy", {"privacy": NOISE, "weights": None, **HIDDEN}, (UNLIKE, THREE)),
    ("secure", {"secure": True, **HIDDEN}, (THREE, FOUR)),
    ("secure, two_hop, fednova", {"secure": True, "form": "two_hop", "combine": "fednova", **HIDDEN}, (THREE, FOUR)),
    (
        "secure, privacy",
        {"secure": True, "privacy": {**NOISE, "where": "sum"}, "weights": None, **HIDDEN},
        (THREE, FOUR),
    ),
    ("levels", {**LEVELS, "count": 5}, (FOUR, FOUR_OF_TWO)),
    ("levels, codecs", {**TWO_LEVELS, "count": 5}, (FOUR, FOUR_OF_TWO)),
    ("levels, servers", {**UPPER, "count": 5}, (FOUR, FOUR_OF_TWO)),
]

LOOPS: list[tuple[str, Options, tuple[Layout, ...]]] = [
    ("every 3", {"every": 3}, LAYOUTS),
    ("uneven", {"every": 4, "steps": (5, 11, 7), "weighed": True, "momentum": 0.5}, (PAIR, UNLIKE, CUT, THREE)),
    ("per_cell", {"every": "per_cell:counts=[2,3]", "algorithm": "fednova"}, (SHARDS, UNLIKE)),
    ("warmup", {"every": "warmup:rounds=2,every=1,then=4"}, (PAIR, CUT)),
    ("epochs", {"every": "epochs:epochs=1,steps_per_epoch=3"}, (SHARDS, THREE)),
    ("divergence", {"every": "divergence:every=2,threshold=0.4"}, (SHARDS, THREE)),
    ("delay", {"every": 4, "delay": 2, "aggregator": {"overlap": True}}, (PAIR, UNLIKE, THREE)),
    (
        "delay, uneven, int8",
        {"every": 4, "delay": 1, "steps": (6, 11), "aggregator": {"overlap": True, "codec": "int8"}},
        (SHARDS, CUT),
    ),
    ("streaming_diloco", {"every": 3, "algorithm": "streaming_diloco", "steps": (14, 14)}, (COPIES, THREE)),
    ("fragments", {"every": 2, "aggregator": {"fragments": 2}, "steps": (7, 9)}, (SHARDS, CUT)),
    *((name, {"every": 3, "algorithm": name, "adam": True}, (SHARDS, THREE)) for name in ("diloco", "fedadam")),
    ("fedprox", {"every": 3, "client": "fedprox:mu=0.3"}, (PAIR, UNLIKE, THREE)),
    ("scaffold", {"every": 3, "client": "scaffold", "steps": (9, 12)}, (PAIR, COPIES, UNLIKE, CUT)),
    ("scaffold, fedavgm", {"every": 3, "client": "scaffold", "aggregator": {"server": "fedavgm"}}, (SHARDS, THREE)),
    ("scaffold, bf16", {"every": 3, "client": "scaffold", "aggregator": {"codec": "bf16"}}, (SHARDS, FOUR)),
    ("secure_sum", {"every": 3, "algorithm": "secure_sum", "weighed": True, "aggregator": HIDDEN}, (THREE, FOUR)),
    ("levels", {"every": 2, "aggregator": LEVELS, "steps": (3, 5, 12, 4), "weighed": True}, (FOUR, FOUR_OF_TWO)),
]

SAVED: list[tuple[str, Options, tuple[Layout, ...]]] = [
    ("plain", {"every": 3, "momentum": 0.5}, (PAIR, UNLIKE, THREE)),
    ("int8, fedadam", {"every": 3, "aggregator": {"codec": "int8", "server": "fedadam"}, "adam": True}, (SHARDS, CUT)),
    ("scaffold", {"every": 3, "client": "scaffold", "weighed": True}, (COPIES, THREE)),
    ("streaming_diloco", {"every": 3, "algorithm": "streaming_diloco", "steps": (14, 14)}, (PAIR, COPIES)),
    ("levels", {"every": 2, "aggregator": TWO_LEVELS}, (FOUR,)),
]

STRATEGIES: list[tuple[str, int, Options]] = [
    ("single", 1, {"name": "single", "mesh": {}}),
    ("ddp", 2, {"name": "ddp", "mesh": {"dp_replicate": "auto"}}),
    ("fsdp", 2, {"name": "fsdp", "mesh": {"dp_shard": "auto"}}),
    ("hsdp", 4, {"name": "hsdp", "mesh": {"dp_shard": 2, "dp_replicate": "auto"}}),
    ("tensor", 2, {"name": "fsdp", "mesh": {"tp": 2}}),
    ("fsdp and tensor", 4, {"name": "fsdp", "mesh": {"dp_shard": 2, "tp": 2}}),
    ("replicas and tensor", 4, {"name": "hsdp", "mesh": {"dp_replicate": 2, "tp": 2}}),
    ("context", 2, {"name": "fsdp", "mesh": {"cp": 2}}),
    ("pipeline", 2, {"name": "fsdp", "mesh": {"pp": 2}}),
    ("deepspeed 2", 2, {"name": "deepspeed", "mesh": {}}),
]

IN_MESHES: list[tuple[str, Options]] = [
    ("int8", {"codec": "int8"}),
    ("fedadam", {"server": "fedadam"}),
    ("two_hop, fragments", {"form": "two_hop", "fragments": 2, "bucket_bytes": 4096}),
]

RUNS: list[tuple[str, tuple[int, ...], Options]] = [
    ("error feedback", (1, 1), {"every": 3, "aggregator": {"codec": "int8"}}),
    ("scaffold", (1, 1), {"every": 3, "algorithm": "scaffold", "optimizer": "SGD"}),
    ("streaming_diloco", (1, 2), {"every": 2, "algorithm": "streaming_diloco"}),
    ("fedadam", (2, 2), {"every": 3, "algorithm": "fedadam", "delay": 1, "aggregator": {"overlap": True}}),
]

WRONG_OPTIONS: list[Options] = [
    *({name: "nothing"} for name in ("codec", "combine", "server", "privacy", "form", "nonfinite", "secure")),
    *({name: 2} for name in ("rails", "atomic", "overlap", "norms")),
    *({name: 0} for name in ("fragments", "bucket_bytes")),
    {"codec": "int8:block=0"}, {"codec": "topk:2"}, {"codec": {"nowhere": "int8"}}, {"policies": {"nowhere": "first"}},
    {"policies": {"*": "never"}}, {"combine": "krum:faulty=9"}, {"combine": "median", "secure": True},
    {"overlap": True, "atomic": False}, {"server": "fedadam", "atomic": False}, {"fragments": 2, "privacy": NOISE},
    {"form": "two_hop", "combine": "krum:faulty=1"}, {"privacy": {**NOISE, "clip": -1}}, {"levels": []},
    {"levels": [{}, {"groups": [1]}]}, {"levels": [{"every": 0}]}, {"server": "fedadam:rate=1"}, {"secure": True},
]  # fmt: skip
WRONG_LOOPS: list[Options] = [
    {}, {"every": 0}, {"every": "never"}, {"every": 3, "delay": 3}, {"every": 3, "delay": 1, "aggregator": {}},
    {"every": 3, "alpha": 0.5}, {"every": 3, "client": "fedprocks"}, {"every": 3, "client": "fedprox:mu=-1"},
    {"every": 3, "client": "fedprox", "delay": 1}, {"every": 3, "client": "scaffold", "aggregator": {"fragments": 2}},
    {"every": 3, "algorithm": "fedavgm", "aggregator": {"server": "sgd"}}, {"every": 3, "algorithm": "nothing"},
    {"every": 3, "aggregator": {"nothing": 1}}, {"every": "per_cell:counts=[1]"},
    {"every": "divergence:every=2,threshold=0.1", "aggregator": {"fragments": 2}},
]  # fmt: skip

EXACT_ROUNDS: list[tuple[str, Options, tuple[Layout, ...]]] = [
    ("plain", {}, (PAIR, SHARDS, UNLIKE, CUT, THREE)),
    ("mixed, rails", {"mixed": True, "rails": True, "bucket_bytes": 48}, (COPIES, UNLIKE)),
    ("bf16", {"codec": "bf16"}, (SHARDS,)),
    ("topk", {"codec": "topk:0.25"}, (CUT,)),
    ("median", {"combine": "median"}, (FOUR,)),
    ("drop_cell", {"bad": 1, "nonfinite": "drop_cell"}, (COPIES, THREE)),
    ("two_hop, fragments", {"form": "two_hop", "fragments": 2, "count": 4, "bucket_bytes": 64}, (UNLIKE, THREE)),
    ("all_gather, in place", {"form": "all_gather", "atomic": False, "bucket_bytes": 64}, (FOUR, THREE)),
    ("late", {**LATE, "alpha": 0.5}, (SHARDS,)),
    ("levels", {**LEVELS, "count": 4, "weights": None}, (FOUR,)),
]
EXACT_LOOPS: list[tuple[str, Options, tuple[Layout, ...]]] = [
    ("uneven", {"every": 4, "steps": (5, 11, 7)}, (CUT, UNLIKE)),
    ("delay", {"every": 4, "delay": 2, "aggregator": {"overlap": True}}, (PAIR, SHARDS)),
]


def _label(layout: Layout) -> str:
    sizes, hsdp = layout
    return "+".join(map(str, sizes)) + ("" if hsdp is None else f" by {hsdp}")


def _table() -> dict[str, Case]:
    found: dict[str, Case] = {}
    tables = (("rounds", "rounds", ROUNDS, {}), ("loop", "loop", LOOPS, {}))
    exact = (
        ("exact rounds", "rounds", EXACT_ROUNDS, {"exact": True}),
        ("exact loop", "loop", EXACT_LOOPS, {"exact": True}),
    )
    for title, kind, rows, more in (*tables, *exact):
        for label, options, layouts in rows:
            for layout in layouts:
                found[f"{title} {label}, {_label(layout)}"] = Case(kind, *layout, {**options, **more})
    for label, options, layouts in SAVED:
        for layout in layouts:
            name = f"{label}, {_label(layout)}"
            found[f"save {name}"] = Case("loop", *layout, {"steps": (9, 12), **options, "save": name})
            found[f"load {name}"] = Case("loop", *layout, {"steps": (9, 12), **options, "load": name})
    found["save after a round"] = Case("moved", *SHARDS, {"save": "moved"})
    for layout in (PAIR, COPIES, CUT, UNLIKE, FOUR):
        found[f"load after a round, {_label(layout)}"] = Case("moved", *layout, {"load": "moved"})
    for label, size, options in STRATEGIES:
        found[f"strategy {label}"] = Case("strategy", (size,), None, {**options, "cells": ()})
        two = (size, size)
        if size < 4:
            found[f"strategy {label}, rounds"] = Case("strategy", two, None, {**options, "cells": two})
        if size == 2 and label != "deepspeed 2":
            for more, extra in IN_MESHES:
                found[f"strategy {label}, {more}"] = Case("strategy", two, None, {**options, **extra, "cells": two})
    wide = {"name": "fsdp", "mesh": {"dp_shard": 2, "tp": 2}, "cells": (4, 4)}
    found["strategy fsdp and tensor, rounds"] = Case("strategy", (4, 4), None, wide)
    for label, sizes, options in RUNS:
        for way in ("save", "load"):
            found[f"{way} run {label}"] = Case("trainer", sizes, None, {**options, "cells": sizes, way: label})
    for cell, ranks in enumerate((2, 1)):
        export = {"every": 5, "steps": 5, "round": 1, "cell": f"{cell}/2,1", "export": f"cell_{cell}"}
        found[f"export of cell {cell}"] = Case("trainer", (ranks,), None, export)
    for layout in (PAIR, CUT):
        found[f"wrong, {_label(layout)}"] = Case("wrong", *layout, {"options": WRONG_OPTIONS, "loops": WRONG_LOOPS})
    return found


CASES: dict[str, Case] = _table()
"""All cases by name."""
EXACT = [name for name in CASES if name.startswith("exact ")]
"""Those whose values are exact on every processor."""
