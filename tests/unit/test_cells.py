"""Cells by rules, and the order of hosts: against exhaustive search, for many lists of hosts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.test_allocation import THREE_LEVELS
from xffl.cli.main import main
from xffl.cluster import cells as cells_module
from xffl.cluster.cells import Arrangement, arrange, match_hosts, name_cells, order_hosts, sizes_of_ranks
from xffl.cluster.environment import federation_variables, request_federation, requested_federation
from xffl.cluster.sizes import read_federation, read_replica_size
from xffl.cluster.sizes_text import parse_federation, parse_sizes
from xffl.cluster.slurm.allocation import Host, read_topology, with_switches
from xffl.errors import ConfigError, TopologyError, XfflError
from xffl.parallel.config import DistributedConfig
from xffl.topology import Topology
from xffl.training.config.dataclasses import LaunchConfig

RULE = "hosts:^[a-z]+"


def hosts(*names: str, slots: int = 4) -> tuple[Host, ...]:
    return with_switches([Host(name, slots) for name in names], read_topology(THREE_LEVELS))


# What is asked for ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4", 4),
        ("4,4", (4, 4)),
        ("(4, 2)", (4, 2)),
        ("auto", "auto"),
        (" auto:2 ", "auto:2"),
        ("hosts:^rack([0-9]+)", "hosts:^rack([0-9]+)"),
        ("hosts:a:b", "hosts:a:b"),
        ("file:/a b/cells.yaml", "file:/a b/cells.yaml"),
    ],
)
def test_federations(text: str, expected: object) -> None:
    found = parse_federation(text, "--federated")
    assert found == expected and isinstance(found, str) == isinstance(expected, str)
    environ = federation_variables(found, None)
    assert requested_federation(environ) == (expected, None)
    other: dict[str, str] = {}
    request_federation(found, 2, other)
    assert requested_federation(other) == (expected, 2)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("auto:0", "auto:LEVEL with a level from 1"),
        ("auto:x", "auto:LEVEL"),
        ("auto:", "auto:LEVEL"),
        ("hosts:", "names nothing"),
        ("hosts:(", "regular expression is invalid: missing \\), unterminated"),
        ("file:", "names nothing"),
        ("Auto", "give auto, auto:LEVEL, hosts:REGEX, file:PATH, or sizes"),
        ("4,x", "give sizes like 4,4"),
    ],
)
def test_wrong_federations(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        parse_federation(text, "--federated")
    with pytest.raises(XfflError, match="XFFL_FEDERATED is"):
        requested_federation({"XFFL_FEDERATED": text})


def test_all_entrances_take_the_same_forms() -> None:
    """An argument, an option, a variable and a configuration, for cells and for replicas."""
    given = [None, 4, "4", " 4", (4, 2), [4, 2], "4,2", "(4, 2)", "[4,2]", np.int64(4), " auto", "auto:2", "hosts:a(b)"]
    found = [None, 4, 4, 4, (4, 2), (4, 2), (4, 2), (4, 2), (4, 2), 4, "auto", "auto:2", "hosts:a(b)"]
    assert [read_federation(one, "x") for one in given] == found  # type: ignore[arg-type]
    for one, expected in zip(given, found, strict=True):
        assert LaunchConfig(federated=one).federated == expected  # type: ignore[arg-type]
        assert DistributedConfig(federated=one).federated == expected  # type: ignore[arg-type]
        if isinstance(one, str):
            assert requested_federation({"XFFL_FEDERATED": one})[0] == parse_federation(one, "--x") == expected
    assert [read_replica_size(one, "x") for one in (None, 2, "2", " 2 ", np.int32(2))] == [None, 2, 2, 2, 2]
    assert requested_federation({"XFFL_HSDP": " 2 "}) == (None, 2) and LaunchConfig(hsdp="2").hsdp == 2  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text",
    [
        "4,,2",
        "4;2",
        "4,x",
        "4.5,2",
        "\uff19",
        "4,\u0664",
        "auto:\uff12",
        "9" * 5000,
        "4,2,auto",
        "auto:0",
        "hosts:[",
        "file:",
        "x",
    ],
)
def test_all_entrances_refuse_alike(text: str) -> None:
    ways: dict[str, Callable[[], object]] = {
        "x": lambda: read_federation(text, "x"),
        "launch.federated": lambda: LaunchConfig(federated=text),
        "distributed.federated": lambda: DistributedConfig(federated=text),
        "XFFL_FEDERATED": lambda: requested_federation({"XFFL_FEDERATED": text}),
        "--federated": lambda: parse_federation(text, "--federated"),
    }
    told = set()
    for knob, way in ways.items():
        with pytest.raises(ConfigError) as caught:
            way()
        assert len(str(caught.value)) < 500
        assert str(caught.value).startswith(f"{knob} is ")
        told.add(str(caught.value).removeprefix(knob))
    assert len(told) == 1


@pytest.mark.parametrize("text", ["two", "2.0", "2,2", "\uff12", "9" * 5000])
def test_a_replica_size_is_a_number(text: str) -> None:
    for way in (lambda: read_replica_size(text, "hsdp"), lambda: requested_federation({"XFFL_HSDP": text})):
        with pytest.raises(
            ConfigError, match="is '.{1,220}'; give the ranks that hold one copy of the model, such as 2"
        ):
            way()


def test_sizes_stay_sizes() -> None:
    assert parse_sizes("[4, 4]", "x") == (4, 4)


# Names ----------------------------------------------------------------------------------------------------------------


def test_cells_by_switches() -> None:
    all_ = hosts("a1", "a3", "b4", "a2")
    assert name_cells(all_, "auto") == name_cells(all_, "auto:1") == ("cell_a", "cell_a", "cell_b", "cell_a")
    assert name_cells(all_, "auto:2") == ("a_s1", "a_s2", "b_s2", "a_s1")
    # All in one cell is one cell, however many switches are below it.
    assert name_cells(hosts("a1", "a4"), "auto") == ("cell_a", "cell_a")
    # No switch stands above all: the top ones are the cells.
    loose = (Host("x", switches=("s1",)), Host("y", switches=("s2", "s3")))
    assert name_cells(loose, "auto") == name_cells(loose, "auto:1") == ("s1", "s2")
    assert name_cells(loose[:1], "auto") == ("s1",)
    # Right below the top switch, beside a cell.
    assert name_cells((Host("x", switches=("core",)), Host("y", switches=("core", "s"))), "auto") == ("core", "s")


def test_wrong_switches() -> None:
    with pytest.raises(TopologyError, match="asks for switches 3 levels below the top, .*a1, b1.* 1 to 2"):
        name_cells(hosts("a1", "b1"), "auto:3")
    with pytest.raises(TopologyError, match="give auto: all stand below one switch"):
        name_cells((Host("x", switches=("core",)),), "auto:1")
    with pytest.raises(TopologyError, match=r"those of host z .* no SLURM_TOPOLOGY_ADDR.* HINT: .*hosts:REGEX or file"):
        name_cells(hosts("a1", "z"), "auto")
    many = [Host(f"n{number}") for number in range(20)]
    with pytest.raises(TopologyError, match="n6, n7 and 12 more"):
        name_cells(many, "auto")
    with pytest.raises(TopologyError, match="has no hosts"):
        name_cells((), "auto")
    with pytest.raises(ConfigError, match="'4,4' is no rule but sizes"):
        name_cells(hosts("a1"), "4,4")


def test_cells_by_names() -> None:
    named = [Host(name) for name in ("rack1-n1", "rack1-n2", "rack12-n1")]
    assert name_cells(named, r"hosts:rack(\d+)") == ("1", "1", "12")
    assert name_cells(named, r"hosts:^rack\d+") == ("rack1", "rack1", "rack12")
    assert name_cells(named, r"hosts:-(?P<place>n\d)") == ("n1", "n2", "n1")
    with pytest.raises(TopologyError, match="names no cell for hosts rack1-n1, rack1-n2; correct the expression"):
        name_cells(named, "hosts:rack12")
    with pytest.raises(TopologyError, match="names no cell for hosts rack1-n1, rack1-n2;"):
        name_cells(named, "hosts:rack1(2)?")  # a group that takes no part
    with pytest.raises(TopologyError, match="names no cell for host"):
        name_cells(named, "hosts:x*")  # an empty match is no name


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("cells", "a n[1-2]\nb n3,n4   # the other\n\na n5\n"),
        ("cells.yaml", "a: [n1, n2, n5]\nb: 'n[3-4]'\n"),
    ],
)
def test_cells_by_a_file(name: str, text: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_text(text)
    named = [Host(f"n{number}") for number in range(1, 6)]
    assert name_cells(named, f"file:{file}") == ("a", "a", "b", "b", "a")
    with pytest.raises(TopologyError, match="names no cell for host n6; list them in the file"):
        name_cells([*named, Host("n6")], f"file:{file}")


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("cells", "a\n", "line 1 is 'a'; write a cell and its hosts"),
        ("cells", "a n[1-\n", "cell a: host list"),
        ("cells", "a n[1-2]\nb n2\n", "lists host n2 in cells a and b"),
        ("cells.yml", "a: [1, 2]\n", r"cell a is \[1, 2\]"),
        ("cells.yml", "- a\n", "holds no cells"),
        ("cells.yml", "a: [\n", "is no YAML"),
    ],
)
def test_wrong_files(name: str, text: str, told: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(ConfigError, match=told) as wrong:
        name_cells([Host("n1")], f"file:{file}")
    assert "\n" not in str(wrong.value)
    with pytest.raises(ConfigError, match="No such file"):
        name_cells([Host("n1")], f"file:{tmp_path}/missing")


# Order ----------------------------------------------------------------------------------------------------------------


def test_comments_of_a_file_are_no_hosts(tmp_path: Path) -> None:
    file = tmp_path / "cells"
    file.write_text("# cell and hosts\na n1, n2 # n3 is broken\n\nb n4\n")
    assert name_cells(hosts("n1", "n2", "n4"), f"file:{file}") == ("a", "a", "b")
    with pytest.raises(TopologyError, match="for host n3"):
        name_cells(hosts("n3"), f"file:{file}")


def test_variables_of_a_federation() -> None:
    assert federation_variables(4, 2) == {"XFFL_FEDERATED": "4", "XFFL_HSDP": "2"}


def ranks_of(ordered: Sequence[Host]) -> list[str]:
    return [host.name for host in ordered for _ in range(host.slots)]


def touched(ordered: Sequence[Host], replica_size: int) -> int:
    """Count the hosts below each replica, in all."""
    ranks = ranks_of(ordered)
    return sum(len(set(ranks[at : at + replica_size])) for at in range(0, len(ranks), replica_size))


def test_uneven_cells() -> None:
    """3 nodes in one cell, 1 in the other, in an order that mixes them."""
    found = arrange(hosts("a1", "b1", "a3", "a2"), "auto", 2)
    assert [host.name for host in found.hosts] == ["a1", "a2", "a3", "b1"]
    assert (found.names, found.sizes) == (("cell_a", "cell_b"), (12, 4))
    assert sizes_of_ranks([host for host in found.hosts for _ in range(host.slots)], "auto") == (12, 4)


def test_replicas_stay_below_a_switch() -> None:
    # Replicas of two hosts; the hosts come in turns from two switches.
    found = arrange(hosts("a1", "a3", "a2", "a4"), "auto", 8)
    assert [host.name for host in found.hosts] == ["a1", "a2", "a3", "a4"]
    # 3, 2 and 1 hosts on three switches: only one replica crosses, not two.
    named = {"x": 3, "y": 2, "z": 1}
    spread = [Host(f"{s}{n}", 2, switches=("cell", s)) for s, count in named.items() for n in range(count)]
    ordered = order_hosts(spread, 4)
    crossing = [at for at in range(0, 6, 2) if ordered[at].switches != ordered[at + 1].switches]
    assert len(crossing) == 1 and sorted(host.name for host in ordered) == sorted(host.name for host in spread)
    # Fewer hosts below a replica count for more than switches: 3 + 1 and 2 + 2 slots, each pair across two switches.
    mixed = (Host("p", 3, switches=("c", "s")), Host("q", 3, switches=("c", "s")), Host("r", 1), Host("t", 1))
    assert touched(order_hosts(mixed, 4), 4) == 4


def test_without_replicas_hosts_of_a_switch_are_neighbours() -> None:
    found = arrange(hosts("b4", "a1", "b1", "a3", "b3", "a2"), "auto")
    assert [host.name for host in found.hosts] == ["b4", "b3", "b1", "a1", "a2", "a3"]
    assert found.names == ("cell_b", "cell_a")


def test_replicas_lie_on_as_few_hosts_as_possible_over_switches() -> None:
    slots = [(1, "s"), (1, "s"), (2, "s"), (3, "t"), (3, "t"), (2, "t")]
    given = [Host(f"n{at}", count, switches=("c", switch)) for at, (count, switch) in enumerate(slots)]
    assert touched(order_hosts(given, 4), 4) == 6


def test_replicas_that_do_not_fit() -> None:
    with pytest.raises(TopologyError, match=r"\(hsdp\) 8 does not divide cell cell_b of 4 ranks \(b1 with 4\)"):
        arrange(hosts("a1", "a2", "b1"), "auto", 8)
    with pytest.raises(TopologyError, match=r"\(hsdp\) 0 does not divide"):
        arrange(hosts("a1"), "auto", 0)


@given(st.data())
def test_order_against_an_exhaustive_search(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 9), label="replica size")
    slots = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=6), label="slots")
    if rest := sum(slots) % size:
        slots[-1] += size - rest
    paths = st.sampled_from([("c", "s1"), ("c", "s2"), ("c", "s3"), ()])
    given_ = [Host(f"n{at}", count, switches=data.draw(paths)) for at, count in enumerate(slots)]
    found = order_hosts(given_, size)
    assert sorted(host.name for host in found) == sorted(host.name for host in given_)
    assert touched(found, size) == min(touched(order, size) for order in permutations(given_))


@pytest.mark.parametrize("switches", ["000000", "001122", "010101", "000111"])
@pytest.mark.parametrize(
    ("size", "slots"),
    [
        (9, [1, 1, 3, 3, 5, 5]),
        (9, [10, 1, 3, 12, 5, 14]),
        (7, [1, 1, 2, 2, 4, 4]),
        (5, [1, 1, 1, 1, 3, 3]),
        (11, [1, 1, 4, 4, 6, 6]),
        (6, [2, 2, 2, 3, 3, 6]),
    ],
)
def test_groups_of_three(size: int, slots: list[int], switches: str) -> None:
    """No two of these hosts hold whole replicas; three do, if they are well chosen."""
    given_ = [Host(f"n{at}", n, switches=("c", f"s{s}")) for at, (n, s) in enumerate(zip(slots, switches, strict=True))]
    best = min(touched(order, size) for order in permutations(given_))
    assert touched(order_hosts(given_, size), size) == best


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 5)), min_size=1, max_size=12), st.integers(1, 4))
def test_every_rank_is_in_exactly_one_cell(told: list[tuple[str, int]], replica_size: int) -> None:
    given_ = [Host(f"{cell}{at}", slots * replica_size) for at, (cell, slots) in enumerate(told)]
    found = arrange(given_, RULE, replica_size)
    assert sorted(host.name for host in found.hosts) == sorted(host.name for host in given_)
    ranks = ranks_of(found.hosts)
    topology = Topology(len(ranks), found.sizes, replica_size)
    assert len(ranks) == sum(host.slots for host in given_) == sum(found.sizes)
    for rank, name in enumerate(ranks):
        assert found.names[topology.cell_of(rank)] == name[0]
    assert len(set(found.names)) == len(found.names)
    # What the running ranks find is what was arranged.
    assert sizes_of_ranks([host for host in found.hosts for _ in range(host.slots)], RULE) == found.sizes


def test_many_hosts() -> None:
    """A large machine is ordered at once, and one with many kinds of hosts still gets whole replicas."""
    machine = [Host(f"n{n}", 4, switches=("core", f"s{n % 64}", f"t{n % 512}")) for n in range(4096)]
    ordered = order_hosts(machine, 16)
    assert touched(ordered, 16) == 4096
    assert all(len({host.switches[1] for host in ordered[at : at + 4]}) == 1 for at in range(0, 4096, 4))
    odd = [Host(f"n{n}", 1 + n % 7) for n in range(7 * 40)]
    total = sum(host.slots for host in odd)
    odd += [Host("last", 16 - total % 16)]
    ordered = order_hosts(odd, 16)
    assert sorted(ranks_of(ordered)) == sorted(ranks_of(odd))
    assert touched(ordered, 16) < touched(odd, 16)


def test_too_many_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where not all choices are looked through the order still has every host, and replicas few of them."""
    monkeypatch.setattr(cells_module, "_MAX_STATES", 30)
    odd = [Host(f"n{n}", 1 + n % 5) for n in range(30)]
    ordered = order_hosts(odd, 9)
    assert sorted(ranks_of(ordered)) == sorted(ranks_of(odd)) and touched(ordered, 9) <= touched(odd, 9)


