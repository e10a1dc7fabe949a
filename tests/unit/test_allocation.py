"""Hosts of a job: recorded variables and networks of SLURM 22.05, and lists that somebody wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from xffl.cluster import hosts
from xffl.cluster.slurm import allocation
from xffl.cluster.slurm.allocation import (
    Allocation,
    Host,
    find_allocation,
    own_host,
    parse_hosts,
    read_topology,
    show_topology,
    with_switches,
)
from xffl.errors import ConfigError, LaunchError

# What SLURM 22.05 set and printed, on eight virtual nodes.
SALLOC = {
    "SLURM_JOB_CPUS_PER_NODE": "4,1",
    "SLURM_JOB_ID": "2",
    "SLURM_JOB_NODELIST": "a[1-2]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NNODES": "2",
    "SLURM_NODELIST": "a[1-2]",
    "SLURM_NPROCS": "5",
    "SLURM_NTASKS": "5",
    "SLURM_TASKS_PER_NODE": "4,1",
}
BATCH = {
    "SLURM_CPUS_ON_NODE": "2",
    "SLURM_JOB_CPUS_PER_NODE": "2(x2)",
    "SLURM_JOB_ID": "4",
    "SLURM_JOB_NODELIST": "a1,b1",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NNODES": "2",
    "SLURM_NODELIST": "a1,b1",
    "SLURM_NPROCS": "4",
    "SLURM_NTASKS": "4",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_PROCID": "0",
    "SLURM_TASKS_PER_NODE": "2(x2)",
    "SLURM_TOPOLOGY_ADDR": "core.cell_a.a1",
    "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node",
}
WITHOUT_TASKS = {
    "SLURM_JOB_ID": "5",
    "SLURM_JOB_NODELIST": "a[1-2]",
    "SLURM_NODELIST": "a[1-2]",
    "SLURM_TASKS_PER_NODE": "1(x2)",
}
UNEVEN = {**SALLOC, "SLURM_TASKS_PER_NODE": "2,3"}
INTERACTIVE = {  # the shell of salloc where it is a step: LaunchParameters=use_interactive_step
    "SLURM_JOB_ID": "2",
    "SLURM_JOB_NODELIST": "a[1,3]",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NODELIST": "a[1,3]",
    "SLURM_NTASKS": "3",
    "SLURM_PROCID": "0",
    "SLURM_STEP_ID": "4294967290",
    "SLURM_STEP_NODELIST": "a1",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
    "SLURM_TASKS_PER_NODE": "2,1",
}
STEP = {
    "SLURM_JOB_ID": "6",
    "SLURM_JOB_NODELIST": "a1",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NODELIST": "a1",
    "SLURM_NTASKS": "1",
    "SLURM_PROCID": "0",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "a1",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
    "SLURM_TASKS_PER_NODE": "1",
}
THREE_LEVELS = """\
SwitchName=a_s1 Level=0 LinkSpeed=1 Nodes=a[1-2]
SwitchName=a_s2 Level=0 LinkSpeed=1 Nodes=a[3-4]
SwitchName=b_s1 Level=0 LinkSpeed=1 Nodes=b[1-2]
SwitchName=b_s2 Level=0 LinkSpeed=1 Nodes=b[3-4]
SwitchName=cell_a Level=1 LinkSpeed=1 Nodes=a[1-4] Switches=a_s1,a_s2
SwitchName=cell_b Level=1 LinkSpeed=1 Nodes=b[1-4] Switches=b_s[1-2]
SwitchName=core1 Level=2 LinkSpeed=1 Nodes=a[1-4],b[1-4] Switches=cell_a,cell_b
"""
TWO_CORES = THREE_LEVELS + "SwitchName=core2 Level=2 LinkSpeed=1 Nodes=a[1-4],b[1-4] Switches=cell_a,cell_b\n"
CONFIGURATION = """\
# topology.conf, as an administrator wrote it
SwitchName=s0 Nodes=dev[0-1]
SwitchName=s1 \\
    Nodes=dev[2-3]   # the second rack
