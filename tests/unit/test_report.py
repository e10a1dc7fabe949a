"""Text and figures of a topology show what is there, and the traffic is what the exchange moves."""

from __future__ import annotations

import builtins
import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xffl.aggregation.engine.planning.plan import Cut, Item, plan_groups
from xffl.errors import ConfigError
from xffl.extras import install_command
from xffl.planning import round_traffic, topology_figure, topology_text
from xffl.planning.text import count_pieces, exchange_pieces
from xffl.topology import Topology

SMALL = [
    Topology(1),
    Topology(8, 8),
    Topology(4, (2, 2)),
    Topology(8, (4, 4), 2),
    Topology(12, (8, 4), 2),
    Topology(6, (4, 2)),
    Topology(6, (1, 2, 3)),
    Topology(4, (2, 2), 1),
    Topology(16, (8, 8), cell_shape={"pp": 2, "dp_replicate": 2, "tp": 2}),
]
LARGE = [
    Topology(4096, 32, 8),
    Topology(100_000, 8),
    Topology(4096, 2048),
    Topology(100, (49, 51)),
    Topology(1024, 512, 1),
    Topology(30, (*[1] * 10, *[2] * 10)),
]


@st.composite
def federations(draw: st.DrawFn) -> Topology:
    """A federation of up to 6 cells, with and without replicas, cut alike or not."""
    replica_size = draw(st.none() | st.integers(1, 5))
    sizes = tuple(count * (replica_size or 1) for count in draw(st.lists(st.integers(1, 6), min_size=1, max_size=6)))
    return Topology(sum(sizes), sizes, replica_size)


def show(topology: Topology) -> str:
    return f"{topology.sizes[:4]}-{topology.replica_size}"


# Pieces ---------------------------------------------------------------------------------------------------------------


@given(federations())
def test_pieces_cover_the_model_and_each_lies_in_one_shard(topology: Topology) -> None:
    pieces = list(exchange_pieces(topology))
    assert len(pieces) == count_pieces(topology)
    assert [piece.start for piece in pieces] == [Fraction(0), *(piece.stop for piece in pieces[:-1])]
    assert pieces[-1].stop == 1
    for piece in pieces:
        assert piece.start < piece.stop
        for cell in range(topology.cells):
            shard, shards = piece.shard(topology, cell), topology.shards(cell)
            assert Fraction(shard, shards) <= piece.start
            assert piece.stop <= Fraction(shard + 1, shards)
            assert topology.coordinates(piece.owner(topology, cell))[4:6] == (shard, True)


# Traffic --------------------------------------------------------------------------------------------------------------


@given(federations(), st.integers(0, 10**12), st.sampled_from([1.0, 2.0, 4.0]))
def test_traffic_adds_up(topology: Topology, parameters: int, width: float) -> None:
    traffic = round_traffic(topology, parameters, width)
    cells, model = topology.cells, parameters * width
    assert traffic["all_gather"]["bytes_per_cell"] == pytest.approx((cells - 1) * model)
    assert traffic["two_hop"]["bytes_per_cell"] == pytest.approx(2 * (cells - 1) / cells * model)
    assert sum(kind["cells"] for kind in traffic["cell_kinds"]) == cells
    assert sum(kind["cells"] * kind["ranks"] for kind in traffic["cell_kinds"]) == topology.world_size
    for kind in traffic["cell_kinds"]:
        for form in ("all_gather", "two_hop"):
            per_cell = kind["senders"] * kind[f"{form}_bytes_per_sender"]
            assert per_cell == pytest.approx(traffic[form]["bytes_per_cell"])
            assert traffic[form]["bytes_total"] == pytest.approx(cells * per_cell)
        assert kind["senders"] * kind["home_bytes_per_sender"] == pytest.approx(kind["home_bytes_per_cell"])
        assert kind["replicas"] * kind["shards"] == kind["ranks"]
    assert traffic["home_bytes_total"] == pytest.approx(sum((count - 1) * model for count in topology.replica_counts))
    assert traffic["all_gather"]["seconds"] is None