# Running ranks --------------------------------------------------------------------------------------------------------


def test_cells_of_running_ranks() -> None:
    a1, a2, b1 = hosts("a1", "a2", "b1")
    assert sizes_of_ranks([a1, a1, a2, b1], "auto") == (3, 1)
    assert sizes_of_ranks([b1, a1, a2, a1], "auto") == (1, 3)  # hosts may take turns, cells may not
    with pytest.raises(TopologyError, match="ranks 0-1 and 3 into cell cell_a, .* HINT: start with xffl exec"):
        sizes_of_ranks([a1, a2, b1, a1], "auto")


# xffl plan ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def network(tmp_path: Path) -> str:
    file = tmp_path / "topology"
    file.write_text(THREE_LEVELS)
    return str(file)


def test_plan_of_described_hosts(network: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--federated", "auto", "--hosts", "a1:4,b1:4,a[2-3]:4", "--topology", network, "--hsdp", "8"]
    assert main(words) == 2 and "does not divide cell cell_a of 12 ranks" in capsys.readouterr().err
    assert main([*words[:-1], "2", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["federated_sizes"], told["replicas"], told["world_size"]) == ([12, 4], [6, 2], 16)
    first, second = told["placement"]["cells"]
    assert (told["placement"]["rule"], first["name"], second["name"]) == ("auto", "cell_a", "cell_b")
    assert [(host["name"], host["ranks"], host["replicas"]) for host in first["hosts"]] == [
        ("a1", [0, 3], [0, 1]),
        ("a2", [4, 7], [2, 3]),
        ("a3", [8, 11], [4, 5]),
    ]
    assert second["hosts"][0]["switches"] == ["core1", "cell_b", "b_s1"] and second["hosts_of_replicas"] == [1, 1]
    assert main([*words[:-1], "4"]) == 0
    shown = capsys.readouterr().out
    assert "cell 0 (cell_a): ranks 0-11 on 3 hosts" in shown and "3 replicas on 1 host each" in shown
    assert "a2  ranks 4-7       replica 1       below core1.cell_a.a_s1" in shown


def test_plan_of_replicas_over_hosts(network: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--federated", "auto", "--hosts", "a1:4,a3:4,a2:4,a4:4,b1:3,b2:3", "--topology", network]
    assert main([*words, "--hsdp", "2", "--json"]) == 0
    cells = json.loads(capsys.readouterr().out)["placement"]["cells"]
    assert [cell["hosts_of_replicas"] for cell in cells] == [[1] * 8, [1, 2, 1]]
    # A mesh in the cell says how large a replica is, too: two hosts below one switch.
    words[4] = "a1:4,a3:4,a2:4,a4:4"
    assert main([*words, "--mesh", "dp_replicate=2,dp_shard=4,tp=2", "--json"]) == 0
    (cell,) = json.loads(capsys.readouterr().out)["placement"]["cells"]
    assert [host["name"] for host in cell["hosts"]] == ["a1", "a2", "a3", "a4"] and cell["hosts_of_replicas"] == [2, 2]


def test_plan_of_sizes_over_hosts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--federated", "4,4", "--hosts", "x[1-2]:3,y:2", "--hsdp", "2"]) == 0
    shown = capsys.readouterr().out
    assert "x2  rank 3          replica 1" in shown and "x2  ranks 4-5       replica 0" in shown
    assert "1 replica on 1 host, 1 replica on 2 hosts" in shown


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            "--federated auto",
            "this is no job; call it in the batch script or in the shell of salloc, or describe",
        ),
        ("--federated auto --hosts a1:4 --topology /nowhere", "No such file"),
        ("--federated 4,4 --topology x", "--topology x would not be read"),
        ("--federated hosts:a --hosts a1:4 --world 5", "--world is 5, but the hosts take 4 ranks"),
        ("--federated 4,4 --hosts a1:4", "sum to 8, but the world has 4 ranks"),
        ("--federated auto --hosts a1:4 --topology {empty}", "names no switch with nodes"),
        ("--federated auto --hosts z:4 --topology {network}", "those of host z are not known"),
        ("--federated auto --hosts a1:4", "no scontrol in PATH"),
    ],
)
def test_wrong_plans(
    words: str,
    told: str,
    network: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "empty").write_text("")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert main(["plan", *words.format(empty=tmp_path / "empty", network=network).split()]) == 2
    assert told in capsys.readouterr().err