switchname=top switches=s[0-1]
"""


def scontrol(folder: Path, body: str) -> dict[str, str]:
    """Make a scontrol of one's own, and give an environment that finds nothing else."""
    program = folder / "scontrol"
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(0o755)
    return {"PATH": str(folder)}


def slots(environ: dict[str, str]) -> list[tuple[str, int, int | None]]:
    found = find_allocation({"PATH": "/nowhere", **environ})
    assert found is not None
    return [(host.name, host.slots, host.gpus) for host in found.hosts]


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (SALLOC, [("a1", 4, None), ("a2", 1, None)]),
        (BATCH, [("a1", 2, None), ("b1", 2, None)]),
        (INTERACTIVE, [("a1", 2, None), ("a3", 1, None)]),
        (WITHOUT_TASKS, [("a1", 1, None), ("a2", 1, None)]),
        # Without a number of tasks there is one for each GPU; with one, it counts.
        ({**WITHOUT_TASKS, "SLURM_GPUS_ON_NODE": "4"}, [("a1", 4, 4), ("a2", 4, 4)]),
        ({**WITHOUT_TASKS, "SLURM_JOB_GPUS": "0,2,3"}, [("a1", 3, 3), ("a2", 3, 3)]),
        ({**WITHOUT_TASKS, "SLURM_GPUS_PER_NODE": "a100:2", "SLURM_GPUS": "a100:4"}, [("a1", 2, 2), ("a2", 2, 2)]),
        ({**WITHOUT_TASKS, "SLURM_GPUS_PER_NODE": "a100:2,v100:2"}, [("a1", 4, 4), ("a2", 4, 4)]),
        ({**WITHOUT_TASKS, "SLURM_GPUS_ON_NODE": "0"}, [("a1", 1, 0), ("a2", 1, 0)]),
        # The shell of salloc on a login node, which has no GPUs of the job.
        ({**WITHOUT_TASKS, "SLURM_GPUS": "8"}, [("a1", 4, 4), ("a2", 4, 4)]),
        ({**SALLOC, "SLURM_GPUS": "8"}, [("a1", 4, None), ("a2", 1, None)]),
        # Each task has its own; the first node's number is not that of the others.
        ({**UNEVEN, "SLURM_GPUS_PER_TASK": "1", "SLURM_GPUS_ON_NODE": "2"}, [("a1", 2, 2), ("a2", 3, 3)]),
        ({**UNEVEN, "SLURM_GPUS_PER_TASK": "a100:2", "SLURM_GPUS": "10"}, [("a1", 2, 4), ("a2", 3, 6)]),
        ({**UNEVEN, "SLURM_GPUS": "5", "SLURM_GPUS_ON_NODE": "2"}, [("a1", 2, None), ("a2", 3, None)]),
        ({**UNEVEN, "SLURM_GPUS": "6", "SLURM_GPUS_ON_NODE": "3"}, [("a1", 2, 3), ("a2", 3, 3)]),
        ({**BATCH, "SLURM_GPUS_PER_NODE": "4"}, [("a1", 2, 4), ("b1", 2, 4)]),
        (
            {**SALLOC, "SLURM_JOB_NODELIST": "n[08-10]", "SLURM_TASKS_PER_NODE": "4(x2),3", "SLURM_NTASKS": "11"},
            [("n08", 4, None), ("n09", 4, None), ("n10", 3, None)],
        ),
        (
            {"SLURM_JOB_ID": "1", "SLURM_NODELIST": "x,y", "SLURM_NTASKS_PER_NODE": "3"},
            [("x", 3, None), ("y", 3, None)],
        ),
    ],
)
def test_slots_of_a_job(environ: dict[str, str], expected: list[tuple[str, int, int | None]]) -> None:
    assert slots(environ) == expected


