"""How the ranks of a node divide its cores."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.test_environment import recording
from xffl.cluster.launch import affinity
from xffl.cluster.launch.affinity import (
    allowed_cpus,
    bind_if_asked,
    find_cores,
    is_bound,
    share_cores,
    share_machine,
)
from xffl.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]


def describe(folder: Path, sockets: int, cores: int, threads: int) -> int:
    """Write what Linux tells of a host whose second hardware threads are counted after all first ones."""
    for thread in range(threads):
        for socket in range(sockets):
            for core in range(cores):
                cpu = (thread * sockets + socket) * cores + core
                topology = folder / f"cpu{cpu}" / "topology"
                topology.mkdir(parents=True)
                (topology / "physical_package_id").write_text(f"{socket}\n")
                (topology / "core_id").write_text(f"{core}\n")
    return sockets * cores * threads


def test_hardware_threads_of_a_core_stay_together(tmp_path: Path) -> None:
    cpus = describe(tmp_path, sockets=2, cores=2, threads=2)
    assert find_cores(range(cpus), tmp_path) == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert find_cores([6, 2, 1], tmp_path) == ((1,), (2, 6))
    assert find_cores([3, 1], tmp_path / "nowhere") == ((1,), (3,))


def test_sockets_whose_numbers_alternate_are_kept_apart(tmp_path: Path) -> None:
    for cpu in range(8):
        topology = tmp_path / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text(f"{cpu % 2}\n")
        (topology / "core_id").write_text(f"{cpu // 2}\n")
    cores = find_cores(range(8), tmp_path)
    assert [share_cores(cores, rank, 2).cpus for rank in range(2)] == [(0, 2, 4, 6), (1, 3, 5, 7)]


def test_a_rank_gets_whole_cores_of_one_socket(tmp_path: Path) -> None:
    cores = find_cores(range(describe(tmp_path, sockets=2, cores=4, threads=2)), tmp_path)
    parts = [share_cores(cores, rank, 2) for rank in range(2)]
    assert [part.cpus for part in parts] == [(0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15)]
    assert {part.threads for part in parts} == {4}, "one thread for a core, not for a hardware thread"


@given(st.integers(1, 80), st.integers(1, 40))
def test_parts_cover_all_cores_and_differ_by_one(count: int, ranks: int) -> None:
    cores = [(2 * core, 2 * core + 1) for core in range(count)]
    parts = [share_cores(cores, rank, ranks) for rank in range(ranks)]
    if count < ranks:
        assert all(part.threads == 1 and part.cpus in cores for part in parts)
        uses = [sum(part.cpus == core for part in parts) for core in cores]
        assert max(uses) - min(uses) <= 1
        return
    assert sorted(cpu for part in parts for cpu in part.cpus) == list(range(2 * count))
    sizes = [part.threads for part in parts]
    assert sum(sizes) == count and max(sizes) - min(sizes) <= 1
    assert all(len(part.cpus) == 2 * part.threads for part in parts)


@pytest.mark.parametrize("rank, size", [(-1, 2), (2, 2), (0, 0)])
def test_a_rank_that_is_none_of_the_node(rank: int, size: int) -> None:
    with pytest.raises(ConfigError, match=f"local rank {rank} is not among {size}"):
        share_cores([(0,)], rank, size)


def test_nothing_happens_unless_it_is_asked_for() -> None:
    before = allowed_cpus()
    for text in ("", "none", "0", "OFF"):
        environ = {**OF_FOUR, "XFFL_BIND": text}
        bind_if_asked(environ)
        assert environ == {**OF_FOUR, "XFFL_BIND": text}
    bind_if_asked({**OF_FOUR})
    assert allowed_cpus() == before
    with pytest.raises(ConfigError, match="XFFL_BIND is 'sockets'; give cores"):
        bind_if_asked({"XFFL_BIND": "sockets"})


def test_launchers_that_bind_say_so() -> None:
    openmpi, slurm, torchrun = (recording(name)[0] for name in ("openmpi4", "srun_even", "torchrun_uneven_nodes"))
    told = {"OMPI_MCA_orte_bound_at_launch": "1", "SLURM_CPU_BIND_TYPE": "mask_cpu:"}
    for environ, name in ((openmpi, "OMPI_MCA_orte_bound_at_launch"), (slurm, "SLURM_CPU_BIND_TYPE")):
        plain = {key: text for key, text in environ.items() if key not in told}
        (other,) = told.keys() - {name}
        assert is_bound({**plain, name: told[name]}) and not is_bound({**plain, other: told[other]})
    assert not is_bound({**slurm, "SLURM_CPU_BIND_TYPE": "none"}) and not is_bound({})
    # What was inherited: "xffl exec" in the shell of "srun --pty bash", and torchrun below srun.
    assert not is_bound(told) and not is_bound({**torchrun, **told})


BOUND = """\
import json, os, threading
from xffl.cluster.launch.affinity import bind_if_asked
bind_if_asked()
found = []
thread = threading.Thread(target=lambda: found.append(sorted(os.sched_getaffinity(0))))
thread.start()
thread.join()
print(json.dumps([sorted(os.sched_getaffinity(0)), found[0], os.environ["OMP_NUM_THREADS"]]))
"""


def place(rank: int, size: int) -> dict[str, str]:
    """Return torchrun's variables of a rank on the only node."""
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    return OF_FOUR | {name: str(number) for name, number in told.items()}