def test_plan_of_a_job(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "a[1-3],b1",
        "SLURM_TASKS_PER_NODE": "4(x3),2",
        "SLURM_NTASKS": "14",
        "XFFL_FEDERATED": "hosts:^[a-z]",
        "XFFL_HSDP": "2",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["plan", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["federated_sizes"] == [12, 2] and told["placement"]["rule"] == "hosts:^[a-z]"
    assert main(["plan", "--federated", "auto"]) == 2
    assert "LaunchError: cells of SLURM's network are asked for, but there is no scontrol" in capsys.readouterr().err


def test_an_arrangement_is_data() -> None:
    assert Arrangement((Host("a"),), ("a",), (1,)) == arrange([Host("a")], RULE)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--federated", "hosts:^.", "--hosts", "a1:2,a2:2"], "federated hosts:^. puts all 4 ranks into one cell"),
        (["--federated", "4", "--world", "4"], "federated 4 puts all 4 ranks into one cell"),
        (["--federated", "hosts:^.", "--hosts", "a1:2,b1:2"], ""),
        (["--world", "4"], ""),
    ],
)
def test_a_plan_says_that_one_cell_is_no_federation(
    options: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *options]) == 0
    err = capsys.readouterr().err
    assert told in err and err.count("\n") == bool(told)


