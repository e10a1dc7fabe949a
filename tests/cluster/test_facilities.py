"""``xffl workflow``: rounds over facilities that no network joins, by StreamFlow and by cwltool."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.conftest import output_of, require, slurm_up

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FACILITIES, MINISSH = HERE / "net" / "facilities.sh", HERE / "ssh" / "minissh.sh"
FLOW = Path("/opt/streamflow/bin")
ROUNDS = int(os.environ.get("FACILITY_ROUNDS", "3"))
"""More for the long form, with the model of the example as it is."""
DEADLINE_S = 200 * ROUNDS
CLUSTERS = "a" if ROUNDS == 3 else "ab"
"""Facilities with a SLURM; the others are reached by ssh alone."""
EVERY = 2 if ROUNDS == 3 else 20


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the language model's example, smaller in the short form."""
    folder = tmp_path_factory.mktemp("projects") / "lm"
    folder.mkdir()
    example = ROOT / "examples" / "03_language_model"
    shutil.copy(example / "train.py", folder)
    config = yaml.safe_load((example / "config.yaml").read_text())
    config["federation"]["every"] = EVERY
    config["training"]["max_steps"] = EVERY * ROUNDS
    if ROUNDS == 3:
        config |= {"layers": 1, "width": 32, "launch": {"processes": 2, "federated": [1, 1]}}
        config |= {"distributed": {"strategy": "single"}, "federation": {"every": EVERY}}
        del config["training"]["validate_every_rounds"]
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


@pytest.fixture(scope="module")
def joined(project: Path, base_environ: dict[str, str]) -> bytes:
    """Train over a network, and give the weights."""
    output_of([sys.executable, "-m", "xffl", "exec", "config.yaml"], base_environ, project, DEADLINE_S)
    return weights_of(project / "runs" / "language_model" / "checkpoints" / "final", project / "joined", base_environ)


def weights_of(checkpoint: Path, out: Path, environ: dict[str, str]) -> bytes:
    """Return the bytes of the weights in safetensors."""
    output_of([sys.executable, "-m", "xffl", "consolidate", str(checkpoint), str(out)], environ, ROOT)
    return (out / "model.safetensors").read_bytes()


def written(project: Path, folder: Path, environ: dict[str, str], *words: str) -> Path:
    """Write the workflow of the project."""
    command = [sys.executable, "-m", "xffl", "workflow", "init", str(project / "config.yaml"), *words]
    output_of([*command, "--out", str(folder)], environ, folder.parent)
    return folder


def started(folder: Path, environ: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start StreamFlow on a workflow, in a process group of its own."""
    require((FLOW / "streamflow").exists(), "StreamFlow in /opt/streamflow")
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(
            [str(FLOW / "streamflow"), "run", "--outdir", "out", "streamflow.yml"],
            cwd=folder, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip


def ended(flow: subprocess.Popen[bytes], folder: Path) -> str:
    """Wait for StreamFlow's end, which has to be good, and return what it and the steps have printed."""
    try:
        code = flow.wait(DEADLINE_S)
    except subprocess.TimeoutExpired:
        os.killpg(flow.pid, signal.SIGKILL)
        code = -1
    told = (folder / "log").read_text()
    assert code == 0, told[-6000:]
    return told


def measured(folder: Path) -> dict[int, dict[str, float]]:
    """Return what each round's model was worth."""
    found = [json.loads(file.read_text()) for file in (folder / "results" / "metrics").glob("round_*.json")]
    return {one["round"]: one["metrics"] for one in found}


@pytest.mark.timeout(3 * DEADLINE_S)
def test_local_facilities_and_cwltool(
    project: Path, joined: bytes, base_environ: dict[str, str], tmp_path: Path
) -> None:
    environ = {**base_environ, "HOME": str(tmp_path)}
    places = [f"{name}=local,home={tmp_path / name}" for name in ("a", "b")]
    words = [word for place in places for word in ("--facility", place)]
    folder = written(project, tmp_path / "federation", environ, *words, "--measure", "none")
    # The first rounds by one of the two, the last one by the other, with the same results.
    inputs = yaml.safe_load((folder / "inputs.yml").read_text())
    (folder / "inputs.yml").write_text(yaml.safe_dump({**inputs, "rounds": ROUNDS - 1}))
    ended(started(folder, environ), folder)
    second = written(project, tmp_path / "second", environ, *words)
    (second / "inputs.yml").write_text(yaml.safe_dump(inputs))
    require((FLOW / "cwltool").exists(), "cwltool in /opt/streamflow")
    command = [str(FLOW / "cwltool"), "--enable-ext", "--parallel", "--outdir", "out", "main.cwl", "inputs.yml"]
    output_of(command, environ, second, DEADLINE_S)
    assert weights_of(folder / "results" / f"round_{ROUNDS}", tmp_path / "made", environ) == joined
    assert weights_of(second / "out" / "model", tmp_path / "given", environ) == joined
    values = measured(folder)
    assert sorted(values) == [ROUNDS - 1, ROUNDS] and values[ROUNDS]["val/loss"] < values[ROUNDS - 1]["val/loss"]
    steps = [json.loads(line)["step"] for line in (tmp_path / "a/run/metrics/cell_0.jsonl").read_text().splitlines()]
    assert max(steps) == EVERY * ROUNDS


@pytest.fixture
def facilities(
    slow_link: None, base_environ: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Any]]:
    """Bring up two facilities with an sshd each, between which there is no route, and a SLURM in those of CLUSTERS."""
    path = os.pathsep.join((os.environ["PATH"], "/usr/sbin"))
    require(shutil.which("sshd", path=path), "sshd (openssh-server)")
    prefix, home = f"f{secrets.token_hex(2)}", tmp_path_factory.mktemp("fac")
    net = f"10.{80 + secrets.randbelow(100)}"  # others, or what a killed test has left, have their own
    environ = {**base_environ, "FAC_PREFIX": prefix, "FAC_NET": net, "PATH": path}
    found: dict[str, Any] = {"prefix": prefix, "net": net, "home": home}
    (home / ".ssh").mkdir()
    with ExitStack() as stack:
        stack.callback(subprocess.run, [str(FACILITIES), "down"], env=environ, check=False, timeout=60)
        subprocess.run([str(FACILITIES), "up"], env=environ, check=True, timeout=60)
        for number, name in enumerate(("a", "b"), 1):
            within = ("ip", "netns", "exec", f"{prefix}-{name}")
            sshd = home / f"k{name}"
            own = {"SS_DIR": str(sshd), "SS_HOSTS": f"{net}.{number}.2:22022"}
            if name in CLUSTERS:
                slurm = stack.enter_context(slurm_up(f"{name}:2", environ, home / f"s{name}", within=within))
                own["SS_SETENV"] = f"SLURM_CONF={slurm['SLURM_CONF']}"
            subprocess.run([*within, str(MINISSH), "up"], env={**environ, **own}, check=True, timeout=60)
            stack.callback(subprocess.run, [str(MINISSH), "down"], env={**environ, **own}, check=False, timeout=60)
            with (home / ".ssh" / "known_hosts").open("a") as known:
                known.write((sshd / "known_hosts").read_text())
        yield found