def test_tasks_a_node_are_asked_for_or_told() -> None:
    asked = {"SLURM_JOB_ID": "1", "SLURM_NODELIST": "x,y", "SLURM_NTASKS_PER_NODE": "2", "SLURM_GPUS_ON_NODE": "4"}
    assert slots(asked) == [("x", 2, 4), ("y", 2, 4)]
    told = {**asked, "SLURM_NTASKS_PER_NODE": "4", "SLURM_TASKS_PER_NODE": "4,1", "SLURM_NTASKS": "5"}
    assert [found[:2] for found in slots(told)] == [("x", 4), ("y", 1)]


def test_no_allocation() -> None:
    assert find_allocation({}) is None
    assert find_allocation(STEP) is None  # this process is one of the ranks already
    assert (
        find_allocation({**SALLOC, "PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"})
        is None
    )


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"SLURM_HET_SIZE": "2"}, ["job 2 is heterogeneous", "2 components", "HINT: ask for all nodes in one"]),
        ({"SLURM_JOB_NODELIST": "", "SLURM_NODELIST": ""}, ["SLURM_JOB_NODELIST is not set", "HINT"]),
        ({"SLURM_TASKS_PER_NODE": "4"}, ["SLURM_TASKS_PER_NODE=4 tells of 1 nodes", "of 2"]),
        ({"SLURM_TASKS_PER_NODE": "4x"}, ["tasks per node '4x'"]),
        ({"SLURM_NTASKS": "8"}, ["SLURM_NTASKS=8, but SLURM_TASKS_PER_NODE=4,1 makes 5 tasks on 2 nodes. HINT"]),
        (
            {"SLURM_NTASKS": "", "SLURM_GPUS": "7", "SLURM_GPUS_ON_NODE": "4"},
            ["SLURM_GPUS=7", "over 2 nodes: this node has 4. HINT: ask with --gpus-per-node"],
        ),
        ({"SLURM_NTASKS": "", "SLURM_GPUS": "a100:7"}, ["SLURM_GPUS=a100:7", "over 2 nodes. HINT"]),
        ({"SLURM_GPUS_ON_NODE": "many"}, ["SLURM_GPUS_ON_NODE is 'many'"]),
    ],
)
def test_wrong_jobs(changed: dict[str, str], told: list[str]) -> None:
    with pytest.raises(LaunchError) as caught:
        find_allocation({"PATH": "/nowhere", **SALLOC, **changed})
    assert all(part in str(caught.value) for part in told), str(caught.value)


def test_switches_of_a_job(tmp_path: Path) -> None:
    shown = tmp_path / "shown"
    shown.write_text(THREE_LEVELS)
    # The cut of long lines is not passed on.
    environ = scontrol(tmp_path, f'[ "$*" = "show topology" ] && [ -z "$SLURM_TOPO_LEN" ] && exec /bin/cat {shown}')
    found = find_allocation({**environ, **BATCH, "SLURM_TOPO_LEN": "10"}, needs_switches=True)
    assert found == Allocation(
        "slurm",
        (Host("a1", 2, switches=("core1", "cell_a", "a_s1")), Host("b1", 2, switches=("core1", "cell_b", "b_s1"))),
        "4",
    )
    assert found.slots == 4


def test_no_scontrol(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"no scontrol in PATH. HINT: .*hosts:REGEX or file:PATH"):
        find_allocation({"PATH": str(tmp_path), **BATCH}, needs_switches=True)
    environ = scontrol(tmp_path, "echo 'slurm_load_topo: Unable to contact slurm controller' >&2; exit 1")
    with pytest.raises(LaunchError, match="scontrol show topology failed: slurm_load_topo: Unable to contact"):
        show_topology(environ)
    # Who does not need the network starts without it, and who does not want it does not ask.
    for wants in (False, True):
        found = find_allocation(
            {**scontrol(tmp_path, f"echo > {tmp_path}/asked; exit 1"), **BATCH}, wants_switches=wants
        )
        assert found is not None and {host.switches for host in found.hosts} == {()}
        assert (tmp_path / "asked").exists() == wants