def bound(**variables: str) -> tuple[list[int], str]:
    """Bind a process of its own, and return its CPUs and its threads."""
    environ = {name: text for name, text in os.environ.items() if name != "OMP_NUM_THREADS"}
    ran = subprocess.run(
        [sys.executable, "-c", BOUND],
        env={**environ, **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    own, of_thread, threads = json.loads(ran.stdout)
    assert own == of_thread, "threads that start later run on the same CPUs"
    return own, threads


def test_ranks_take_their_own_cores() -> None:
    if len(find_cores(allowed_cpus())) < 2:
        pytest.skip("there is one core only")
    parts = [bound(XFFL_BIND="cores", **place(rank, 2)) for rank in range(2)]
    assert not set(parts[0][0]) & set(parts[1][0])
    assert sorted(parts[0][0] + parts[1][0]) == list(allowed_cpus())
    expected = [share_cores(find_cores(allowed_cpus()), rank, 2) for rank in range(2)]
    assert [(tuple(cpus), threads) for cpus, threads in parts] == [(own, str(threads)) for own, threads in expected]


def test_what_is_set_or_bound_already_is_kept() -> None:
    cpus = list(allowed_cpus())
    assert bound(XFFL_BIND="cores", OMP_NUM_THREADS="7", **place(1, 2))[1] == "7"
    names = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")
    openmpi = dict(zip(names, "1122", strict=True))
    kept, threads = bound(XFFL_BIND="cores", OMPI_MCA_orte_bound_at_launch="1", **openmpi)
    assert kept == cpus and threads == str(len(find_cores(cpus)))


def test_ranks_share_cores_where_there_are_too_few() -> None:
    assert share_cores([(0,), (1,), (2,)], 0, 2) == ((0,), 1)
    assert share_cores([(0,)], 1, 2) == ((0,), 1)


def test_the_place_on_the_node_is_read_from_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []

    def share(cores: object, rank: int, size: int) -> tuple[tuple[int, ...], int]:
        seen.append((rank, size))
        return (), 1

    monkeypatch.setattr(affinity, "share_cores", share)
    monkeypatch.setattr(affinity, "is_bound", lambda environ: False)
    monkeypatch.setattr(os, "sched_setaffinity", lambda process, cpus: None)
    for name, places in (
        ("torchrun_uneven_nodes", [(0, 2), (1, 2), (0, 1)]),
        ("srun_even", [(0, 2), (1, 2), (0, 2), (1, 2)]),
        ("srun_uneven_3_1", [(0, 3), (1, 3), (2, 3), (0, 1)]),
    ):
        for environ in recording(name):
            bind_if_asked({**environ, "XFFL_BIND": "cores"})
        assert seen == places
        seen.clear()
    bind_if_asked({"XFFL_BIND": "cores"})
    bind_if_asked({**environ})
    assert not seen
    with pytest.raises(ConfigError, match="XFFL_BIND"):
        bind_if_asked({"XFFL_BIND": "all"})


def test_a_rank_has_a_thread_for_each_of_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(affinity, "find_cores", lambda cpus: ((0, 4), (1, 5), (2, 6), (3, 7)))
    monkeypatch.setattr(affinity, "is_bound", lambda environ: False)
    taken = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda process, cpus: taken.append(tuple(cpus)))
    environ = {"XFFL_BIND": "cores", **place(1, 2)}
    bind_if_asked(environ)
    assert taken == [(2, 3, 6, 7)] and environ["OMP_NUM_THREADS"] == "2"


OF_FOUR = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "0"}
OF_FOUR |= {"GROUP_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "4000"}


@pytest.mark.parametrize(
    ("cpus", "variables", "policy", "is_batch"),
    [
        (3, OF_FOUR, os.SCHED_OTHER, True),
        (4, OF_FOUR, os.SCHED_OTHER, False),  # a CPU for each
        (3, {}, os.SCHED_OTHER, False),  # nobody has started this process
        (3, {**OF_FOUR, "XFFL_SCHED": "other"}, os.SCHED_OTHER, False),
        (4, {"XFFL_SCHED": "Batch"}, os.SCHED_OTHER, True),
        (3, {**OF_FOUR, "XFFL_SCHED": "other"}, os.SCHED_BATCH, False),  # of a rank above
        (3, OF_FOUR, os.SCHED_IDLE, False),  # somebody has chosen already
        (3, {**OF_FOUR, "XFFL_BIND": "cores"}, os.SCHED_OTHER, True),  # ranks share cores, bound or not
    ],
)
def test_ranks_take_turns_where_there_are_more_than_cpus(
    cpus: int, variables: dict[str, str], policy: int, is_batch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    current = [policy]
    monkeypatch.setattr(affinity, "allowed_cpus", lambda: tuple(range(cpus)))
    monkeypatch.setattr(os, "sched_getscheduler", lambda process: current[-1])
    monkeypatch.setattr(os, "sched_setscheduler", lambda process, chosen, param: current.append(chosen))
    assert affinity.take_turns_if_crowded(variables) is is_batch
    wanted = os.SCHED_BATCH if is_batch else os.SCHED_OTHER if policy == os.SCHED_BATCH else policy
    assert current == ([policy] if wanted == policy else [policy, wanted])


def test_a_rank_with_a_core_of_its_own_is_not_crowded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(affinity, "is_bound", lambda environ: True)
    monkeypatch.setattr(affinity, "allowed_cpus", lambda: (3,))
    monkeypatch.setattr(os, "sched_getscheduler", lambda process: os.SCHED_OTHER)
    assert not affinity.take_turns_if_crowded(OF_FOUR)


def test_a_step_of_slurm_whose_numbers_do_not_fit_is_told_elsewhere() -> None:
    environ = {**recording("srun_uneven_3_1")[3], "SLURM_STEP_TASKS_PER_NODE": "4"}
    assert environ["SLURM_NODEID"] == "1" and affinity._place(environ) is None
    affinity.take_turns_if_crowded(environ)  # raises nothing


def test_a_scheduler_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: object) -> None:
        raise PermissionError(1, "not permitted")

    monkeypatch.setattr(os, "sched_getscheduler", lambda process: os.SCHED_OTHER)
    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    monkeypatch.setattr(affinity, "allowed_cpus", lambda: (0,))
    assert not affinity.take_turns_if_crowded(OF_FOUR)  # only slower
    with pytest.raises(ConfigError, match="XFFL_SCHED=batch is not allowed here: .*not permitted"):
        affinity.take_turns_if_crowded({"XFFL_SCHED": "batch"})
    with pytest.raises(ConfigError, match="XFFL_SCHED is 'fifo'; give batch or other"):
        affinity.take_turns_if_crowded({"XFFL_SCHED": "fifo"})


@pytest.mark.parametrize("processes", [1, len(allowed_cpus()) + 1])
def test_exec_has_crowded_ranks_take_turns(processes: int, tmp_path: Path) -> None:
    (tmp_path / "show.py").write_text("import os\nprint(os.sched_getscheduler(0) == os.SCHED_BATCH)\n")
    ran = subprocess.run(
        [sys.executable, "-m", "xffl", "exec", "--processes", str(processes), "show.py"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=60, capture_output=True, text=True,
        check=True, preexec_fn=lambda: os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0)),
    )  # fmt: skip
    assert ran.stdout.split() == [str(processes > 1)] * processes


