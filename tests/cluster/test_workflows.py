"""What stands in ``workflows/`` for users to copy, as they would run it (those for SLURM have tests of their own)."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from tests.cluster.conftest import output_of, require
from tests.cluster.hosts import ADDRESSES, RSH, Hosts, spread
from tests.ports import free_port
from tests.processes import still_there

if TYPE_CHECKING:
    from tests.cluster.conftest import Mpi

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
WORKFLOWS = ROOT / "workflows"
MINISSH = HERE / "ssh" / "minissh.sh"
FLOW = Path("/opt/streamflow/bin")
SITES = ("cpu.sh", "cuda.sh", "rocm.sh")
DEADLINE_S = 240
# What a script of a user has: names that start with these are the workflows' business.
OWN = ("SITE_", "CUDA_", "HIP_", "ROCR_", "MIOPEN_", "GPU_")
Run = Callable[..., list[dict[str, Any]]]
HOSTILE = 'a\'; echo "foo" $HOME `id` \\'


@pytest.fixture
def environ(base_environ: dict[str, str]) -> dict[str, str]:
    """Give an environment in which nothing of the site is set, and a virtual environment is active."""
    kept = {name: value for name, value in base_environ.items() if not name.startswith(OWN)}
    kept["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), kept["PATH"]))
    return {**kept, "TORCH_CPP_LOG_LEVEL": "ERROR"}


def after_reading(site: str, shell: Sequence[str], environ: dict[str, str], more: str = ":") -> dict[str, str]:
    """Return the variables after a shell has read an environment file, twice, and run another line."""
    file = WORKFLOWS / "env" / site
    dump = f"{sys.executable} -c 'import json, os; print(json.dumps(dict(os.environ)))'"
    line = f'. "{file}"; . "{file}"; {more}; {dump}'
    ran = subprocess.run([*shell, "-c", line], env=environ, capture_output=True, text=True, timeout=DEADLINE_S)
    assert ran.returncode == 0 and not ran.stderr, ran.stderr
    return dict(json.loads(ran.stdout.splitlines()[-1]))


@pytest.mark.parametrize("shell", [("sh", "-eu"), ("bash", "-euo", "pipefail"), ("bash",)], ids=" ".join)
@pytest.mark.parametrize("site", SITES)
def test_environments_are_read_by_any_shell(site: str, shell: Sequence[str], environ: dict[str, str]) -> None:
    del environ["OMP_NUM_THREADS"]
    found = after_reading(site, shell, environ)
    assert found["OMP_NUM_THREADS"] == "1" and found["XFFL_IFNAME"] == "" and "SRUN_CPUS_PER_TASK" not in found
    # The shell's own settings are as before: an unset variable ends the first two, and not the third.
    file = WORKFLOWS / "env" / site
    line = f'. "{file}"; echo "$no_such_variable"'
    ran = subprocess.run([*shell, "-c", line], env=environ, capture_output=True, timeout=DEADLINE_S)
    assert (ran.returncode == 0) == (shell == ("bash",))


@pytest.mark.parametrize("site", SITES)
def test_environments_keep_what_is_set_and_follow_slurm(site: str, environ: dict[str, str]) -> None:
    given = {"OMP_NUM_THREADS": "3", "XFFL_IFNAME": "lo", "SLURM_CPUS_PER_TASK": "5"}
    found = after_reading(site, ("sh", "-eu"), {**environ, **given})
    assert {name: found[name] for name in given} == given and found["SRUN_CPUS_PER_TASK"] == "5"
    del environ["OMP_NUM_THREADS"]
    assert after_reading(site, ("sh", "-eu"), {**environ, "SLURM_CPUS_PER_TASK": "5"})["OMP_NUM_THREADS"] == "5"


def test_a_site_of_cpus_hides_gpus(environ: dict[str, str]) -> None:
    assert (
        after_reading("cpu.sh", ("sh", "-eu"), {**environ, "CUDA_VISIBLE_DEVICES": "0,1"})["CUDA_VISIBLE_DEVICES"] == ""
    )


def test_a_site_of_nvidia_gpus_leaves_them_to_the_scheduler(environ: dict[str, str]) -> None:
    found = after_reading("cuda.sh", ("sh", "-eu"), {**environ, "CUDA_VISIBLE_DEVICES": "2,3"})
    assert (found["CUDA_VISIBLE_DEVICES"], found["CUDA_DEVICE_ORDER"]) == ("2,3", "PCI_BUS_ID")
    assert "CUDA_VISIBLE_DEVICES" not in after_reading("cuda.sh", ("sh", "-eu"), environ)


def test_a_site_of_amd_gpus_hides_them_once(environ: dict[str, str], tmp_path: Path) -> None:
    by_slurm = {"ROCR_VISIBLE_DEVICES": "2,3", "CUDA_VISIBLE_DEVICES": "2,3", "GPU_DEVICE_ORDINAL": "2,3"}
    scratch = tmp_path / "scratch of node"
    scratch.mkdir()
    found = after_reading("rocm.sh", ("sh", "-eu"), {**environ, **by_slurm, "TMPDIR": str(scratch)})
    assert found["ROCR_VISIBLE_DEVICES"] == "2,3" and not {"CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"} & found.keys()
    (cache,) = scratch.iterdir()
    assert found["MIOPEN_USER_DB_PATH"] == str(cache) == found["MIOPEN_CUSTOM_CACHE_DIR"]
    assert cache.stat().st_mode & 0o777 == 0o700
    # The ranks that the job starts share it; on another node it is made.
    cache.rmdir()
    for _ in range(2):
        assert after_reading("rocm.sh", ("sh", "-eu"), {**environ, "SITE_CACHE": str(cache)})["SITE_CACHE"] == str(
            cache
        )
    assert cache.stat().st_mode & 0o777 == 0o700 and len([*scratch.iterdir()]) == 1
    found = after_reading("rocm.sh", ("sh", "-eu"), {**environ, "HIP_VISIBLE_DEVICES": "1", "TMPDIR": str(scratch)})
    assert found["HIP_VISIBLE_DEVICES"] == "1" and found["SITE_CACHE"] != str(cache)


def test_shell_files_use_no_name_in_a_shared_folder_that_others_know() -> None:
    """A name in /tmp or $TMPDIR comes from mktemp."""
    files = [*WORKFLOWS.rglob("*.sh"), *WORKFLOWS.rglob("*.sbatch"), *(ROOT / "xffl").rglob("*.sh")]
    files += [*(ROOT / "tests" / "cluster").rglob("*.sh"), *(ROOT / "examples").rglob("*.sh"), ROOT / "Makefile"]
    files += [file for file in (ROOT / ".ci").iterdir() if file.suffix == ""]
    known = re.compile(r"(?<![\w.$}])/tmp/|TMPDIR[^\s\"]*/|/dev/shm/")
    found = [
        f"{file.relative_to(ROOT)}: {line.strip()}"
        for file in files
        for line in file.read_text().splitlines()
        if known.search(line) and "mktemp" not in line and not line.lstrip().startswith("#")
    ]
    assert len(files) > 20 and not found


@pytest.mark.parametrize("site", SITES)
def test_environments_load_modules_and_a_virtual_environment(
    site: str, environ: dict[str, str], tmp_path: Path
) -> None:
    require(Path("/etc/profile.d/modules.sh").exists(), "Environment Modules (environment-modules)")
    (tmp_path / "modules" / "mpi").mkdir(parents=True)
    (tmp_path / "modules" / "mpi" / "5.0").write_text("#%Module\nsetenv LOADED_MPI 5.0\n")
    venv = tmp_path / "a venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True, timeout=DEADLINE_S)
    wanted = {**environ, "MODULEPATH": str(tmp_path / "modules"), "SITE_MODULES": "mpi/5.0", "SITE_VENV": str(venv)}
    found = after_reading(site, ("bash", "-euo", "pipefail"), wanted)
    assert found["LOADED_MPI"] == "5.0" and found["VIRTUAL_ENV"] == str(venv)
    assert found["PATH"].split(os.pathsep)[0] == str(venv / "bin")
    for wrong in ({"SITE_MODULES": "mpi/6.0"}, {"SITE_VENV": str(tmp_path / "none")}):
        line = ["bash", "-euo", "pipefail", "-c", f'. "{WORKFLOWS / "env" / site}"; echo on']
        ran = subprocess.run(line, env={**wanted, **wrong}, capture_output=True, text=True, timeout=DEADLINE_S)
        ((name, value),) = wrong.items()
        assert ran.returncode != 0 and not ran.stdout and f"{name}={value}" in ran.stderr


def test_scripts_pass_the_shell_checker() -> None:
    require(shutil.which("shellcheck"), "shellcheck")
    folders = ("mpi", "ssh", "containers", "env", "cwl", "elastic")
    scripts = [str(path) for folder in folders for path in sorted((WORKFLOWS / folder).glob("*.sh"))]
    assert len(scripts) == 9
    # 1090, 1091: files that only the site has are not to be read here.
    command = ["shellcheck", "--external-sources", "--exclude=SC1090,SC1091", *scripts]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, cwd=ROOT)
    assert ran.returncode == 0, ran.stdout


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, base_environ: dict[str, str]) -> Path:
    """Write the project of ``xffl init``."""
    folder = tmp_path_factory.mktemp("projects") / "digits"
    command = [sys.executable, "-m", "xffl", "init", str(folder)]
    subprocess.run(command, env=base_environ, check=True, timeout=DEADLINE_S, stdout=subprocess.DEVNULL)
    return folder


def configuration(project: Path, name: str) -> list[str]:
    """Return the arguments with which two ranks, a cell each, train the project for a short while."""
    small = ["--launch.processes", "2", "--training.epochs", "1", "--experiment.name", name]
    return ["--federated", "1,1", str(project / "config.yaml"), *small]


def measured(project: Path, name: str) -> dict[str, list[Any]]:
    """Return what a run has measured, but for the time, by file."""
    found = {}
    for file in sorted((project / "runs" / name / "metrics").glob("*.jsonl")):
        records = [json.loads(line) for line in file.read_text().splitlines()]
        found[file.name] = [{key: value for key, value in record.items() if key != "time"} for record in records]
    return found


@pytest.fixture(scope="module")
def local(project: Path, base_environ: dict[str, str]) -> dict[str, list[Any]]:
    """Train with local processes, and give what was measured."""
    command = [sys.executable, "-m", "xffl", "exec", *configuration(project, "local")]
    output_of(command, base_environ, project)
    found = measured(project, "local")
    assert {"cell_0.jsonl", "cell_1.jsonl"} <= found.keys() and all(found.values())
    return found


def mpi_workflow(mpi: Mpi, hosts: Hosts, environ: dict[str, str]) -> tuple[str, dict[str, str]]:
    """Return the script for an MPI and the environment in which it is called, on hosts of this machine."""
    kind = "openmpi" if mpi.mpirun.name.endswith("openmpi") else "mpich"
    added = {name: value for name, value in mpi.environ.items() if name.startswith(("OMPI_", "MPI4PY_"))}
    # In place of what the user has set up: ssh without a password, and an account that is not root's.
    launcher = {"OMPI_MCA_plm_rsh_agent": str(RSH), "HYDRA_LAUNCHER_EXEC": str(RSH)}
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    environ = {**environ, **hosts.environ, **added, **launcher, **root, "XFFL_IFNAME": "eth0"}
    first = str(mpi.mpirun.parent) if kind == "mpich" else "/usr/bin"
    python = str(Path(sys.executable).parent)
    return str(WORKFLOWS / "mpi" / f"{kind}.sh"), {
        **environ,
        # The wheel's mpirun is beside Python; the system's must come before it.
        "PATH": os.pathsep.join((first, python, os.environ["PATH"])),
    }


def test_mpi_over_two_hosts(
    openmpi: Mpi, two_hosts: Hosts, environ: dict[str, str], project: Path, local: dict[str, list[Any]]
) -> None:
    script, environ = mpi_workflow(openmpi, two_hosts, environ)
    name = Path(script).stem
    before = two_hosts.crossed()
    command = two_hosts.command("a1", script, *configuration(project, name))
    output_of(command, {**environ, "HOSTS": spread((1, 1))}, project)
    after = two_hosts.crossed()
    assert measured(project, name) == local
    # A copy of the model crosses in each of three rounds, 19 kB at least.
    assert all(new - old > 3 * 19_000 for new, old in zip(after, before, strict=True))


def test_mpi_in_an_allocation(
    mpi: Mpi, two_hosts: Hosts, two_hosts_slurm: dict[str, str], environ: dict[str, str], run: Run
) -> None:
    script, environ = mpi_workflow(mpi, two_hosts, {**environ, **two_hosts_slurm})
    del environ["HYDRA_LAUNCHER_EXEC"]  # Hydra would take it in place of srun
    allocation = ["salloc", "-Q", "-N2", "-n6"]
    found = run(two_hosts.command("head", *allocation, script, str(HERE / "where.py")), environ)
    places = [(place["node_local_rank"], place["node_local_size"], place["node_rank"]) for place in found]
    assert places == [(0, 4, 0), (1, 4, 0), (2, 4, 0), (3, 4, 0), (0, 2, 1), (1, 2, 1)]


def test_mpi_hands_on_what_is_hostile(mpi: Mpi, two_hosts: Hosts, environ: dict[str, str], tmp_path: Path) -> None:
    folder = tmp_path / 'a\'; echo "foo" $HOME'
    folder.mkdir()
    told = (
        "import json, os, sys; print(json.dumps([sys.argv[1:], os.getcwd(), os.environ['TORCH_TOLD'], os.uname()[1]]))"
    )
    (folder / "told.py").write_text(told + "\n")
    script, environ = mpi_workflow(mpi, two_hosts, {**environ, "TORCH_TOLD": HOSTILE, "HOSTS": "b1:1"})
    output = output_of(two_hosts.command("a1", script, "told.py", "two words", HOSTILE, ""), environ, folder)
    assert [json.loads(line) for line in output.splitlines() if line.startswith("[")] == [
        [["two words", HOSTILE, ""], str(folder), HOSTILE, "b1"]
    ]


def test_mpi_ends_with_the_exit_code_of_a_failure(
    mpi: Mpi, two_hosts: Hosts, environ: dict[str, str], tmp_path: Path
) -> None:
    script, environ = mpi_workflow(mpi, two_hosts, {**environ, "HOSTS": spread((1, 1))})
    command = two_hosts.command("a1", script, str(tmp_path / "none.yaml"))
    ran = subprocess.run(command, env=environ, stdin=subprocess.DEVNULL, capture_output=True, timeout=DEADLINE_S)
    assert ran.returncode == 2 and b"none.yaml" in ran.stderr


@pytest.fixture
def sshd_on_two_hosts(two_hosts: Hosts, tmp_path: Path) -> Iterator[Path]:
    """Start sshd on both hosts, and give the file with which ssh on any host finds them as a1 and b1."""
    require(shutil.which("sshd", path=os.pathsep.join((os.environ["PATH"], "/usr/sbin"))), "sshd (openssh-server)")
    lines = []
    try:
        for host in ("a1", "b1"):
            folder, address = tmp_path / host, ADDRESSES[host]
            environ = {**two_hosts.environ, "SS_DIR": str(folder), "SS_HOSTS": f"{address}:22022"}
            command = two_hosts.command(host, str(MINISSH), "up")
            subprocess.run(command, env=environ, check=True, timeout=DEADLINE_S, stdin=subprocess.DEVNULL)
            lines += [f"Host {host} {address}", f"HostName {address}", "Port 22022", f"IdentityFile {folder}/id"]
            lines += [f"UserKnownHostsFile {folder}/known_hosts", "IdentitiesOnly yes"]
        (tmp_path / "config").write_text("\n".join(lines) + "\n")
        yield tmp_path / "config"
    finally:
        for host in ("a1", "b1"):
            environ = {**two_hosts.environ, "SS_DIR": str(tmp_path / host)}
            subprocess.run([str(MINISSH), "down"], env=environ, check=False, timeout=DEADLINE_S)


def test_ssh_over_two_hosts(
    two_hosts: Hosts, sshd_on_two_hosts: Path, environ: dict[str, str], project: Path, local: dict[str, list[Any]]
) -> None:
    own = {"XFFL_SSH": f"ssh -F {sshd_on_two_hosts}", "XFFL_IFNAME": "eth0", "HOSTS": spread((1, 1))}
    before = two_hosts.crossed()
    command = two_hosts.command("head", str(WORKFLOWS / "ssh" / "hosts.sh"), *configuration(project, "ssh"))
    output_of(command, {**environ, **two_hosts.environ, "PATH": environ["PATH"], **own}, project)
    assert measured(project, "ssh") == local
    assert all(new - old > 3 * 19_000 for new, old in zip(two_hosts.crossed(), before, strict=True))


BEGUN_TOGETHER = """