@pytest.mark.timeout(3 * DEADLINE_S)
def test_two_facilities_without_a_route_between_them(
    facilities: dict[str, Any], project: Path, joined: bytes, base_environ: dict[str, str], tmp_path: Path
) -> None:
    net = facilities["net"]
    for here, there in (("a", f"{net}.2.2"), ("b", f"{net}.1.2")):
        way = ["ip", "-n", f"{facilities['prefix']}-{here}", "route", "get", there]
        told = subprocess.run(way, capture_output=True, text=True, timeout=60, check=False)
        assert told.returncode != 0 and "unreachable" in told.stderr
    home = facilities["home"]
    environ = {**base_environ, "HOME": str(home)}
    site = tmp_path / "site.sh"
    variables = {"PATH": f"{Path(sys.executable).parent}:$PATH", "PYTHONPATH": base_environ["PYTHONPATH"]}
    variables |= {"OMP_NUM_THREADS": "1", "XFFL_IFNAME": "lo"}
    site.write_text("".join(f"export {name}={value}\n" for name, value in variables.items()))
    ranks = 1 if ROUNDS == 3 else 4
    words = []
    for number, name in enumerate(("a", "b"), 1):
        reached = f"ssh:root@{net}.{number}.2:22022,key={home / f'k{name}' / 'id'}"
        reached += ",slurm,partition=all,time=30,nodes=1" if name in CLUSTERS else ""
        places = f"setup={site},home={home / name},workdir={home / f'w{name}'},processes={ranks}"
        words += ["--facility", f"{name}={reached},{places}"]
    folder = written(project, tmp_path / "federation", environ, *words, "--measure", "none")
    flow = started(folder, environ)
    deadline = time.monotonic() + DEADLINE_S
    last = ROUNDS // 2
    while not (folder / "results" / f"round_{last}").exists():
        assert flow.poll() is None and time.monotonic() < deadline, (folder / "log").read_text()[-6000:]
        time.sleep(0.2)
    time.sleep(2 * float.fromhex(f"0x0.{secrets.token_hex(2)}p0"))
    os.killpg(flow.pid, signal.SIGKILL)  # at a random point; its jobs go on
    flow.wait()
    there = (folder / "log").stat().st_size
    told = ended(started(folder, environ), folder)[there:]
    first = re.search(rf"round (\d+) is the next of {ROUNDS}|(all) rounds are made", told)
    assert first is not None and (first[2] or int(first[1]) > last), told
    assert weights_of(folder / "results" / f"round_{ROUNDS}", tmp_path / "made", environ) == joined
    for name in ("a", "b"):
        lock = (home / name / "run" / ".lock").read_text()
        assert ("SLURM job" in lock) == (name in CLUSTERS), lock