@pytest.mark.parametrize(
    ("environ", "threads"),
    [({}, "1"), ({"OMP_NUM_THREADS": "7"}, "7"), ({"XFFL_BIND": "cores"}, None)],
)
def test_threads_are_limited_where_ranks_share_cores(environ: dict[str, str], threads: str | None) -> None:
    changed = dict(environ)
    affinity.limit_threads(changed)
    assert changed.get("OMP_NUM_THREADS") == threads


def test_exec_binds_its_ranks(tmp_path: Path) -> None:
    if len(find_cores(allowed_cpus())) < 2:
        pytest.skip("there is one core only")
    script = tmp_path / "show.py"
    script.write_text(
        "import os\nwith open(os.environ['RANK'], 'w') as file:\n"
        "    print(*sorted(os.sched_getaffinity(0)), os.environ['OMP_NUM_THREADS'], file=file)\n"
    )
    environ = {name: text for name, text in os.environ.items() if name != "OMP_NUM_THREADS"}
    environ |= {"XFFL_BIND": "cores", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "xffl", "exec", "--processes", "2", str(script)]
    subprocess.run(command, env=environ, cwd=tmp_path, timeout=60, check=True)
    parts = [share_cores(find_cores(allowed_cpus()), rank, 2) for rank in range(2)]
    expected = [" ".join(map(str, (*part.cpus, part.threads))) for part in parts]
    assert [(tmp_path / str(rank)).read_text().strip() for rank in range(2)] == expected