@given(st.integers(1, 8), st.lists(st.integers(1, 6), min_size=1, max_size=5), st.integers(1, 9))
def test_replicas_do_not_change_what_crosses(shards: int, replicas: list[int], more: int) -> None:
    sizes = tuple(count * shards for count in replicas)
    few = round_traffic(Topology(sum(sizes), sizes, shards), 1e9, link_gbps=10)
    many = round_traffic(Topology(sum(sizes) * more, tuple(size * more for size in sizes), shards), 1e9, link_gbps=10)
    assert few["all_gather"] == many["all_gather"]
    assert few["two_hop"] == many["two_hop"]
    sent = {kind["all_gather_bytes_per_sender"] for result in (few, many) for kind in result["cell_kinds"]}
    assert len(sent) == 1


@settings(deadline=None)
@given(federations(), st.integers(1, 5))
def test_all_gather_is_what_the_plan_of_the_exchange_sends(topology: Topology, multiple: int) -> None:
    """The oracle is the plan that real rounds follow, for one tensor that every cell can cut evenly."""
    numel = multiple * 60  # shards are 1 to 6 (no replicas) or 1 to 5
    item = Item(
        0, "float32", "average", False, tuple(Cut.of_axis(numel, 1, topology.shards(c)) for c in range(topology.cells))
    )
    traffic = round_traffic(topology, numel)
    kinds = {kind["ranks"]: kind for kind in traffic["cell_kinds"]}
    total = 0
    for rank in range(topology.world_size):
        at = topology.coordinates(rank)
        groups = plan_groups((item,), topology, rank)
        sent = sum(4 * group.numel * (topology.cells - 1) for group in groups if at.is_sender)
        total += sent
        if at.is_sender:
            assert sent == pytest.approx(kinds[topology.sizes[at.cell]]["all_gather_bytes_per_sender"])
    assert total == pytest.approx(traffic["all_gather"]["bytes_total"])


def test_traffic_of_a_known_federation() -> None:
    traffic = round_traffic(Topology(12, (8, 4), 2), 8e9, bytes_per_parameter=2, link_gbps=100)
    assert traffic["model_bytes"] == 16e9
    assert traffic["all_gather"] == {"copies": 1, "bytes_per_cell": 16e9, "bytes_total": 32e9, "seconds": 1.28}
    assert traffic["two_hop"] == traffic["all_gather"], "two cells: both forms send each shard once"
    large, small = traffic["cell_kinds"]
    assert (large["ranks"], large["replicas"], large["home_bytes_per_cell"]) == (8, 4, 48e9)
    assert (small["ranks"], small["replicas"], small["home_bytes_per_cell"]) == (4, 2, 16e9)
    assert large["all_gather_bytes_per_sender"] == small["all_gather_bytes_per_sender"] == 8e9
    assert json.loads(json.dumps(traffic)) == traffic


def test_copies_through_the_hosts_of_a_known_federation() -> None:
    """By hand: shards of 8 GB, at 25 GB/s; 2 of 8 and 2 of 4 ranks send theirs, NCCL does the rest."""
    plain = round_traffic(Topology(12, (8, 4), 2), 8e9, bytes_per_parameter=2)
    traffic = round_traffic(Topology(12, (8, 4), 2), 8e9, bytes_per_parameter=2, pcie_gbps=200)
    sender = {"bytes_to_host": 8e9, "bytes_to_gpu": 8e9, "seconds": 0.64}
    replica = {"bytes_to_host": 0.0, "bytes_to_gpu": 0.0, "seconds": 0.0}
    kinds = [{"ranks": ranks, "sender": sender, "replica": replica} for ranks in (8, 4)]
    assert traffic.pop("pcie") == {"gbps": 200, "bytes_total": 64e9, "cell_kinds": kinds}
    assert len(traffic.pop("assumptions")) == len(plain.pop("assumptions")) + 1 and traffic == plain
    (kind,) = round_traffic(Topology(4, (2, 2)), 1e6, pcie_gbps=8)["pcie"]["cell_kinds"]
    assert kind == {"ranks": 2, "sender": {"bytes_to_host": 2e6, "bytes_to_gpu": 2e6, "seconds": 4e-3}, "replica": None}


def test_traffic_of_unequal_cells_without_replicas() -> None:
    traffic = round_traffic(Topology(6, (4, 2)), 1e6)
    large, small = traffic["cell_kinds"]
    assert (large["senders"], large["all_gather_bytes_per_sender"]) == (4, 1e6)
    assert (small["senders"], small["all_gather_bytes_per_sender"]) == (2, 2e6)
    assert traffic["home_bytes_total"] == 0


