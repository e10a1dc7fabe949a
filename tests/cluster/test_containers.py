"""``workflows/containers``: the call of a rank in a real Apptainer, and what the image is built from.

The whole definition takes minutes and gigabytes to build. Here the image is empty, and the host's own folders are bound
into it: what is tested is what ``run.sh`` hands to a rank, and that ranks in containers find each other.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.cluster.conftest import require
from tests.cluster.hosts import RSH, Hosts, spread

if TYPE_CHECKING:
    from tests.cluster.conftest import Mpi

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CONTAINERS = ROOT / "workflows" / "containers"
OPENMPI = ROOT / "workflows" / "mpi" / "openmpi.sh"
DEADLINE_S = 120
OF_THE_CONTAINER = ("dev", "proc", "sys", "tmp", "run", "boot", "mnt", "media", "lost+found")
HOSTILE = 'a\'; echo "foo" $HOME \\'


def section(name: str) -> str:
    """Return a section of the definition, between its title and the next one."""
    text = (CONTAINERS / "xffl.def").read_text()
    return text.partition(f"\n%{name}\n")[2].partition("\n%")[0]


@pytest.mark.parametrize("name", ["post", "environment", "runscript", "test"])
def test_the_sections_of_the_definition_are_right_for_a_shell(name: str) -> None:
    require(shutil.which("shellcheck"), "shellcheck")
    # 2086: $mpi, $packages and $pip are lists of words.
    command = ["shellcheck", "--shell=sh", "--exclude=SC2086", "-"]
    ran = subprocess.run(command, input=section(name), capture_output=True, text=True, timeout=DEADLINE_S)
    assert section(name).strip() and ran.returncode == 0, ran.stdout


def test_the_definition_copies_what_an_installation_needs(tmp_path: Path) -> None:
    for line in section("files").splitlines():
        source, target = line.split()
        copy = tmp_path / Path(target).relative_to("/opt/source")
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, copy, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / source, copy)
    # As in the build, but for what it installs beside xffl.
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    target = tmp_path / "installed"
    if subprocess.run([sys.executable, "-c", "import pip, setuptools"], capture_output=True).returncode:
        pytest.skip("this Python has no pip and setuptools of its own")
    subprocess.run([*pip, "--target", str(target), str(tmp_path)], check=True, timeout=DEADLINE_S)
    command = [sys.executable, "-m", "xffl", "--version"]
    environ = {**os.environ, "PYTHONPATH": str(target)}
    ran = subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=DEADLINE_S, cwd=tmp_path / "installed"
    )
    assert ran.returncode == 0 and ran.stdout.startswith("xffl ")
    assert list(target.glob("xffl/cli/templates/*/config.yaml*")) and (target / "xffl" / "py.typed").exists()


@pytest.fixture
def container(base_environ: dict[str, str], tmp_path: Path) -> dict[str, str]:
    """Give the environment in which ``run.sh`` uses an image that is empty but for the host's own folders."""
    folder = Path(os.environ.get("SITE_APPTAINER", "/opt/apptainer"))
    if not (folder / "usr" / "bin" / "apptainer").exists():  # also in CI: only Debian's unstable release has it
        pytest.skip("Apptainer is missing; run tests/cluster/containers/install.sh as root")
    image = tmp_path / "image"
    (image / "dev").mkdir(parents=True)
    for name in ("proc", "sys", "tmp", "etc"):
        (image / name).mkdir()
    binds = []
    for entry in sorted(Path("/").iterdir()):
        if entry.is_symlink():
            (image / entry.name).symlink_to(os.readlink(entry))
        elif entry.is_dir() and entry.name not in OF_THE_CONTAINER and entry.name != "etc":
            (image / entry.name).mkdir(exist_ok=True)
            binds.append(str(entry))
    for name in ("passwd", "group", "hosts", "resolv.conf", "localtime"):
        (image / "etc" / name).touch()
    (image / "in_the_image").touch()
    # The tests' own Open MPI reads its settings there.
    binds += [path for path in ("/etc/openmpi", "/etc/alternatives", "/etc/ld.so.cache") if Path(path).exists()]
    own = {"IMAGE": str(image), "BIND": ",".join(binds), "APPTAINER": str(HERE / "containers" / "apptainer")}
    return {**base_environ, **own, "SITE_APPTAINER": str(folder)}


def test_a_command_in_the_container(container: dict[str, str], tmp_path: Path) -> None:
    folder = tmp_path / 'a\'; "folder" $HOME'
    folder.mkdir()
    told = "import json, os, sys; print(json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ), os.listdir('/')]))"
    command = [str(CONTAINERS / "run.sh"), sys.executable, "-c", told, "two words", HOSTILE, ""]
    environ = {**container, "PYTHONPATH": "/not/for/the/container", "OMPI_COMM_WORLD_RANK": "3"}
    ran = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=DEADLINE_S, cwd=folder)
    assert ran.returncode == 0, ran.stderr
    words, where, inside, root = json.loads(ran.stdout)
    assert words == ["two words", HOSTILE, ""] and where == str(folder)
    assert "in_the_image" in root
    # The launcher's variables reach the rank; the host's packages do not.
    assert inside["OMPI_COMM_WORLD_RANK"] == "3" and inside["PYTHONNOUSERSITE"] == "1" and "PYTHONPATH" not in inside
    ran = subprocess.run([str(CONTAINERS / "run.sh"), "sh", "-c", "exit 75"], env=container, timeout=DEADLINE_S)
    assert ran.returncode == 75


def test_ranks_in_containers_on_two_hosts(
    container: dict[str, str], openmpi: Mpi, two_hosts: Hosts, tmp_path: Path
) -> None:
    venv = str(Path(sys.executable).parent)
    environ = {
        **openmpi.environ,
        **two_hosts.environ,
        **container,
        "PATH": os.pathsep.join((str(openmpi.mpirun.parent), venv, os.environ["PATH"])),
        "HOSTS": spread((2, 1)),
        "RUN": str(CONTAINERS / "run.sh"),
        "XFFL_IFNAME": "eth0",
        "APPTAINERENV_PREPEND_PATH": venv,
        "OMPI_MCA_plm_rsh_agent": str(RSH),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    told = tmp_path / "told.py"
    lines = [
        "import os, sys",
        "sys.path.insert(0, sys.argv[1])",
        "import runpy",
        "assert os.path.exists('/in_the_image')",
    ]
    told.write_text("\n".join([*lines, "runpy.run_path(sys.argv[2], run_name='__main__')"]) + "\n")
    # The image has no xffl of its own: the working folder is where "python -m xffl" finds it.
    command = two_hosts.command("a1", str(OPENMPI), str(told), str(ROOT), str(HERE / "where.py"))
    ran = subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=DEADLINE_S, stdin=subprocess.DEVNULL, cwd=ROOT
    )
    assert ran.returncode == 0, ran.stderr
    found = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    places = [(place["rank"], place["node_local_size"], place["node_rank"], place["world_size"]) for place in found]
    assert sorted(places) == [(0, 2, 0, 3), (1, 2, 0, 3), (2, 1, 1, 3)]