def test_jobs_on_one_machine_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(affinity, "allowed_cpus", lambda: (0, 1, 2, 3))
    monkeypatch.setattr(affinity, "find_cores", lambda cpus: tuple((cpu,) for cpu in cpus))
    gpus = {"CUDA_VISIBLE_DEVICES": "7,5,GPU-3"}
    shares = share_machine([1, 2], gpus)
    assert [share.environ for share in shares] == [{"CUDA_VISIBLE_DEVICES": "7"}, {"CUDA_VISIBLE_DEVICES": "5,GPU-3"}]
    assert [share.cpus for share in shares] == [(0, 1, 2, 3)] * 2
    # With fewer GPUs than ranks all see all of them; none are for ranks on CPUs.
    assert (
        share_machine([2, 2], gpus)[0].environ == share_machine([2, 2], {"CUDA_VISIBLE_DEVICES": ""})[0].environ == {}
    )
    bound = share_machine([1, 3], {"CUDA_VISIBLE_DEVICES": "", "XFFL_BIND": "cores"})
    assert [share.cpus for share in bound] == [(0,), (1, 2, 3)]
    crowded = share_machine([3, 2], {"CUDA_VISIBLE_DEVICES": ""})
    assert [share.environ for share in crowded] == [{"XFFL_SCHED": "batch"}] * 2