def test_traffic_of_a_large_world_is_short() -> None:
    traffic = round_traffic(Topology(100_000, 8), 1e9)
    assert len(traffic["cell_kinds"]) == 1
    assert traffic["two_hop"]["copies"] < 2 < traffic["all_gather"]["copies"] == 12_499


@pytest.mark.parametrize(
    ("arguments", "knob"),
    [
        ({"parameters": -1}, "parameters"),
        ({"parameters": float("nan")}, "parameters"),
        ({"parameters": "8e9"}, "parameters"),
        ({"parameters": True}, "parameters"),
        ({"parameters": 1, "bytes_per_parameter": 0}, "bytes_per_parameter"),
        ({"parameters": 1, "link_gbps": 0}, "link_gbps"),
        ({"parameters": 1, "link_gbps": float("inf")}, "link_gbps"),
        ({"parameters": 1, "pcie_gbps": 0}, "pcie_gbps"),
    ],
)
def test_traffic_refuses_numbers_that_cannot_be_meant(arguments: Mapping[str, Any], knob: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{knob} must be a number .*; give"):
        round_traffic(Topology(4, (2, 2)), **arguments)


# Text -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("topology", SMALL, ids=show)
def test_text_of_a_small_world_has_every_rank_and_marks_exactly_the_senders(topology: Topology) -> None:
    text = topology_text(topology, 120)
    grid = "\n".join(line for line in text.splitlines() if "replica " in line)
    marked = {int(rank) for rank in re.findall(r"\[(\d+)\]", grid)}
    senders = {rank for cell in range(topology.cells) for rank in topology.senders(cell)}
    assert marked == (senders if topology.cells > 1 else set())
    shown = re.findall(r"\d+", re.sub(r"replica \d+|\d+ (replica|shard)s?|ranks? [\d-]+", "", grid))
    assert sorted(map(int, shown)) == list(range(topology.world_size))
    assert "more" not in text


@pytest.mark.parametrize("topology", SMALL, ids=show)
def test_text_lists_who_exchanges_what(topology: Topology) -> None:
    text = topology_text(topology, 120)
    exchanges = [tuple(map(int, re.findall(r"\[(\d+)\]", line))) for line in text.splitlines() if "<->" in line]
    owners = [
        tuple(piece.owner(topology, cell) for cell in range(topology.cells)) for piece in exchange_pieces(topology)
    ]
    assert exchanges == (owners if topology.cells > 1 else [])
    if topology.cells > 1 and topology.is_cut_alike:
        assert exchanges == [topology.federated_group(shard) for shard in range(topology.shards(0))]


@pytest.mark.parametrize("topology", [*SMALL, *LARGE], ids=show)
@pytest.mark.parametrize("width", [40, 57, 80, 200])
def test_text_keeps_to_its_width_and_to_ascii(topology: Topology, width: int) -> None:
    text = topology_text(topology, width)
    assert max(map(len, text.splitlines())) <= width
    assert text.isascii()
    assert len(text.splitlines()) < 120


def test_text_says_how_much_it_leaves_out() -> None:
    text = topology_text(Topology(4096, 32, 8), 100)
    assert "... 125 more cells of 32 (ranks 96-4095)" in text
    for line in text.splitlines():
        if "<->" in line:
            left_out = int(re.findall(r"\.\.\. (\d+) more cells", line)[0])
            assert len(re.findall(r"\[", line)) + left_out == 128
    wide = topology_text(Topology(4096, 2048), 100)
    columns = len(re.findall(r"\[", next(line for line in wide.splitlines() if "| replica 0" in line)))
    assert f"... {2048 - columns} more shards" in wide
    rows = topology_text(Topology(1024, 512, 1), 100)
    assert rows.count("| replica ") == 2 * 7
    assert "... 505 more replicas" in rows
    assert "... 92 more pieces" in topology_text(Topology(100, (49, 51)), 100)  # 7 of 49 + 51 - 1 are shown


@pytest.mark.parametrize(
    ("topology", "head"),
    [
        (Topology(8, (4, 4)), "8 ranks in 2 cells of 4; each cell is one replica"),
        (Topology(8, (4, 4), 4), "8 ranks in 2 cells of 4; each cell is one replica"),
        (Topology(8, (4, 4), 2), "8 ranks in 2 cells of 4; replicas of 2 ranks (HSDP)"),
        (Topology(6, (2, 4), 2), "6 ranks in 2 cells of 2 and 4; replicas of 2 ranks (HSDP)"),
    ],
)
def test_text_begins_with_the_worlds_shape(topology: Topology, head: str) -> None:
    assert topology_text(topology, 100).splitlines()[0] == head


def test_text_refuses_a_width_without_room() -> None:
    with pytest.raises(ConfigError, match="width 39 is too small"):
        topology_text(Topology(4, (2, 2)), 39)


# Figures --------------------------------------------------------------------------------------------------------------


def svg_texts(path: Path) -> list[str]:
    root = ET.parse(path).getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    return ["".join(node.itertext()).strip() for node in root.iter("{http://www.w3.org/2000/svg}text")]


@pytest.mark.parametrize("topology", SMALL, ids=show)
def test_svg_of_a_small_world_names_cells_ranks_and_what_crosses(topology: Topology, tmp_path: Path) -> None:
    topology_figure(topology, tmp_path / "topology.svg")
    texts = svg_texts(tmp_path / "topology.svg")
    for cell in range(topology.cells):
        assert f"cell {cell}" in texts
    assert sorted(int(text) for text in texts if text.isdigit()) == list(range(topology.world_size))
    if topology.cells > 1 and not topology.is_cut_alike:
        for piece in exchange_pieces(topology):
            assert f"{piece.start} to {piece.stop}" in texts
    assert not any("…" in text for text in texts)


@pytest.mark.parametrize("topology", LARGE, ids=show)
def test_svg_of_a_large_world_says_what_it_leaves_out(topology: Topology, tmp_path: Path) -> None:
    topology_figure(topology, tmp_path / "topology.svg")
    notes = " ".join(text for text in svg_texts(tmp_path / "topology.svg"))
    assert "…" in notes
    if topology.cells > 4:
        assert f"… {topology.cells - 3}" in notes
    assert (tmp_path / "topology.svg").stat().st_size < 300_000


def test_png_is_a_png_and_the_same_each_time(tmp_path: Path) -> None:
    for name in ("a.png", "b.PNG", "a.svg", "b.svg"):
        topology_figure(Topology(8, (4, 4), 2), tmp_path / "new folder" / name)
    png = (tmp_path / "new folder" / "a.png").read_bytes()
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    assert len(png) > 10_000
    assert png == (tmp_path / "new folder" / "b.PNG").read_bytes()
    assert (tmp_path / "new folder" / "a.svg").read_bytes() == (tmp_path / "new folder" / "b.svg").read_bytes()


@pytest.mark.parametrize("name", ["topology.jpeg", "topology", "svg"])
def test_figures_refuse_unknown_formats(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\.png or \.svg"):
        topology_figure(Topology(4, (2, 2)), tmp_path / name)


# Imports --------------------------------------------------------------------------------------------------------------


def test_missing_matplotlib_is_told_with_its_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".")[0] == "matplotlib":
            raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=re.escape(install_command("report"))):
        topology_figure(Topology(4, (2, 2)), tmp_path / "topology.svg")


def test_importing_and_drawing_text_needs_no_torch_and_no_matplotlib() -> None:
    code = (
        "import sys\n"
        "for name in ('torch', 'matplotlib', 'rich', 'numpy'): sys.modules[name] = None\n"
        "from xffl.planning import topology_text, round_traffic\n"
        "from xffl.topology import Topology\n"
        "assert '[0]' in topology_text(Topology(8, (4, 4), 2))\n"
        "round_traffic(Topology(8, (4, 4), 2), 8e9)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_moments_are_bytes_of_the_rounds_that_they_take_part_in() -> None:
    told = round_traffic(Topology(4, (2, 2), 2), 6e6, moments={"exp_avg": 3, "exp_avg_sq": 6})["moments"]
    assert told == {"periods": {"exp_avg": 3, "exp_avg_sq": 6}, "mean_bytes": 12e6, "most_bytes": 48e6}
