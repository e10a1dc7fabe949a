"""The table of launchers, row by row: what each tells, what is refused, and which counts where there are several."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from xffl.cluster.environment import ProcessEnvironment, detect_environment
from xffl.cluster.hardware import pick_gpu
from xffl.cluster.launch.affinity import bind_if_asked
from xffl.cluster.launch.ssh import shared_environment
from xffl.cluster.recognition.claims import Claim
from xffl.cluster.recognition.find import find_launcher, launcher_of
from xffl.cluster.recognition.launchers import LAUNCHERS, launcher_variables
from xffl.cluster.recognition.placement import Place, number_nodes, place_ranks, read_claim
from xffl.cluster.recognition.refusals import told_rank
from xffl.errors import ConfigError, LaunchError

MEETING = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4000"}
BARE = {"RANK": "3", "WORLD_SIZE": "6", "LOCAL_RANK": "1", **MEETING}
STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "127.0.0.1,127.0.0.2",
    "SLURM_STEP_TASKS_PER_NODE": "2,4",
    "SLURM_TASKS_PER_NODE": "2,4",
    "SLURM_NTASKS": "6",
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_NODES": "2",
}
RECORDED = {
    # name: variables of rank 3 of 6, which is rank 1 on its node: as launchers set them, or as their documents say
    "torchrun": {**BARE, "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2"},
    "variables": BARE,
    "openmpi": {
        "OMPI_COMM_WORLD_RANK": "3",
        "OMPI_COMM_WORLD_SIZE": "6",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
        "PMIX_RANK": "3",
        "PMIX_NAMESPACE": "prterun-vm-4949@1",
        "PRTE_LAUNCHED": "1",
    },
    "mpich": {
        "PMI_RANK": "3",
        "PMI_SIZE": "6",
        "MPI_LOCALRANKID": "1",
        "MPI_LOCALNRANKS": "4",
        "I_MPI_ROOT": "/opt/intel",
    },
    "pals": {"PALS_RANKID": "3", "PALS_LOCAL_RANKID": "1", "PALS_NODEID": "1", "PMI_RANK": "3", "PMI_SIZE": "6"},
    "mvapich": {
        "MV2_COMM_WORLD_RANK": "3",
        "MV2_COMM_WORLD_SIZE": "6",
        "MV2_COMM_WORLD_LOCAL_RANK": "1",
        "MV2_COMM_WORLD_LOCAL_SIZE": "4",
    },
    "jsrun": {
        "JSM_NAMESPACE_RANK": "3",
        "JSM_NAMESPACE_SIZE": "6",
        "JSM_NAMESPACE_LOCAL_RANK": "1",
        "PMIX_RANK": "3",
        "LSB_JOBID": "9",
    },
    "flux": {
        "FLUX_TASK_RANK": "3",
        "FLUX_JOB_SIZE": "6",
        "FLUX_TASK_LOCAL_ID": "1",
        "FLUX_JOB_NNODES": "2",
        "PMI_RANK": "3",
        "PMI_SIZE": "6",
    },
    "horovod": {
        "HOROVOD_RANK": "3",
        "HOROVOD_SIZE": "6",
        "HOROVOD_LOCAL_RANK": "1",
        "HOROVOD_LOCAL_SIZE": "4",
    },
    "slurm": STEP,
    "pmi": {"PMI_RANK": "3", "PMI_SIZE": "6"},
    "prrte": {"PMIX_RANK": "3", "PMIX_NAMESPACE": "prterun-1", "PRTE_LAUNCHED": "1"},
    "aprun": {"ALPS_APP_PE": "3"},
    "pbsdsh": {"PBS_TASKNUM": "2", "PBS_NODENUM": "0", "PBS_VNODENUM": "0", "PBS_JOBID": "1"},
    "blaunch": {"LSF_PM_TASKID": "4", "LSB_JOBID": "9"},
}
ROWS = {row.name: row for row in LAUNCHERS}
TOLD = [name for name, row in ROWS.items() if row.is_told]
UNTOLD = [name for name, row in ROWS.items() if not row.is_told]


def test_each_row_has_variables_here() -> None:
    assert RECORDED.keys() == ROWS.keys() and len(ROWS) == len(LAUNCHERS)
    for name, row in ROWS.items():
        own = {*row.variables.values(), *(sign for names in row.signs for sign in names)}
        assert own <= launcher_variables(), name
        # No rank that is started over ssh believes that it is a process of the launcher above.
        passed = shared_environment(RECORDED[name])
        assert launcher_of(passed) is None, name


def test_the_page_has_each_row() -> None:
    _, _, table = (Path(__file__).parents[2] / "docs" / "exec.rst").read_text().partition(".. _exec-launchers:")
    for row in LAUNCHERS:
        assert f"``{row.name}``" in table, row.name
        if row.is_told:
            assert f"``{row.variables['rank']}``" in table, row.name


@pytest.mark.parametrize("name", TOLD)
def test_a_launcher_that_tells_enough(name: str) -> None:
    found = detect_environment({**RECORDED[name], **MEETING})
    place = (found.launcher, found.rank, found.world_size, found.node_local_rank)
    assert place == (name, 3, 6, 1)
    assert (found.master_addr, found.master_port) == ("10.0.0.1", 4000)
    known = (found.node_local_size, found.node_rank, found.node_world_size)
    assert all(value in (None, right) for value, right in zip(known, (4, 1, 2), strict=True))
    assert (None not in known) == (name in ("torchrun", "slurm"))


@pytest.mark.parametrize("name", TOLD)
def test_a_launcher_of_one_process_is_no_world(name: str) -> None:
    row = ROWS[name]
    alone = dict.fromkeys((*row.variables.values(), *row.also), "0")
    for field in ("world_size", "node_local_size", "node_world_size"):
        if field in row.variables:
            alone[row.variables[field]] = "1"
    if name == "slurm":
        alone |= {"SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_TASKS_PER_NODE": "1", "SLURM_NTASKS": "1"}
    alone |= {key: text for key, text in MEETING.items() if key in alone}
    found = detect_environment(alone)
    assert (found.rank, found.world_size) == (0, 1)
    assert (found.node_local_size, found.node_rank, found.node_world_size) == (1, 0, 1)


@pytest.mark.parametrize("name", TOLD)
def test_what_is_missing_is_named_or_found_out(name: str) -> None:
    row = ROWS[name]
    full = {**RECORDED[name], **MEETING} if name in ("torchrun", "variables") else RECORDED[name]
    for variable in (*row.variables.values(), *row.also):
        left = {key: text for key, text in full.items() if key != variable}
        assert not row.matches(left)
        own = {key: text for key, text in left.items() if key in (*row.variables.values(), *row.also)}
        if name == "torchrun" and variable in ("LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"):
            found = detect_environment(own)
            assert found.launcher == "variables" and None in (
                found.node_local_size,
                found.node_rank,
                found.node_world_size,
            )
        elif any(all(sign in own for sign in names) for names in row.signs):
            with pytest.raises(LaunchError, match=f"looks like .*{variable} is missing; .*RANK, WORLD_SIZE"):
                detect_environment(own)


@pytest.mark.parametrize("name", TOLD)
@pytest.mark.parametrize("text", ["abc", "", "1.5", "9" * 5000, "1_0", "\u0663"])
def test_a_malformed_number_names_its_variable(name: str, text: str) -> None:
    for field, variable in ROWS[name].variables.items():
        if field == "master_addr":
            continue
        environ = {**RECORDED[name], **MEETING, variable: text}
        if variable == "SLURM_STEP_NUM_TASKS":  # else it is another step's
            environ["SLURM_NTASKS"] = text
        with pytest.raises(LaunchError, match=f"^{variable} is .*it must be an integer$") as raised:
            detect_environment(environ)
        assert len(str(raised.value)) < 400


@pytest.mark.parametrize("name", TOLD)
def test_a_rank_outside_its_world_is_refused(name: str) -> None:
    for field, size in (("rank", 6), ("node_local_rank", 6)):
        variable = ROWS[name].variables[field]
        environ = {**RECORDED[name], **MEETING, variable: str(size)}
        if field == "node_local_rank" and detect_environment({**RECORDED[name], **MEETING}).node_local_size is None:
            continue  # told when the ranks meet
        with pytest.raises(LaunchError, match=f"{variable}={size} is outside 0 to "):
            detect_environment(environ)


@pytest.mark.parametrize("name", UNTOLD)
def test_a_launcher_that_tells_too_little_is_refused(name: str) -> None:
    environ = RECORDED[name]
    assert find_launcher(environ) is None
    sign = ROWS[name].signs[0][0]
    message = (
        f"^{sign}={environ[sign]} looks like {ROWS[name].title.split()[0]}.*set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_"
    )
    with pytest.raises(LaunchError, match=message):
        detect_environment(environ)
    # What the message says helps.
    assert detect_environment({**environ, **BARE}).launcher == "variables"
    assert detect_environment({**environ, "RANK": "0", "WORLD_SIZE": "1"}) == ProcessEnvironment()
    assert detect_environment(environ, rank=0, world_size=1).world_size == 1


@pytest.mark.parametrize(
    "environ",
    [
        {"PBS_TASKNUM": "1", "PBS_NODENUM": "0", "PBS_VNODENUM": "0", "PBS_JOBID": "1"},
        {"LSB_JOBID": "9", "LSB_HOSTS": "a a b b"},
        {"FLUX_URI": "local:///tmp/flux"},
        # Of steps of SLURM: their own, and what a job inherits that was submitted from inside of one.
        {"SLURM_JOB_ID": "7", "PMIX_RANK": "0", "PMIX_NAMESPACE": "slurm.pmix.7.4294967290"},
        {"SLURM_JOB_ID": "7", "PMI_RANK": "2", "PMI_SIZE": "4", "PMI_JOBID": "6.0"},
        {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "PMI_RANK": "0", "PMI_SIZE": "4"},
        {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "ALPS_APP_PE": "3"},
        {"RANK": "", "WORLD_SIZE": ""},
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", **MEETING},
    ],
)
def test_the_script_of_a_job_is_a_single_process(environ: dict[str, str]) -> None:
    assert detect_environment(environ) == ProcessEnvironment()


@pytest.mark.parametrize(
    ("told", "missing"),
    [
        ({"RANK": "3"}, "WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT"),
        ({"RANK": "0"}, "WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT"),
        ({"WORLD_SIZE": "4"}, "RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT"),
        ({"LOCAL_RANK": "1"}, "RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT"),
        ({"WORLD_SIZE": "4", "LOCAL_RANK": "0", **MEETING}, "RANK"),
        ({"RANK": "2", "LOCAL_RANK": "0", **MEETING}, "WORLD_SIZE"),
    ],
)
def test_half_a_place_is_refused_with_what_is_missing(told: dict[str, str], missing: str) -> None:
    with pytest.raises(LaunchError, match=f"^{next(iter(told))}=.* {missing} is missing.*; set RANK, WORLD_SIZE"):
        detect_environment(told)
    assert launcher_of(told) is None or "MASTER_ADDR" in told  # what starts ranks of its own is none of several
    assert detect_environment(told, rank=0, world_size=1).world_size == 1


@pytest.mark.parametrize("alone", [{"WORLD_SIZE": "1"}, {"LOCAL_RANK": "0"}, {"RANK": " ", "WORLD_SIZE": ""}, MEETING])
def test_a_variable_may_say_that_a_process_is_alone(alone: dict[str, str]) -> None:
    assert detect_environment(alone) == ProcessEnvironment()


TWO_LAUNCHERS = [
    ("torchrun", "slurm", {}),
    ("torchrun", "openmpi", {"RANK": "1"}),  # ranks of torchrun need not be in the order of its agents
    ("variables", "slurm", {}),
    ("variables", "openmpi", {"WORLD_SIZE": "8"}),  # ranks that each task of another launcher has started
    ("openmpi", "slurm", {"SLURM_PROCID": "0"}),  # mpirun in a step: its daemons may be tasks of as large a step
    ("openmpi", "pbsdsh", {}),  # and are started by PBS where there is one
    ("mpich", "blaunch", {}),
    ("openmpi", "jsrun", {}),  # IBM Spectrum MPI
    ("slurm", "pmi", {}),
    ("slurm", "pals", {}),  # srun --mpi=cray_shasta
    ("slurm", "prrte", {"PMIX_NAMESPACE": "slurm.pmix.7.0"}),
    ("flux", "pmi", {}),
]


@pytest.mark.parametrize(("first", "second", "more"), TWO_LAUNCHERS)
def test_of_two_launchers_the_inner_one_counts(first: str, second: str, more: dict[str, str]) -> None:
    environ = {**RECORDED[second], **RECORDED[first], **MEETING, **more}
    assert detect_environment(environ).launcher == first


@pytest.mark.parametrize("second", [name for name in TOLD if name not in ("torchrun", "variables")])
def test_variables_set_by_hand_must_not_contradict_the_launcher(second: str) -> None:
    variable = ROWS[second].variables["rank"]
    environ = {**RECORDED[second], **BARE, "RANK": "0"}
    with pytest.raises(LaunchError, match=f"^RANK=0, but {variable}=3, of 6 .*; set RANK=.{variable} in each process"):
        detect_environment(environ)
    assert detect_environment(environ, rank=0).rank == 0  # an argument beats both


def test_without_mpi4py_an_address_suffices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    for name in ("openmpi", "flux", "jsrun", "pals"):
        with pytest.raises(LaunchError, match="mpi4py cannot be loaded .* set MASTER_ADDR to the host of rank 0"):
            detect_environment(RECORDED[name])
        assert detect_environment({**RECORDED[name], **MEETING}).launcher == name
    # Not each process of a launcher that is not MPI's is told of MPI first.
    for name in ("flux", "jsrun", "pals", "horovod"):
        variable = ROWS[name].variables["rank"]
        with pytest.raises(
            LaunchError, match=f"^{variable}=3 looks like {ROWS[name].title}, which does not tell where"
        ):
            detect_environment(RECORDED[name])
    with pytest.raises(LaunchError, match="MASTER_ADDR is ' '; give the address"):
        detect_environment({**BARE, "MASTER_ADDR": " "})


def test_cores_are_not_divided_by_a_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="XFFL_BIND=cores divides .* set LOCAL_WORLD_SIZE, or leave XFFL_BIND out"):
        bind_if_asked({**BARE, "XFFL_BIND": "cores"})


def test_a_gpu_where_the_size_of_the_node_is_not_known() -> None:
    assert [pick_gpu(rank, None, 4, {}) for rank in range(4)] == [0, 1, 2, 3]
    assert pick_gpu(3, None, 1, {"CUDA_VISIBLE_DEVICES": "3"}) == 0
    with pytest.raises(LaunchError, match="5 or more processes run on this node, but this one sees 4 GPUs"):
        pick_gpu(4, None, 4, {})


# The places of all ranks ----------------------------------------------------------------------------------------------


def test_nodes_are_numbered_by_their_lowest_rank() -> None:
    # Cyclic placement over two machines; the second one holds two pretended hosts of one name.
    claims = [Claim(0, 0, 2, "x"), Claim(1, 0, 1, "y"), Claim(2, 0, 1, "y"), Claim(3, 1, 2, "x")]
    assert number_nodes(claims) == {0: 0, 1: 1, 2: 2, 3: 0}


def claim(rank: int, local_rank: int, host: str = "x", **more: Any) -> Claim:
    return Claim(rank, local_rank, host=f"{host}/boot", **more)


def test_what_is_not_told_follows_from_the_hosts() -> None:
    claims = [claim(2, 0, "y"), claim(0, 1), claim(1, 0), claim(3, 2)]
    assert place_ranks(claims, 4) == {0: Place(3, 0, 2), 1: Place(3, 0, 2), 3: Place(3, 0, 2), 2: Place(1, 1, 2)}
    numbered = [claim(0, 0, node_rank=1), claim(1, 0, node_rank=0, local_size=1, node_world_size=2)]
    assert place_ranks(numbered, 2) == {0: Place(1, 1, 2), 1: Place(1, 0, 2)}


WRONG = [
    (
        [claim(0, 0), claim(1, 0)],
        "ranks 0, 1 on host x all have local rank 0; .* from 0 to 1, or set LOCAL_WORLD_SIZE",
    ),
    ([claim(0, 0), claim(1, 2)], r"host x should have local ranks 0 to 1, but its ranks have \{0: 0, 1: 2\}"),
    ([claim(0, 0, local_size=3), claim(1, 1, local_size=3)], "host x should have local ranks 0 to 2"),
    ([claim(0, 0, local_size=1), claim(1, 1, local_size=2)], "host x should have local ranks 0 to 1, but .*{1: 1}"),
    ([claim(0, 0, local_size=2), claim(1, 1)], "ranks 1 on host x do not tell .* set LOCAL_WORLD_SIZE for all ranks"),
    ([claim(0, 0), claim(0, 1)], r"ranks \[0, 0\] are not 0 to 1, each once \(0 occur several times, 1 not at all\)"),
    ([claim(0, 0, node_rank=0), claim(1, 0)], "ranks 1 do not tell the number of their node, but the others do"),
    ([claim(0, 0, node_rank=0), claim(1, 0, node_rank=2)], "numbered 0, 2, which is not 0 to 1; .*GROUP_RANK"),
    ([claim(0, 0, node_rank=0), claim(1, 0, node_rank=0)], "node 0 .host x. should have local ranks 0 to 1"),
    ([claim(0, 0, node_rank=0, local_size=2), claim(1, 0, node_rank=1)], "rank 0 counts 2 ranks on node 0"),
    (
        [claim(0, 0, node_world_size=2), claim(1, 1)],
        "rank 0 counts 2 nodes, but there are 1; set GROUP_",
    ),
    ([claim(0, 0, world_size=2), claim(1, 1, world_size=3)], r"different world sizes: 2 \(ranks 0\); 3 \(ranks 1\)"),
]


@pytest.mark.parametrize(("claims", "message"), WRONG, ids=[message for _, message in WRONG])
def test_places_that_contradict_each_other(claims: list[Claim], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        place_ranks(claims, len(claims))


def test_thousands_of_wrong_claims_make_a_short_message() -> None:
    with pytest.raises(LaunchError) as raised:
        place_ranks([claim(rank, 0) for rank in range(4096)], 4096)
    assert len(str(raised.value)) < 400


def test_claims_travel_as_text() -> None:
    mine = claim(1, 0, node_rank=3)
    assert read_claim(mine.to_text().encode()) == mine
    for text in ("", "[]", "{}", '{"rank": true}', "[" * 9999, mine.to_text().replace("1", "9" * 99), b"\xff"):
        with pytest.raises(LaunchError, match="claims"):
            read_claim(text)


@pytest.mark.parametrize(
    ("environ", "rank"),
    [
        ({}, None),
        ({"RANK": "3"}, 3),
        ({"RANK": "x", "WORLD_SIZE": "4"}, None),
        ({"PMIX_RANK": "2"}, 2),
        ({"OMPI_COMM_WORLD_RANK": "1", "PMIX_RANK": "1"}, 1),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, None),  # the script of a batch job
        ({"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4"}, 3),
        ({"PBS_NODENUM": "2"}, None),
    ],
)
def test_a_rank_is_known_where_nothing_else_is(environ: dict[str, str], rank: int | None) -> None:
    assert told_rank(environ) == rank
