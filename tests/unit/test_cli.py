"""The command line where it needs no process of its own: ``plan``, ``env`` and what goes wrong before a start."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from argparse import ArgumentTypeError
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from xffl.cli.execute import split_command
from xffl.cli.main import COMMANDS, CommandParser, main
from xffl.cli.numbers import count, size_in
from xffl.cli.terminal import visible_output
from xffl.cluster.launch.failure import (
    FailureRecord,
    RankFailure,
    describe_failure,
    first_failure,
    note_failure,
    read_failure,
    record_failure,
    stopped_result,
)
from xffl.errors import RoundError, TopologyError

ROOT = Path(__file__).parents[2]
WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; from xffl.cli.main import main; sys.exit(main(sys.argv[1:]))"


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XFFL_FEDERATED", "XFFL_HSDP", "XFFL_IFNAME"):
        monkeypatch.delenv(name, raising=False)


def xffl(*words: str) -> subprocess.CompletedProcess[str]:
    """Run the command line in this process."""
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        try:
            code: Any = main(list(words))
        except SystemExit as left:
            code = left.code or 0
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())


def without_torch(*words: str) -> subprocess.CompletedProcess[str]:
    """Run it in a process that cannot import torch."""
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *words], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize(
    ("command", "successors"),
    [
        ("config", ("xffl init", "xffl workflow init")),
        ("run", ("xffl workflow init", "xffl submit")),
        ("simulate", ("xffl exec",)),
    ],
)
def test_commands_of_the_upstream_project_name_what_took_over(command: str, successors: tuple[str, ...]) -> None:
    for words in ([command], [command, "-ppn", "4", "training.py"]):
        ran = xffl(*words)
        assert ran.returncode == 2
        assert ran.stdout == ""
        assert len(ran.stderr.splitlines()) == 1
        assert "alpha-unito/xffl" in ran.stderr
        assert "(docs/from_upstream.rst)" in ran.stderr
        for successor in successors:
            assert successor in ran.stderr
            assert successor.split()[1] in COMMANDS


def test_plan_draws_without_torch() -> None:
    ran = without_torch("plan", "--federated", "4,4", "--hsdp", "2", "--params", "8e9", "--link-gbps", "10")
    assert ran.returncode == 0, ran.stderr
    assert "8 ranks in 2 cells of 4" in ran.stdout
    assert "32 GB" in ran.stdout and "25.6 s at 10 Gbit/s" in ran.stdout


SIMULATE = "plan --simulate --federated 4,4 --hsdp 2 --params 8e9 --link-gbps 10 --link-ms 10 --step-s 1 --every 100"


def test_plan_forecasts_without_torch() -> None:
    ran = without_torch(*SIMULATE.split(), "--bucket-mib", "64", "--codec", "int8", "--backend", "nccl")
    assert ran.returncode == 0, ran.stderr
    lines = [line.split() for line in ran.stdout.splitlines()]
    assert ["takes", "6.959", "s", "(all-gather,", "codec", "int8),", "of", "which"] in lines
    assert ["across", "6.6", "s", "the", "slow", "link", "is", "busy"] in lines
    assert "Data parallelism over all ranks instead" in ran.stdout
    assert "not in this version" not in ran.stdout and "would fill it" not in ran.stdout


def test_plan_says_when_the_slow_link_waits_for_buckets() -> None:
    assert "--bucket-mib" not in xffl(*SIMULATE.split()).stdout
    assert "--bucket-mib" in xffl(*SIMULATE.split(), "--bucket-mib", "0.5", "--link-ms", "50").stdout


def test_the_forecasts_of_the_page_on_rounds_are_those_of_its_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    page = (ROOT / "docs/round_cheaper.rst").read_text()
    section = page[page.index("says what a round costs before a job is queued") :]
    block = re.search(r"^   xffl (plan .*)$", section, re.MULTILINE)
    assert block is not None
    told = xffl(*block[1].split()).stdout
    shown = re.search(r"::\n\n((?:   .*\n|\n)+)", section[block.end() :])
    assert shown is not None
    assert told.endswith("\n" + textwrap.dedent(shown[1]).strip() + "\n")
    racks, link = (f"plan {' '.join(words.split())}" for words in re.findall(r"``(--federated [^`]+)``", section))
    bases = {"two facilities": block[1], "four racks": racks, "long fast link": link}
    rows = re.findall(r"   \* - (.+)\n     - (.+ m?s)\n     - (.+ m?s)\n     - (.+ %)\n", section)
    assert len(rows) == 7
    base = ""
    for name, *numbers in rows:
        base = bases.get(name, base)
        more = name.removeprefix("... ").strip("`").split() if name.startswith("...") else []
        told = xffl(*base.split(), *more).stdout
        found = [
            re.search(rf"^  {word} +([0-9.]+ [ms%]+)", told, re.MULTILINE) for word in ("takes", "exposes", "training")
        ]
        assert [one and one[1] for one in found] == numbers, name


def test_plan_forecasts_as_json() -> None:
    in_place, told = (
        json.loads(xffl(*SIMULATE.split(), "--json", *words).stdout)["forecast"]
        for words in (["--in-place"], ["--delay", "5"])
    )
    assert in_place["round"]["phases"]["commit"] == 0 and in_place["round"]["exposed"] == in_place["round"]["seconds"]
    round_, plain = told["round"], told["data_parallel"]
    assert round_["bytes_across_per_cell"] == 32e9 and round_["phases"]["across"] == pytest.approx(25.6)
    assert round_["phases"]["commit"] > 0 and round_["exposed"] < round_["seconds"]
    assert 0 < plain["utilization"] < round_["utilization"] < 1
    assert told["assumptions"] and told["codec"] == "none"


def test_plan_as_json() -> None:
    ran = xffl("plan", "--federated=(4,2)", "--hsdp", "2", "--params", "1000", "--json")
    told = json.loads(ran.stdout)
    assert told["federated_sizes"] == [4, 2] and told["replicas"] == [2, 1] and told["senders"] == [[0, 3], [4, 5]]
    assert told["traffic"]["model_bytes"] == 4000


LINKED = "plan --federated 8,4 --hsdp 2 --params 8e9 --bytes-per-param 2 --link-backend gloo"


def test_plan_counts_copies_through_the_hosts() -> None:
    told = json.loads(xffl(*LINKED.split(), "--json").stdout)["traffic"]["pcie"]
    assert (told["gbps"], told["bytes_total"]) == (200.0, 64e9)
    assert told["cell_kinds"][0]["sender"] == {"bytes_to_host": 8e9, "bytes_to_gpu": 8e9, "seconds": 0.64}
    ran = xffl(*LINKED.split(), "--pcie-gbps", "400")
    assert "host memory all ranks copy 64 GB over PCIe, at 400 Gbit/s each" in ran.stdout
    assert "a sender in a cell of 8: 8 GB to the host, 8 GB to the GPU; 320 ms" in ran.stdout
    assert "a replica in a cell of 4: 0 B to the host, 0 B to the GPU; 0 s" in ran.stdout
    both = [json.loads(xffl(*SIMULATE.split(), *more, "--json").stdout) for more in ([], ["--link-backend", "gloo"])]
    plain, linked = (told["forecast"]["round"]["seconds"] for told in both)
    assert plain < linked < plain + 2 * 16e9 / 25e9
    for words, text in (
        ("plan --federated 4,4 --link-backend gloo", "--link-backend gloo needs the model's size; give --params, too"),
        ("plan --federated 4,4 --params 1e9 --pcie-gbps 100", "no effect without --link-backend gloo: --pcie-gbps 100"),
        (f"{SIMULATE} --backend nccl --link-backend gloo", "--link-backend gloo changes; give one of them"),
    ):
        ran = xffl(*words.split())
        assert ran.returncode == 2 and text in ran.stderr and len(ran.stderr.splitlines()) == 1


def test_plan_of_a_large_world() -> None:
    ran = xffl("plan", "--federated", "1000", "--world", "100000", "--hsdp", "8")
    assert ran.returncode == 0 and len(ran.stdout.splitlines()) < 100


INSIDE = (
    "plan --federated 8,8 --params 8e9 --mesh pp=2,dp_shard=auto,tp=2 --layers 32 --width 4096 --vocabulary 128256 "
    "--kv-width 1024 --batch 8 --sequence 4096 --param-dtype bfloat16"
)


def test_plan_tells_of_the_inside_of_a_cell_without_torch() -> None:
    ran = without_torch(*INSIDE.split(), "--assumptions")
    assert ran.returncode == 0, ran.stderr
    lines = [line.split() for line in ran.stdout.splitlines()]
    assert ["Mesh", "of", "cell", "0:", "pp", "2", "x", "dp_shard", "2", "x", "tp", "2"] in lines
    assert ["pp", "1", "4", "5", "6", "7"] in lines
    assert ["optimizer", "8", "GB", "U", "/", "n", "x", "2", "x", "4"] in lines
    for row in ("single", "ddp", "fsdp", "hsdp,", "deepspeed,", "this,"):
        assert row in [line[0] for line in lines if line]
    assert "all-gather of weights" in ran.stdout and "memory is that of the stage" in ran.stdout


def test_plan_of_the_inside_of_a_cell_as_json() -> None:
    told = json.loads(xffl(*INSIDE.split(), "--json").stdout)["inside"]
    assert told["axes"] == {"pp": 2, "cp": 1, "dp_replicate": 1, "dp_shard": 2, "tp": 2} and told["ranks"] == 8
    assert {part["what"] for part in told["memory"]} == {"parameters", "gradients", "optimizer", "gathered", "round"}
    assert told["total_bytes"] == pytest.approx(sum(part["bytes"] for part in told["memory"]))
    assert {part["what"] for part in told["traffic"]} == {"dp_shard, cp", "tp", "pp"}
    assert told["strategies"]["single"]["parameters"] == 32e9 and told["strategies"]["single"]["sends"] == 0


@pytest.mark.parametrize(
    ("words", "strategy", "axes"),
    [
        ("--hsdp 2 --optimizer sgd --params 1e6", "hsdp", {"dp_replicate": 2, "dp_shard": 2}),
        ("--hsdp 1 --dtype bfloat16 --params 1e6", "ddp", {"dp_replicate": 4}),
        ("--optimizer momentum --params 1e6", "fsdp", {"dp_shard": 4}),
        ("--strategy ddp", "ddp", {"dp_replicate": 4}),
        ("--strategy fsdp", "fsdp", {"dp_shard": 4}),
        ("--strategy hsdp --hsdp 2", "hsdp", {"dp_replicate": 2, "dp_shard": 2}),
        ("--strategy deepspeed --zero-stage 3 --params 1e6", "deepspeed", {"dp_shard": 4}),
        ("--mesh cp=4,dp_replicate=auto", "fsdp", {"cp": 4}),
        ("--mesh dp_replicate=auto,tp=2", "hsdp", {"dp_replicate": 2, "tp": 2}),
        ("--optimizer adafactor --strategy ddp --width 64 --params 1e6", "ddp", {"dp_replicate": 4}),
    ],
)
def test_plan_lays_a_cell_out(
    words: str, strategy: str, axes: dict[str, int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--federated", "4,8", "--json", *words.split()]) == 0
    told = json.loads(capsys.readouterr().out)
    inside = told["inside"]
    assert (inside["cell"], inside["strategy"]) == (0, strategy)
    assert {axis: size for axis, size in inside["axes"].items() if size > 1} == axes
    assert (inside["memory"] is None) == ("--params" not in words)
    assert main(["plan", "--federated", "4,8", *words.split()]) == 0
    if "bfloat16" in words:
        assert told["traffic"]["model_bytes"] == 2e6


def test_env_without_torch() -> None:
    ran = without_torch("env")
    assert ran.returncode == 0, ran.stderr
    assert "rank        0 of 1" in ran.stdout and "slurm     no, without SLURM_PROCID" in ran.stdout


def test_env_as_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    ranks = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    others = {"GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "4000"}
    for name, value in {**ranks, **others, "XFFL_FEDERATED": "2,2"}.items():
        monkeypatch.setenv(name, value)
    assert main(["env", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["launcher"], told["rank"], told["node_rank"], told["master_port"]) == ("torchrun", 3, 1, 4000)
    assert told["federated"] == [2, 2] and told["hsdp"] is None and told["missing"]["torchrun"] == []


def test_list_tells_name_line_and_paper_without_torch() -> None:
    ran = without_torch("list", "algorithms")
    assert ran.returncode == 0, ran.stderr
    lines = [re.split(r" {2,}", line.strip()) for line in ran.stdout.splitlines()]
    assert lines[0] == ["kind", "name", "what it does", "paper", "what moves", "bytes a parameter and round"]
    assert ["server", "fedadam"] in [line[:2] for line in lines] and ["partition", "iid"] in [
        line[:2] for line in lines
    ]
    scaffold = next(line for line in lines if line[:2] == ["client", "scaffold"])
    assert "gradients" in scaffold[2] and scaffold[3] == "Karimireddy et al., 2020, arXiv 1910.06378"
    assert all(len(line) == 6 for line in lines)
    assert next(line for line in lines if line[:2] == ["algorithm", "desloc"])[-1] == "6"


def test_list_as_json_and_by_kind_without_torch() -> None:
    every = json.loads(without_torch("list", "algorithms", "--json").stdout)
    algorithms = json.loads(xffl("list", "algorithms", "--kind", "algorithm", "--json").stdout)
    assert algorithms == [entry for entry in every if entry["kind"] == "algorithm"] and len(algorithms) < len(every)
    assert {"name", "line", "paper", "options", "takes"} <= every[0].keys()
    # What a rule takes is read from its class, which imports torch.
    assert {entry["takes"] for entry in every if entry["kind"] == "server"} == {None}
    assert "step_decay" in [entry["name"] for entry in every if entry["kind"] == "server_schedule"]
    ran = xffl("list", "algorithms", "--kind", "algorithm")
    # Columns break lines: the options of streaming_diloco end on the line that follows.
    assert re.search(r"streaming_diloco .*fragments\b.*\n.*overlap = True, delay = 1, alpha = 0.5", ran.stdout)


def test_list_of_a_kind_tells_types_and_values_of_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "algorithms", "--kind", "server"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "betas: tuple[float, float] = (0.9, 0.99)" in told and "rule: str = yogi" in told
    assert "lr: float = 0.7, momentum: float = 0.9" in told
    # A narrow table may break the line of an option anywhere.
    assert told.count("schedule: ") == told.count("device: ") == told.count("clip: ") == told.count("lr: ")


def test_list_as_json_has_the_options_with_and_without_a_kind(capsys: pytest.CaptureFixture[str]) -> None:
    takes = {
        ("server", "sgd"): r"lr: float = 1.0, .*, schedule: .*, device: .*, clip: float \| None = None",
        ("server_schedule", "step_decay"): "step_size: int, gamma: float = 0.1",
        ("algorithm", "streaming_diloco"): ".*fragments = 3, overlap = True, delay = 1, alpha = 0.5",
    }
    assert main(["list", "algorithms", "--json"]) == 0
    every = json.loads(capsys.readouterr().out)
    listed = {(entry["kind"], entry["name"]): entry["takes"] for entry in every}
    assert all(re.fullmatch(pattern, listed[entry]) for entry, pattern in takes.items())
    assert main(["list", "algorithms", "--kind", "server", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [entry for entry in every if entry["kind"] == "server"]


ALL_CELLS = ["--elastic", "--federated", "1,1"]
ONE_CELL = ["--elastic", "a:1", "--cell", "0/2"]
BAD = [
    (["list", "algorithms", "--kind", "servers"], "ConfigError: kind must be one of 'algorithm', 'server', "),
    (["plan", "--federated", "4,3", "--world", "8"], "TopologyError: federated sizes (4, 3) sum to 7"),
    (["plan", "--federated", "4"], "ConfigError: --federated 4 does not say how many ranks"),
    (["plan"], "ConfigError: the number of ranks is missing; give --federated 4,4, or --world"),
    (["plan", "--federated", "4,x"], "ConfigError: --federated is '4,x'"),
    (["plan", "--federated", "4,4", "--hsdp", "3"], "TopologyError: replica size (hsdp) 3 does not divide"),
    (["plan", "--federated", "4,4", "--params", "-1"], "ConfigError: --params must be a number > 0, got -1.0"),
    (["plan", "--federated", "4,4", "--params", "0"], "ConfigError: --params must be a number > 0, got 0.0"),
    (["plan", "--federated", "4,4", "--link-gbps", "10"], "ConfigError: --link-gbps 10.0 needs"),
    (["plan", "--federated", "4,4", "--every", "5"], "ConfigError: no effect without --simulate: --every"),
    (
        ["plan", "--federated", "4,4", "--params", "8e9", "--optimizer", "sgd", "--moments", "average"],
        "ConfigError: --moments average has nothing to average: --optimizer sgd keeps nothing",
    ),
    (
        ["plan", "--federated", "4,4", "--params", "8e9", "--moments", "average:foo=3"],
        "ConfigError: --moments average:foo=3 names foo, and --optimizer adamw keeps exp_avg, exp_avg_sq; give names",
    ),
    (
        ["plan", "--federated", "4,4", "--rails", "--codec", "int8"],
        "ConfigError: no effect without --simulate: --rails, --codec",
    ),
    (
        ["plan", "--federated", "4,4", "--simulate", "--params", "1"],
        "ConfigError: --simulate lacks --link-gbps, --link",
    ),
    (["plan", "--world", "4", "--mesh", "xp=2"], "ConfigError: --mesh 'xp=2' has 'xp=2'; give each of pp, cp"),
    (["plan", "--world", "4", "--mesh", "tp=2,tp=2"], "ConfigError: --mesh 'tp=2,tp=2' has 'tp=2'"),
    (["plan", "--world", "4", "--mesh", "tp=3"], "ConfigError: tp=3 multiply to 3, but the world has 4 ranks"),
    (["plan", "--world", "4", "--mesh", "tp=auto,pp=auto"], "ConfigError: pp and tp are all 'auto'"),
    (["plan", "--world", "4", "--mesh", "tp=4", "--strategy", "ddp"], "ConfigError: --strategy ddp does not do what"),
    (
        ["plan", "--world", "4", "--mesh", "tp=4", "--hsdp", "2"],
        "ConfigError: replicas of 2 ranks (--hsdp) differ from those of --mesh tp=4, of 4; leave",
    ),
    (
        ["plan", "--world", "4", "--strategy", "fsdp", "--hsdp", "2"],
        "ConfigError: replicas of 2 ranks (--hsdp) differ from those of --strategy fsdp, which are whole cells; leave",
    ),
    (["plan", "--federated", "4,-4"], "TopologyError: federated size must be a positive integer, got -4"),
    (["plan", "--world", "4", "--strategy", "hsdp"], "ConfigError: --strategy hsdp needs to know the ranks"),
    (["plan", "--world", "4", "--strategy", "single"], "ConfigError: all sizes 1 multiply to 1, but the world has 4"),
    (["plan", "--world", "4", "--optimizer", "sgd"], "ConfigError: no effect without --params: --optimizer"),
    (["plan", "--world", "4", "--zero-stage", "1"], "ConfigError: --zero-stage 1 is 1, 2 or 3, and DeepSpeed's"),
    (
        ["plan", "--world", "4", "--params", "1", "--dtype", "int8"],
        "ConfigError: dtype must be one of 'float32', 'bfloat16', 'float16', got 'int8'",
    ),
    (
        ["plan", "--world", "4", "--params", "1", "--optimizer", "lion"],
        "ConfigError: optimizer must be one of 'sgd', 'momentum', 'adamw', 'adafactor', got 'lion'",
    ),
    (
        ["plan", "--world", "4", "--params", "1", "--optimizer", "adafactor"],
        "ConfigError: optimizer 'adafactor' needs whole matrices",
    ),
    (
        ["plan", "--world", "4", "--params", "1e9", "--mesh", "pp=4", "--layers", "2"],
        "ConfigError: pp=4 stages cannot share 2 layers",
    ),
    ([*SIMULATE.split(), "--link-ms=-1"], "ConfigError: --link-ms must be a number >= 0, got -1.0"),
    ([*SIMULATE.split(), "--bucket-mib", "0"], "ConfigError: --bucket-mib must be a number > 0, got 0.0"),
    ([*SIMULATE.split(), "--codec", "zip"], "ConfigError: codec 'zip' is unknown; give one of none"),
    ([*SIMULATE.split(), "--codec", "itn8"], "ConfigError: codec 'itn8' is unknown (did you mean 'int8'?); give one"),
    ([*SIMULATE.split(), "--codec", ""], "ConfigError: codec '' is unknown; give one of none"),
    (
        [*SIMULATE.split(), "--codec", "bf16:x"],
        "ConfigError: codec 'bf16:x': option 'x' is unknown or given twice; give the codec",
    ),
    (
        [*SIMULATE.split(), "--delay", "100"],
        "ConfigError: delay must be below the 100 steps between two rounds, got 100",
    ),
    ([*SIMULATE.split(), "--delay", "2", "--in-place"], "ConfigError: delay 2 needs atomic rounds"),
    (["exec", "--processes", "3", "--federated", "2,2", __file__], "TopologyError: federated sizes (2, 2) sum to 4"),
    (["exec", "--processes", "0", __file__], "TopologyError: world size must be a positive integer, got 0"),
    (["exec", "--processes", "2"], "ConfigError: no script is given"),
    (["exec", "--processes", "2", "no such.py"], "LaunchError: script 'no such.py' does not exist"),
    (["exec", "--processes", "2", "."], "LaunchError: script '.' is a folder without __main__.py"),
    (["exec", "--processes", "2", "--timeout", "0", __file__], "ConfigError: --timeout is 0.0"),
    (["exec", "--elastic", __file__], "ConfigError: --elastic without an address starts all cells; give --federated"),
    (["exec", "--elastic", "--federated", "auto", __file__], "ConfigError: federated auto finds cells of hosts"),
    (["exec", *ALL_CELLS, "--cell", "0/2", __file__], "ConfigError: --cell 0/2 needs the lighthouse's address"),
    (["exec", *ALL_CELLS, "--measure", "x", __file__], "ConfigError: --measure x is for rounds over files, but"),
    (["exec", *ALL_CELLS, "--hosts", "a:1", __file__], "ConfigError: --elastic starts all cells on this machine or"),
    (["exec", *ALL_CELLS, "--restarts=-1", __file__], "ConfigError: --restarts must be an integer of 0 or more"),
    (["exec", *ALL_CELLS, "--processes", "3", __file__], "TopologyError: federated sizes (1, 1) sum to 2, but"),
    (["exec", *ALL_CELLS, "--hsdp", "2", __file__], "TopologyError: replica size (hsdp) 2 does not divide cell 0"),
    (["exec", *ALL_CELLS, "no such.py"], "LaunchError: script 'no such.py' does not exist"),
    (["exec", *ONE_CELL[:2], __file__], "ConfigError: --elastic a:1 joins one cell to a run; give --cell"),
    (["exec", "--elastic", "http://a", *ONE_CELL[2:], __file__], "LaunchError: --elastic is 'http://a'; give HOST:POR"),
    (
        ["exec", "--elastic", "file:", *ONE_CELL[2:], __file__],
        "LaunchError: --elastic is 'file:'; give the file that hol",
    ),
    (["exec", *ONE_CELL, "--federated", "1,1", __file__], "ConfigError: --federated 1,1 is for a job of several cells"),
    (["exec", *ONE_CELL, "--export", "x", __file__], "ConfigError: --export x is for rounds over files, but"),
    (
        ["exec", "--processes", "2", "--restarts", "3", __file__],
        "ConfigError: --restarts 3 is for cells that xffl",
    ),
    (
        ["exec", "--processes", "2", "--meeting-timeout", "3", __file__],
        "ConfigError: --meeting-timeout 3 is for --elastic",
    ),
    (["exec", *ALL_CELLS, "--meeting-timeout=0", __file__], "ConfigError: --meeting-timeout must be"),
    (["bench"], "ConfigError: no launcher has started this process; give --processes N"),
    (["bench", "--federated", "2,2"], "ConfigError: no launcher has started"),
    (["bench", "--processes", "3", "--federated", "2,2"], "TopologyError: federated sizes (2, 2) sum to 4"),
    (["bench", "--processes", "1"], "ConfigError: --processes is 1; give 2 or more"),
    (["bench", "--processes", "0"], "ConfigError: --processes is 0; give 2 or more"),
    (["bench", "--processes=-1"], "ConfigError: --processes is -1; give 2 or more"),
    (["bench", "--processes", "2", "--repeats", "0"], "ConfigError: --repeats must be a positive integer, got 0"),
    (["bench", "--processes", "2", "--warmup", "0"], "ConfigError: --warmup must be a positive integer, got 0"),
    (["bench", "--processes", "2", "--megabytes", "0"], "ConfigError: --megabytes must be a number >= 0.01, got 0.0"),
    (["bench", "--processes", "2", "--out", f"{__file__}/x"], f"ConfigError: --out {__file__}/x cannot be made: Not a"),
]


@pytest.mark.parametrize(("words", "message"), BAD, ids=[message[:40] for _, message in BAD])
def test_wrong_set_ups_are_one_line_and_exit_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    told = capsys.readouterr()
    assert told.out == "" and told.err.startswith(f"xffl: {message}") and told.err.count("\n") == 1


NONSENSE = """\
nope|--nope|7|exec|exec --nope|exec train.py|exec nope.py|exec --processes two x|exec --processes 0 /dev/null
exec nope.yaml|exec --processes 2 /|bench --processes x|bench --megabytes -1 --processes 1|bench --megabytes 5QB
bench --federated a|bench --out /proc/x --processes 1|plan --bogus 1|plan --federated 2,x|plan --federated 2,,2
plan --hosts @/nope|plan|plan --federated auto|plan --world 0|plan --world 1e30|plan --world 1.5
plan --params 7q --world 4|plan --params -3 --world 4|plan --federated file:/nope --hosts a:1
plan --federated file:/ --hosts a:1|plan --hosts @/ --federated auto|plan --mesh x=1 --world 4 --params 1b
plan --params 1e-3b --world 4 --link-gbps nan|plan --federated hosts:[ --hosts a:1|doctor --timeout x
doctor --need foo|doctor --federated q|doctor --hosts @/nope|doctor --elastic foo|submit|submit nope
submit --slurm.nodes x FILE|submit --cells 2 FILE|submit --template /nope FILE|submit --slurm.foo 2 FILE
consolidate|consolidate /nope out|consolidate / out|consolidate a b --max-shard-bytes many|aggregate
aggregate /nope --out x|aggregate / --out x --weights a|cells|cells nope|cells file:/nope|cells file:/
cells 127.0.0.1:1 --watch x|cells 127.0.0.1:99999|logs|logs /nope|logs /|logs / --ranks x
logs / --ranks 0-99999999999|report|report /nope|report /|report FILE|report / --out FILE|lighthouse --bind x
lighthouse --min-replicas x|lighthouse --min-replicas 0|list|list foo|list algorithms --kind foo|env --foo|init
init /proc/x|init /|init x --template nope|init FILE/x|workflow|workflow nope|workflow init|workflow init /nope
workflow init /nope --facility a=local|workflow begin|workflow begin /proc/x --rounds 2
workflow begin / --rounds x|workflow record / /nope|workflow record / /"""


@pytest.mark.parametrize("line", NONSENSE.replace("\n", "|").split("|"))
def test_nonsense_is_answered_in_one_line_and_exit_2(
    line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("XFFL_FEDERATED", "XFFL_HSDP"):
        monkeypatch.delenv(name, raising=False)
    try:
        code = main(line.replace("FILE", __file__).split())
    except SystemExit as left:
        code = left.code  # type: ignore[assignment]
    told = capsys.readouterr()
    assert code == 2 and told.out == "", told.out
    assert told.err.startswith("xffl") and told.err.count("\n") == 1 and told.err.endswith("\n"), told.err


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("12", 12), ("7b", 7 * 10**9), ("1.3B", 13 * 10**8), ("70e9", 7 * 10**10), ("7_000_000_000", 7 * 10**9),
        ("0.5k", 500), ("2 M", 2 * 10**6), ("1T", 10**12), ("3g", 3 * 10**9), ("-3", -3), ("1e3", 1000), (7, 7),
        *((text, None) for text in ("", "b", "1.5", "7bb", "0x10", "1,000", "1e999999999", "9" * 5000, "nan", "inf")),
        *((text, None) for text in ("_1", "1__0", "٣", "1e-3", "7 b b", "1e24k")),
    ],
)  # fmt: skip
def test_counts_are_read_alike(text: str, number: int | None) -> None:
    if number is not None:
        assert count(text) == number
        return
    with pytest.raises(ArgumentTypeError, match="is no whole number; give one such as 12, 70e9, 7b or 7_000_000_000"):
        count(text)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("4", 4), ("4MiB", 4), ("1GiB", 1024), ("1.5 gib", 1536), ("512KiB", 0.5), ("2097152B", 2), ("0.25", 0.25),
        ("1e3MB", 1e9 / 2**20), (4.0, 4), *((text, None) for text in ("", "MiB", "4Q", "4iB", "1e99999", "nan")),
    ],
)  # fmt: skip
def test_sizes_are_read_alike(text: str, number: float | None) -> None:
    if number is not None:
        assert size_in(2**20)(text) == pytest.approx(number, rel=1e-12)
        return
    with pytest.raises(ArgumentTypeError, match="is no size; give one such as 4, 64MiB or 5GB"):
        size_in(2**20)(text)


def test_no_command_reads_a_number_by_itself() -> None:
    """All counts and numbers of all commands are read by :mod:`xffl.cli.numbers`."""
    for name, (module_name, _) in COMMANDS.items():
        module = import_module(f"xffl.cli.{module_name}")
        build, _ = getattr(module, "COMMANDS", {}).get(name) or (module.build_parser, None)
        parsers = [build()]
        for parser in parsers:
            assert isinstance(parser, CommandParser), name
            for action in parser._actions:
                assert action.type not in (int, float) and "int" not in str(getattr(action, "_typehint", "")), action
                parsers += getattr(action, "_name_parser_map", {}).values() if name == "workflow" else []


def test_a_models_size_is_read_as_people_write_it(capsys: pytest.CaptureFixture[str]) -> None:
    told = set()
    for text in ("7b", "7B", "7e9", "7_000_000_000", "7000000000", "7000m"):
        assert main(["plan", "--federated", "2,2", "--params", text, "--link-gbps", "10", "--json"]) == 0
        told.add(capsys.readouterr().out)
    assert len(told) == 1


def test_what_others_wrote_makes_a_terminal_do_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hostile = "a\x1b]0;title\x07\x1b[2J\r\u202eb"
    written = r"a\x1b]0;title\x07\x1b[2J\r\u202eb"
    (tmp_path / "metrics.json").write_text(json.dumps({"round": 1, "metrics": {hostile: 1.0}}))
    assert main(["workflow", "record", str(tmp_path), str(tmp_path / "metrics.json")]) == 0
    assert capsys.readouterr().out == f"round 1: {written} 1\n"
    assert main(["report", str(tmp_path / hostile)]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and not set(told.rstrip("\n")) & set("\x1b\x07\r\u202e")
    before = sys.stdout
    with visible_output():
        sys.stdout.writelines(["\x1b[1mx\n", "\ty\n"])
    assert capsys.readouterr().out == "\\x1b[1mx\n\ty\n" and sys.stdout is before


def test_variables_fill_what_options_leave_open(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XFFL_FEDERATED", "2,2")
    assert main(["exec", "--processes", "3", __file__]) == 2
    assert "(2, 2) sum to 4" in capsys.readouterr().err
    assert main(["plan"]) == 0


def test_bench_starts_no_processes_under_a_launcher(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "0"}
    for name, value in {**ranks, "GROUP_WORLD_SIZE": "1", "MASTER_ADDR": "n0", "MASTER_PORT": "4000"}.items():
        monkeypatch.setenv(name, value)
    assert main(["bench", "--processes", "2"]) == 2
    assert "torchrun has started 4 processes already; leave it out" in capsys.readouterr().err


def test_help_of_bench_needs_no_torch() -> None:
    ran = without_torch("bench", "--help")
    assert ran.returncode == 0 and "srun" in ran.stdout, ran.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["--version"],
        ["--help"],
        ["exec", "--help"],
        ["env", "--help"],
        ["plan", "--help"],
        ["list", "--help"],
        ["bench", "--help"],
    ],
)
def test_help(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(words)
    out = capsys.readouterr().out
    assert left.value.code == 0 and "xffl" in out and "default: null" not in out and "default: False" not in out


def test_no_command_shows_the_help_and_an_unknown_one_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    told = capsys.readouterr()
    assert told.out == "" and "start a script or a configuration" in told.err
    assert main(["exce", "config.yaml"]) == 2
    told = capsys.readouterr()
    assert told.err.startswith("xffl: ConfigError: command must be one of 'aggregate', 'exec'")
    assert told.err.endswith("got 'exce' (did you mean 'exec'?)\n")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_told_in_one_line() -> None:
    with open("/dev/full", "wb") as full:
        for words in (["plan", "--federated", "2,2"], ["list", "algorithms"]):
            ran = subprocess.run(
                [sys.executable, "-c", WITHOUT_TORCH, *words],
                stdout=full,
                stderr=subprocess.PIPE,
                timeout=60,
                check=False,
            )
            assert (ran.returncode, ran.stderr) == (1, b"xffl: [Errno 28] No space left on device\n")


@pytest.mark.parametrize("closed", [(2,), (0, 1, 2)], ids=str)
def test_a_closed_stream_changes_nothing_else(tmp_path: Path, closed: tuple[int, ...]) -> None:
    """``xffl plan >&-``: exit codes stay, and neither a file of the process nor one of a rank gets the number."""
    (tmp_path / "rank.py").write_text(_OPENED + "raise SystemExit(int(sys.argv[1]))\n")
    code = (
        "from xffl.cli.main import main; start = ['exec', '--processes', '2', 'rank.py']\n"
        "runs = [['plan', '--federated', '2,2'], ['plan', '--federated', '2,x'], ['list', 'algorithms'], ['env']]\n"
        "runs += [['init', 'demo'], ['logs', 'demo'], [*start, '7'], [*start, '0'], ['env', '-h'], ['env', '-x']]\n"
        "def coded(words):\n    try: return int(main(words))\n    except SystemExit as left: return left.code\n"
        "codes = [coded(words) for words in runs]\n" + _OPENED.replace("RANK", "NAME") + "file.write(repr(codes))\n"
    )
    streams = [None if number in closed else subprocess.PIPE for number in range(3)]
    ran = subprocess.run(
        ["sh", "-c", f'exec "$@" {" ".join(f"{number}>&-" for number in closed)}', "sh", sys.executable, "-c", code],
        cwd=tmp_path,
        env=os.environ | {"NAME": "parent"},
        stdin=subprocess.DEVNULL,
        stdout=streams[1],
        stderr=streams[2],
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    opened = ["file True True True", "file True True True", "file True True True[0, 2, 0, 0, 0, 2, 7, 0, 0, 2]"]
    assert [(tmp_path / f"{name}.txt").read_text() for name in ("0", "1", "parent")] == opened
    for number, told in ((1, ran.stdout), (2, ran.stderr)):
        assert told is None or (b"cell 1" if number == 1 else b"give sizes like 4,4") in told
    assert ran.stdout is None or b"ConfigError" not in ran.stdout, "what is for standard error goes nowhere else"


_OPENED = (
    "import os, subprocess, sys\n"
    "file = open(os.environ['RANK'] + '.txt', 'w')\n"
    "print('to standard output'); print('to standard error', file=sys.stderr); sys.stdin.read()\n"
    "subprocess.run([sys.executable, '-S', '-c', 'import os; os.write(1, b\"1\")'], check=True)\n"
    "streams = [stream.fileno() == number for number, stream in enumerate((sys.stdin, sys.stdout, sys.stderr))]\n"
    "file.write('file ' + ' '.join(map(str, streams)))\n"
)
"""A script that opens a file, prints, lets a process print, and writes whether its streams have their own numbers."""


def test_a_reader_that_leaves_early_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    ran = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, "plan", "--federated", "2,2"],
        stdout=writer,
        stderr=subprocess.PIPE,
        timeout=60,
        check=False,
    )
    os.close(writer)
    assert (ran.returncode, ran.stderr) == (141, b"")


@pytest.mark.parametrize(
    ("words", "own", "script"),
    [
        ("exec s.py", "exec", "s.py"),
        ("exec --processes 2 s.py --processes 3 -- x", "exec --processes 2", "s.py --processes 3 -- x"),
        ("exec --processes=2 s.py", "exec --processes=2", "s.py"),
        ("exec --processes 2 --traceback s.py -h", "exec --processes 2 --traceback", "s.py -h"),
        ("exec --processes 2 -- --s.py a", "exec --processes 2", "--s.py a"),
        ("exec --help", "exec --help", ""),
        ("exec --elastic s.py x", "exec --elastic", "s.py x"),
        ("exec --elastic --federated 2,2 s.py", "exec --elastic --federated 2,2", "s.py"),
        ("exec --elastic http://a:1 s.py b:1", "exec --elastic http://a:1", "s.py b:1"),
        ("exec --elastic a:1 --cell 0/2 s.py", "exec --elastic a:1 --cell 0/2", "s.py"),
        ("exec --elastic 10.0.0.1 --cell 0/2 s.py", "exec --elastic 10.0.0.1 --cell 0/2", "s.py"),
        ("exec --elastic file:a/b s.py", "exec --elastic file:a/b", "s.py"),
        ("exec --elastic=a:1 s.py", "exec --elastic=a:1", "s.py"),
        ("exec --processes", "exec --processes", ""),
        ("exec --processes 2 -m a.b -x", "exec --processes 2", "-m a.b -x"),
        ("exec --elastic -m a.b", "exec --elastic", "-m a.b"),
        ("exec --processes 2 - -x", "exec --processes 2", "- -x"),
    ],
)
def test_the_script_begins_at_the_first_word_that_is_no_option(words: str, own: str, script: str) -> None:
    assert split_command(words.split()) == (own.split(), script.split())


# Who failed first -----------------------------------------------------------------------------------------------------


def record(time: float, headline: str = "ValueError: x", *, lost_peer: bool = False) -> FailureRecord:
    return FailureRecord(time, 1, headline, "Traceback ...\n", is_xffl=False, lost_peer=lost_peer)


LOST = "RuntimeError: Connection closed by peer"


@pytest.mark.parametrize(
    ("codes", "records", "rank", "exit_code"),
    [
        ({0: 1, 1: 1}, {0: record(2.0), 1: record(1.0)}, 1, 1),
        # A lost peer is lost because of somebody: of the rank with an error of its own, or of the one without a word.
        ({0: 1, 1: 1}, {0: record(1.0, LOST, lost_peer=True), 1: record(2.0)}, 1, 1),
        ({0: 1, 1: 17}, {0: record(1.0, LOST, lost_peer=True)}, 1, 17),
        ({0: 1, 2: -9}, {0: record(1.0, LOST, lost_peer=True)}, 2, 137),
        # A survivor that the launcher ended, and one that aborted while it was torn down, are no causes.
        ({0: -15, 1: -6, 2: 1}, {2: record(1.0)}, 2, 1),
        ({0: -15, 1: 1}, {1: record(1.0, LOST, lost_peer=True)}, 1, 1),
        ({0: -15, 1: -9}, {}, 1, 137),
        ({1: -15}, {}, 1, 143),
        # What a rank has told counts, however the launcher has ended it then.
        ({0: -15, 1: 1}, {0: record(1.0), 1: record(2.0)}, 0, 1),
    ],
)
def test_first_failure(codes: dict[int, int], records: dict[int, FailureRecord], rank: int, exit_code: int) -> None:
    found = first_failure(codes, records)
    assert (found.rank, found.exit_code) == (rank, exit_code)


def test_failures_in_words() -> None:
    assert first_failure({0: -9}, {}).describe() == "was killed by SIGKILL (signal 9)"
    assert first_failure({0: 17}, {}).describe() == "exited with code 17"
    assert first_failure({0: 1}, {0: record(1.0)}).describe() == "failed with ValueError: x"
    assert RankFailure(0, 128 + 99, None).describe() == "was killed by a signal (signal 99)"


def test_a_record_tells_of_causes(tmp_path: Path) -> None:
    try:
        try:
            raise RuntimeError("[gloo/transport/tcp/pair.cc:525] Read error: Connection reset by peer")
        except RuntimeError as cause:
            raise RoundError("round 3 did not take place;\n the old weights stand") from cause
    except RoundError as error:
        written = describe_failure(error)
    assert (written.exit_code, written.is_xffl, written.lost_peer) == (2, True, True)
    assert written.headline == "RoundError: round 3 did not take place; the old weights stand"
    record_failure(written, str(tmp_path), 3)
    assert read_failure(str(tmp_path), 3) == written and read_failure(str(tmp_path), 0) is None


@pytest.mark.parametrize(("way", "lost"), [("raise other", True), ("raise other from None", False)])
def test_what_was_being_handled_is_a_cause_unless_it_is_hidden(way: str, lost: bool) -> None:
    code = f"try:\n raise RuntimeError('gloo: connection reset')\nexcept RuntimeError:\n {way}"
    with pytest.raises(ValueError, match="x") as told:
        exec(code, {"other": ValueError("x")})
    assert describe_failure(told.value).lost_peer is lost


def test_causes_that_go_round_in_a_circle() -> None:
    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__cause__ = other, one
    assert not describe_failure(one).lost_peer


@pytest.mark.parametrize(
    ("headline", "code", "is_told"),
    [
        ("OSError: full", 1, True),
        ("", 3, False),
        ("PreemptedExit: SIGTERM", 75, False),
        ("KeyboardInterrupt", 130, False),
    ],
)
def test_what_a_stopped_job_tells(headline: str, code: int, is_told: bool) -> None:
    found = FailureRecord(1.0, code, headline, "", is_xffl=False, lost_peer=False)
    assert stopped_result(143, {2: found}) == (RankFailure(2, 143, found) if is_told else 143)


@pytest.mark.parametrize("kept", [0, 9, 60])
def test_a_record_that_was_being_written_is_none(tmp_path: Path, kept: int) -> None:
    record_failure(record(1.0), str(tmp_path), 0)
    (file,) = tmp_path.iterdir()
    file.write_text(file.read_text()[:kept])
    assert read_failure(str(tmp_path), 0) is None


def test_the_time_of_a_failure_is_noted_once() -> None:
    error = TopologyError("x")
    note_failure(error)
    earlier = describe_failure(error).time
    note_failure(error)
    assert describe_failure(error).time == earlier


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SystemExit(3), 3),
        (SystemExit(-1), 255),
        (SystemExit("text"), 1),
        (KeyboardInterrupt(), 128 + signal.SIGINT),
        (ValueError("x"), 1),
        (TopologyError("x"), 2),
    ],
)
def test_exit_codes(error: BaseException, code: int) -> None:
    assert describe_failure(error).exit_code == code