def test_scontrol_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocation, "_SCONTROL_S", 0.2)
    monkeypatch.setattr(hosts, "_SCONTROL_S", 0.2)
    monkeypatch.setattr(hosts, "resolve", lambda name: ())
    environ = scontrol(tmp_path, "exec /bin/sleep 60")
    monkeypatch.setenv("PATH", environ["PATH"])
    for body, told in (
        ("#!/bin/sh\nexec /bin/sleep 60\n", "timed out after 0.2"),
        ("#!/no/such/shell\n", "No such file"),
    ):
        (tmp_path / "scontrol").write_text(body)
        with pytest.raises(LaunchError, match=f"scontrol show topology failed: .*{told}.* HINT"):
            find_allocation({**environ, **BATCH}, needs_switches=True)
        assert find_allocation({**environ, **BATCH}, wants_switches=True) is not None
        with pytest.raises(LaunchError, match=f"node 'a1' does not resolve, .*{told}.* set MASTER_ADDR"):
            hosts.node_address("a1")


def test_no_topology_plugin(tmp_path: Path) -> None:
    environ = scontrol(tmp_path, "echo 'scontrol: error: No topology information available' >&2; exit 0")
    assert read_topology(show_topology(environ)) == {}


def test_topologies() -> None:
    found = read_topology(THREE_LEVELS)
    assert len(found) == 8 and found["a3"] == ("core1", "cell_a", "a_s2") and found["b1"] == ("core1", "cell_b", "b_s1")
    assert read_topology(TWO_CORES)["a1"] == ("core1+core2", "cell_a", "a_s1")
    assert read_topology(CONFIGURATION) == {
        **dict.fromkeys(("dev0", "dev1"), ("top", "s0")),
        **dict.fromkeys(("dev2", "dev3"), ("top", "s1")),
    }
    blocks = "BlockName=b1 BlockIndex=0 Nodes=n[1-2] BlockSize=2\nBlockName=b2 BlockIndex=1 Nodes=n[3-4] BlockSize=2\n"
    assert read_topology(blocks) == {"n1": ("b1",), "n2": ("b1",), "n3": ("b2",), "n4": ("b2",)}
    # A switch that nothing tells about, and one without nodes.
    assert read_topology("SwitchName=top Switches=s1,s2\nSwitchName=s1 Nodes=a\nSwitchName=s3 Nodes=(null)") == {
        "a": ("top", "s1")
    }
    # A node right below the top switch, beside others that are not.
    assert read_topology(
        "SwitchName=top Switches=s1,s2\nSwitchName=s1 Switches=s3\nSwitchName=s2 Nodes=x\nSwitchName=s3 Nodes=y"
    ) == {
        "x": ("top", "s2"),
        "y": ("top", "s1", "s3"),
    }
    with pytest.raises(LaunchError, match="switches x, y stand above themselves"):
        read_topology("SwitchName=x Switches=y\nSwitchName=y Switches=x\nSwitchName=z Nodes=a")
    with pytest.raises(LaunchError, match="range 'x-y'"):
        read_topology("SwitchName=x Nodes=a[x-y]")


