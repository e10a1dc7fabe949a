"""Jobs of PBS and LSF: which hosts and slots their variables and files tell, and what of that is refused."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from xffl.cluster.batch import BATCH_SYSTEMS, find_job, is_here
from xffl.cluster.launch.job_layout import fit_hosts
from xffl.cluster.launch.ssh import check_gpu_names
from xffl.cluster.slurm.allocation import Host
from xffl.errors import LaunchError

AB = (Host("a", 3), Host("b", 3))


def node_file(folder: Path, text: str) -> str:
    path = folder / "nodes"
    path.write_text(text)
    return str(path)


def test_repeated_hosts_are_slots(tmp_path: Path) -> None:
    assert find_job({}) is None
    file = node_file(tmp_path, "a\na\n\nb\n  b\na\nb\n")
    pbs = find_job({"PBS_NODEFILE": file, "PBS_JOBID": "12.head", "PBS_TASKNUM": "1"})
    assert pbs is not None and (pbs.kind, pbs.job, pbs.hosts) == ("pbs", "12.head", AB)
    for told in ({"LSB_DJOB_HOSTFILE": file}, {"LSB_MCPU_HOSTS": "a 3 b 3"}, {"LSB_HOSTS": "a b a b a b"}):
        lsf = find_job({**told, "LSB_JOBID": "7"})
        assert lsf is not None and (lsf.kind, lsf.job, lsf.hosts) == ("lsf", "7", AB)
    # The file counts; the other variables must tell of the same hosts.
    lsf = find_job({"LSB_DJOB_HOSTFILE": file, "LSB_MCPU_HOSTS": "b 8 a 8"})
    assert lsf is not None and lsf.hosts == AB


def test_a_rank_of_the_job_is_no_script_of_it(tmp_path: Path) -> None:
    file = node_file(tmp_path, "a\nb\n")
    mpi = {f"OMPI_COMM_WORLD_{name}": "1" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")}
    assert find_job({"PBS_NODEFILE": file, **mpi}) is None
    slurm = {"SLURM_JOB_ID": "3", "SLURM_JOB_NODELIST": "n1", "SLURM_TASKS_PER_NODE": "2"}
    job = find_job({"PBS_NODEFILE": file, **slurm})  # SLURM's commands for users of PBS set its variables, too
    assert job is not None and job.kind == "slurm"


WRONG = [
    ("a\n-oProxyCommand=x\n", "has the host .-oProxyCommand=x.; names have letters"),
    ("a\nuser@b\n", "has the host .user@b.; names"),
    ("a\n$(id)\n", "has the host"),
    ("a\n" + "b" * 5000 + "\n", "has the host"),
    ("a slots=4\n", "line 1 of PBS_NODEFILE=.* is .a slots=4.; each line is the name of a host"),
    ("", "names no host; give --hosts"),
    ("\n  \n", "names no host"),
    ("a\0b\n", "has the host"),
    ("a\n\u00e9\n", "has the host"),
]


@pytest.mark.parametrize(("text", "message"), WRONG)
def test_a_file_of_hosts_is_checked(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=message) as raised:
        find_job({"PBS_NODEFILE": node_file(tmp_path, text)})
    assert len(str(raised.value)) < 900


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\n")
    os.mkfifo(tmp_path / "pipe")
    with open(tmp_path / "large", "wb") as large:
        large.truncate(2**30)
    for path in ("none", "bytes", "pipe", "large", "."):
        with pytest.raises(
            LaunchError, match="PBS_NODEFILE=.* cannot be read .*HINT: start from the job.s script on its"
        ):
            find_job({"PBS_NODEFILE": str(tmp_path / path)})


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"LSB_MCPU_HOSTS": "a 3 b"}, "LSB_MCPU_HOSTS='a 3 b' has 3 words; it must be pairs"),
        ({"LSB_MCPU_HOSTS": "a x"}, "the slots of 'a' in LSB_MCPU_HOSTS='a x' is 'x'; it must be an integer"),
        ({"LSB_MCPU_HOSTS": "a 0"}, "gives 'a' 0 slots; give 1 to"),
        ({"LSB_MCPU_HOSTS": "a " + "9" * 18}, "gives 'a' 9+ slots; give 1 to"),
        ({"LSB_HOSTS": "a -b"}, "has the host '-b'"),
        ({"LSB_HOSTS": "a b", "LSB_MCPU_HOSTS": "a 1 c 1"}, "MCPU_HOSTS has the hosts a, c, but LSB_HOSTS has a, b"),
        ({"LSB_HOSTS": "a b", "PBS_NODEFILE": "x"}, "PBS_NODEFILE and LSB_HOSTS are both set, but a job is of one"),
    ],
)
def test_lists_of_hosts_are_checked(environ: dict[str, str], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        find_job(environ)


def test_ranks_are_spread_over_the_hosts() -> None:
    job = find_job({"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "a 40 b 40 c 2"})
    assert job is not None
    assert [host.slots for host in fit_hosts(job, None)] == [40, 40, 2]
    assert [host.slots for host in fit_hosts(job, 82)] == [40, 40, 2]
    assert [host.slots for host in fit_hosts(job, 5)] == [2, 2, 1]
    for processes, message in (
        (83, "--processes is 83, but LSF job 7 has 82 slots .40 on a, 40 on b, 2 on c.. HINT: ask LSF .*span"),
        (2, "LSF job 7 has 3 hosts, of which each takes a rank at least. HINT: ask LSF for 2 hosts"),
        (12, "even parts are 4 ranks on c, which has 2 slots of LSF job 7"),
    ):
        with pytest.raises(LaunchError, match=message):
            fit_hosts(job, processes)
    assert all(system.kind not in ("slurm", "hosts", "local") and system.signs for system in BATCH_SYSTEMS)


FLUX = """#!/bin/sh
case "$*" in
hostlist*) echo "{hosts}";;
resource*) printf "{resources}";;
esac
exit {code}
"""


def flux_of(folder: Path, hosts: str, resources: str, code: int = 0) -> dict[str, str]:
    """Put a stand-in for flux on the path of what stands in its job."""
    (folder / "flux").write_text(FLUX.format(hosts=hosts, resources=resources, code=code))
    (folder / "flux").chmod(0o755)
    return {"PATH": f"{folder}:/bin:/usr/bin", "FLUX_URI": "local:///tmp/flux", "FLUX_ENCLOSING_ID": "f12"}


def test_flux_is_asked_for_hosts(tmp_path: Path) -> None:
    job = find_job(flux_of(tmp_path, "n[1-2]", "1 8 4\\n1 8 4\\n"))
    assert job is not None and (job.kind, job.job) == ("flux", "f12")
    assert job.hosts == (Host("n1", 4, gpus=4), Host("n2", 4, gpus=4))
    job = find_job(flux_of(tmp_path, "a,b", "2 16 0\\n"))
    assert job is not None and job.hosts == (Host("a", 8), Host("b", 8))
    assert [host.slots for host in fit_hosts(job, 3)] == [2, 1]
    with pytest.raises(LaunchError, match="Flux job f12 has 16 slots .* HINT: ask Flux for nodes"):
        fit_hosts(job, 17)
    # An instance in a job of another batch system has the hosts of that.
    file = node_file(tmp_path, "a\na\n")
    pbs = find_job({**flux_of(tmp_path, "x", "1 1 0\\n"), "PBS_NODEFILE": file})
    assert pbs is not None and (pbs.kind, pbs.hosts) == ("pbs", (Host("a", 2),))
    rank = {"FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "2", "FLUX_TASK_LOCAL_ID": "0"}
    assert find_job({**flux_of(tmp_path, "a,b", "2 16 0\\n"), **rank}) is None


@pytest.mark.parametrize(
    ("hosts", "resources", "code", "message"),
    [
        ("a,b", "2 15 0\\n", 0, "the 2 hosts of the Flux instance have unequal numbers of cores, 15 in all"),
        ("a,b", "1 8 0\\n", 0, "names 2 hosts, but flux resource list has 1 that are up"),
        ("a,b", "", 0, "has 0 that are up"),
        ("a,b", "lots\\n", 0, "what flux resource list says is 'lots'"),
        ("a,-oX", "2 8 0\\n", 0, "has the host '-oX'"),
        ("a,b", "2 8 0\\n", 3, "flux hostlist instance failed: 'exit code 3'"),
    ],
)
def test_what_flux_says_is_checked(hosts: str, resources: str, code: int, message: str, tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=message):
        find_job(flux_of(tmp_path, hosts, resources, code))


def test_no_flux_in_its_job() -> None:
    with pytest.raises(LaunchError, match="there is no flux in PATH. HINT: .* --launcher local"):
        find_job({"PATH": "/nowhere", "FLUX_URI": "local:///tmp/flux"})


def test_which_host_is_this_one() -> None:
    own = socket.gethostname()
    assert all(is_here(Host(name)) for name in (own, f"{own}.some.domain", "localhost", "127.0.0.3"))
    assert not is_here(Host("192.0.2.7")) and not is_here(Host("no-such-host.invalid"))


def test_names_of_gpus_of_one_host_are_not_sent_to_others() -> None:
    named = {"CUDA_VISIBLE_DEVICES": "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"}
    check_gpu_names(AB, {"CUDA_VISIBLE_DEVICES": "0,1"})
    check_gpu_names(AB[:1], named)
    with pytest.raises(LaunchError, match="CUDA_VISIBLE_DEVICES=.GPU-.* names GPUs of this host, .*=0,1,2,3"):
        check_gpu_names(AB, named)