class TogetherTrainer(DigitsTrainer):
    def configure_dataloaders(self):
        from tests.processes import await_cells

        await_cells(2, {folder!r})
        return super().configure_dataloaders()
"""


def test_an_elastic_job_for_each_facility(environ: dict[str, str], project: Path, tmp_path: Path) -> None:
    """Both facilities are this machine. The cells make their rounds together, and nothing outlives the workflow."""
    require(find_spec("torchft"), "torchft")
    require((FLOW / "streamflow").exists(), "StreamFlow in /opt/streamflow")
    folder, home = tmp_path / "elastic", tmp_path / "a home"
    shutil.copytree(WORKFLOWS / "elastic", folder)
    together = tmp_path / "digits"
    shutil.copytree(project, together, ignore=shutil.ignore_patterns("runs"))
    with (together / "train.py").open("a") as script:
        script.write(BEGUN_TOGETHER.format(folder=str(tmp_path)))
    variables = {"PATH": f"{Path(sys.executable).parent}:$PATH", "PYTHONPATH": environ["PYTHONPATH"]}
    variables |= {"OMP_NUM_THREADS": "1", "XFFL_IFNAME": "lo", "XFFL_TOKEN_FILE": f"'{home}/token'"}
    for site in (folder / "sites").iterdir():
        site.write_text("".join(f"export {name}={value}\n" for name, value in variables.items()))
    words = ["--launch.federated", "[1,1]", "--training.epochs", "1", "--trainer", "train.TogetherTrainer"]
    inputs = yaml.safe_load((folder / "inputs.yml").read_text())
    inputs |= {"home": str(home), "home_a": str(home / "a"), "home_b": str(home / "b")}
    inputs |= {"address": f"127.0.0.1:{free_port()}", "words_a": words, "words_b": words}
    inputs |= {"project": {"class": "Directory", "path": str(together)}}
    (folder / "inputs.yml").write_text(yaml.safe_dump(inputs))
    command = [str(FLOW / "streamflow"), "run", "--outdir", "out", "streamflow-local.yml"]
    try:
        told = output_of(command, {**environ, "HOME": str(tmp_path)}, folder, DEADLINE_S)
        assert not still_there([int((home / "lighthouse.pid").read_text())], 10)
    finally:
        with suppress(FileNotFoundError, ProcessLookupError):
            os.kill(int((home / "lighthouse.pid").read_text()), signal.SIGKILL)
    assert stat.S_IMODE((home / "token").stat().st_mode) == 0o600
    assert (home / "token").read_text().strip() not in told
    assert (folder / "out" / "model" / "model.safetensors").stat().st_size > 19_000
    found = []
    for cell in (0, 1):
        lines = (folder / "out" / f"cell_{cell}" / "metrics" / "federation.jsonl").read_text().splitlines()
        found.append([(record["step"], record["values"]) for record in map(json.loads, lines)])
    assert found[0] == found[1] and [step for step, _ in found[0]] == [20, 40, 45]
    assert found[0][-1][1]["val/accuracy"] > 0.8