@pytest.mark.parametrize(
    ("name", "address", "pattern", "switches"),
    [
        ("a1", "core1.cell_a.a_s1.a1", "switch.switch.switch.node", ("core1", "cell_a", "a_s1")),
        ("a1", "core[1-2].cell_a.a_s1.a1", "switch.switch.switch.node", ("core1+core2", "cell_a", "a_s1")),
        ("a1", "core..s[1,3].a1", "switch.switch.switch.node", ("core", "s1+s3")),
        ("n1", "b1.n1", "block.node", ("b1",)),
        ("n1.site.org", "core.s1.n1.site.org", "switch.switch.node", ("core", "s1")),
        ("a1", "a1", "node", ()),
        ("a1", "", "", ()),
        ("a2", "core.cell_a.a1", "switch.switch.node", ()),  # left over from another node
    ],
)
def test_where_a_task_runs(name: str, address: str, pattern: str, switches: tuple[str, ...]) -> None:
    environ = {"SLURMD_NODENAME": name, "SLURM_TOPOLOGY_ADDR": address, "SLURM_TOPOLOGY_ADDR_PATTERN": pattern}
    assert own_host(environ) == Host(name, switches=switches)
    assert own_host({**environ, "XFFL_HOST": "other"}) == Host("other")


def test_both_ways_to_the_switches_agree() -> None:
    """What a task is told by SLURM 22.05, and what scontrol shows of its node."""
    for shown, top in ((THREE_LEVELS, "core1"), (TWO_CORES, "core[1-2]")):
        environ = {"SLURMD_NODENAME": "b3", "SLURM_TOPOLOGY_ADDR": f"{top}.cell_b.b_s2.b3"}
        environ["SLURM_TOPOLOGY_ADDR_PATTERN"] = "switch.switch.switch.node"
        assert own_host(environ).switches == read_topology(shown)["b3"]
        assert with_switches([Host("b3"), Host("x")], read_topology(shown)) == (own_host(environ), Host("x"))


def test_switches_that_were_written_down_stay() -> None:
    (own,) = with_switches([Host("z", 1, switches=("core", "s9"))], read_topology(THREE_LEVELS))
    assert own.switches == ("core", "s9")


def test_the_line_of_a_wrong_host_is_told(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a:4\n\nb\n")
    with pytest.raises(ConfigError, match="line 3: b"):
        parse_hosts(f"@{tmp_path / 'hosts'}")


def test_lists_of_hosts(tmp_path: Path) -> None:
    assert parse_hosts("a:4,b:2") == (Host("a", 4), Host("b", 2))
    assert [host.name for host in parse_hosts("n[01-03,7]:8,user@login.site.org:1")] == [
        *("n01", "n02", "n03", "n7"),
        "user@login.site.org",
    ]
    file = tmp_path / "my hosts"
    file.write_text("# two cells\na slots=4 address=10.0.0.1 gpus=2\n\n  b[1-2]:3 # a list\nc:1 switches=core.s1\n")
    assert parse_hosts(f"@{file}") == (
        Host("a", 4, "10.0.0.1", gpus=2),
        Host("b1", 3),
        Host("b2", 3),
        Host("c", 1, switches=("core", "s1")),
    )


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "name no host|cannot be read"),
        ("a", "how many ranks 'a' takes; write a:4"),
        ("a:0", "slots '0'"),
        ("a:x", "slots 'x'"),
        ("a:4,,b:4", "cannot be read"),
        ("a:4,b:4,a:2", "name a twice"),
        ("n[1-2]:4,n2:4", "name n2 twice"),
        ("n[2-1]:4", "range '2-1'"),
        ("-oProxyCommand=x:4", "has the name '-oProxyCommand=x'"),
        ("a;rm:4", "has the name 'a;rm'"),
        ("@/nowhere/hosts", "No such file"),
    ],
)
def test_wrong_lists_of_hosts(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        parse_hosts(text)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("a slots=4 color=red", "has 'color=red'"),
        ("a slots=4 slots=5", "has 'slots=5'"),
        ("a address=10.0.0.1", "how many ranks"),
        ("a[1-2] slots=4 address=10.0.0.1", "one address to 2 hosts"),
        ("a slots=4 gpus=x", "gpus"),
        ("a slots=4 address=-x", "has the name '-x'"),
        ("# nobody", "name no host"),
    ],
)
def test_wrong_files_of_hosts(line: str, told: str, tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text(line)
    with pytest.raises(ConfigError, match=told):
        parse_hosts(f"@{file}")