@pytest.mark.parametrize(
    ("required", "federated", "told"),
    [
        ("2", "hosts:.", "at least 2 cells are required (--require-cells, XFFL_REQUIRE_CELLS), but federated hosts:."),
        ("3", "1,1", "but federated 1,1 makes 2; give other"),
        ("0", "1,1", "--require-cells must be a positive integer, got 0"),
    ],
)
def test_fewer_cells_than_required_are_refused_before_ranks_start(
    required: str,
    federated: str,
    told: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XFFL_REQUIRE_CELLS", "")  # restored afterwards
    (tmp_path / "script.py").write_text(f"open({str(tmp_path / 'started')!r}, 'w')")
    words = ["--processes", "2", "--launcher", "local", "--federated", federated, "--require-cells", required]
    assert main(["exec", *words, str(tmp_path / "script.py")]) == 2
    err = capsys.readouterr().err
    assert told in err and err.count("\n") == 1 and not (tmp_path / "started").exists()


@pytest.mark.parametrize("pattern", ["^([a-z]+)", "[0-9]$", "^(?:[a-z][0-9])+", r"(a|b)\1?"])
def test_an_expression_finds_what_python_finds_wherever_it_is_searched(pattern: str) -> None:
    names = ["a1b2", "bb3", "c", "aé7"]
    found = {name: re.search(pattern, name) for name in names}
    expected = {name: match and match[min(match.re.groups, 1)] for name, match in found.items()}
    assert match_hosts(pattern, names, "x") == expected


def test_an_expression_that_never_ends_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cells_module, "_MATCH_S", 0.5)
    with pytest.raises(ConfigError, match="rule 'hosts:.*for 0.5 s without an end; write it without a repetition"):
        name_cells([Host("a" * 60 + "!", 1)], "hosts:^(a+)+$")
