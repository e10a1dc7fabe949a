"""Federations whose cells run different software: what may differ is told once, another exchange format is refused."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import xffl
from tests.ports import free_port
from tests.worlds import be_launched, run_world
from xffl.aggregation.arithmetic import weighted_mean
from xffl.aggregation.exports import export_cell
from xffl.cli.main import main
from xffl.cluster.runtimes import Runtime, runtime_table
from xffl.costs import EXCHANGE_FORMAT
from xffl.distributed.agreement.consistency import own_runtime
from xffl.distributed.agreement.differences import holders_text
from xffl.training.run_directory import RunDirectory

ROOT = Path(__file__).parents[2]
ADVICE = "run versions of xffl that have one exchange format in all cells"


def of_another_format(rank: int, world_size: int, port: int) -> str:
    if rank == 2:
        sys.modules["xffl.costs"].EXCHANGE_FORMAT = 9
    be_launched(rank, world_size, port)
    with pytest.raises(xffl.ConfigError) as raised, xffl.session(federated=2):
        raise AssertionError("the ranks have met")
    return str(raised.value)


def test_another_exchange_format_is_refused_on_all_ranks_before_they_join() -> None:
    [text] = {*run_world(4, of_another_format, free_port(), init=False)}
    # Who comes first sets what the others have.
    numbers = re.fullmatch(
        r"the exchange format of rank . is (.) \(xffl \S+\), that of other ranks is (.) \(xffl \S+\); "
        rf"{ADVICE} \(first told by rank .\)",
        text,
    )
    assert numbers is not None and {*numbers.groups()} == {str(EXCHANGE_FORMAT), "9"}, text


def of_another_patch(rank: int, world_size: int, port: int) -> str:
    if rank == 1:
        for module in ("xffl.costs", "xffl.distributed.agreement.consistency"):
            sys.modules[module].__version__ = "0.1.99"
    be_launched(rank, world_size, port)
    err = io.StringIO()
    with contextlib.redirect_stderr(err), xffl.session(federated=1) as state:
        xffl.Aggregator(nn.Linear(2, 2), state).aggregate()
    return err.getvalue()


def test_another_patch_level_of_the_same_format_is_not_refused() -> None:
    told, nothing = run_world(2, of_another_patch, free_port(), init=False)
    assert [line.split() for line in told.splitlines()[1:]] == [
        ["xffl:", "cells", "xffl"], ["xffl:", "cell", "0", xffl.__version__], ["xffl:", "cell", "1", "0.1.99"]
    ]  # fmt: skip
    assert nothing == ""


def by_hand(rank: int, world_size: int) -> str:
    if rank == 1:
        sys.modules["xffl.aggregation.engine.setup"].EXCHANGE_FORMAT = 9
    state = xffl.DistributedState()
    state.set_global("gloo", torch.device("cpu"), "127.0.0.1", 1, rank, world_size)
    state.set_federated_scaling(1)
    with pytest.raises(xffl.ConfigError) as raised:
        xffl.Aggregator(nn.Linear(2, 2 + rank), state)
    return str(raised.value)


def test_another_exchange_format_is_refused_where_a_world_was_made_by_hand() -> None:
    told = {*run_world(2, by_hand)}
    assert told == {f"'(exchange format)' differs: {EXCHANGE_FORMAT} on ranks 0; 9 on ranks 1; {ADVICE}"}


def mixed(rank: int, world_size: int, port: int, torches: dict[int, str], folder: str) -> tuple[str, list[float], bool]:
    """Make rounds in cells of two, some ranks of which have another torch; what was told, and what the mean is."""
    if rank in torches:
        torch.__version__ = torches[rank]
    be_launched(rank, world_size, port)
    err = io.StringIO()
    with contextlib.redirect_stderr(err), xffl.session(federated=2) as state:
        torch.manual_seed(0)
        plain = nn.Linear(300, 7)
        values = [plain.weight.detach().flatten() * factor for factor in (1.0, 2.5, 3.1)]
        model = xffl.shard(plain, state)
        with torch.no_grad():
            model.weight.mul_((1.0, 2.5, 3.1)[state.federated_rank])
        aggregator = xffl.Aggregator(model, state)
        for _ in range(2):
            aggregator.aggregate(weight=1.0 + rank)
        RunDirectory.open(Path(folder), state, {"a": 1}).close()
        found = model.weight.full_tensor().flatten()
    wanted = torch.empty_like(found)
    weighted_mean(values, (3.0, 7.0, 11.0), wanted)
    return err.getvalue(), found.tolist(), bool(found.equal(wanted))


def run_mixed(folder: Path, torches: dict[int, str]) -> tuple[list[str], list[dict[str, str]]]:
    told = run_world(6, mixed, free_port(), torches, str(folder), init=False)
    assert all(values == told[0][1] and is_mean for _, values, is_mean in told)
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["exchange_format"] == EXCHANGE_FORMAT
    return [text for text, *_ in told], environment["runtimes"]


def test_nothing_is_told_where_all_run_the_same(tmp_path: Path) -> None:
    told, runtimes = run_mixed(tmp_path, {})
    assert told == [""] * 6
    [row] = runtimes
    assert row["cells"] == "cells 0-2" and row["torch"] == torch.__version__


def test_what_differs_is_told_once_as_a_table_and_all_ranks_have_the_mean_to_the_bit(tmp_path: Path) -> None:
    ours = torch.__version__
    told, runtimes = run_mixed(tmp_path, {2: "2.11.0+cu126", 3: "2.11.0+cu126", 5: "2.12.1"})
    assert told == [
        "xffl: what the cells run differs, which is allowed "
        "(docs: Versions and formats, What may differ between cells):\n"
        "xffl:   cells           torch\n"
        f"xffl:   cell 0, rank 4  {ours}\n"
        "xffl:   cell 1          2.11.0+cu126\n"
        "xffl:   rank 5          2.12.1\n",
        *[""] * 5,
    ]
    assert [(row["cells"], row["torch"]) for row in runtimes] == [
        ("cell 0, rank 4", ours),
        ("cell 1", "2.11.0+cu126"),
        ("rank 5", "2.12.1"),
    ]


SCRIPT = """\
import hashlib, torch, xffl
with xffl.session(federated=1, device="cpu") as state:
    torch.manual_seed(0)
    model = xffl.shard(torch.nn.Linear(500, 300), state)
    aggregator = xffl.Aggregator(model, state)
    for number in range(3):
        draws = torch.Generator().manual_seed(2 * number + state.rank)
        with torch.no_grad():
            model.weight.add_(torch.randn(model.weight.shape, generator=draws))
        aggregator.aggregate(weight=10.0 + 5 * state.rank)
    print(torch.__version__, hashlib.sha256(model.weight.detach().numpy().tobytes()).hexdigest())
"""


@pytest.mark.skipif("OTHER_PYTHON" not in os.environ, reason="needs OTHER_PYTHON, an interpreter with another torch")
def test_cells_with_different_versions_of_torch_make_rounds(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    place = {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1, "MASTER_PORT": free_port()}
    shared = {**os.environ, "MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in place.items()}}
    cells = [
        subprocess.Popen(
            [python, "script.py"], env={**shared, "PYTHONPATH": str(ROOT), "RANK": str(rank), "LOCAL_RANK": str(rank)},
            cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank, python in enumerate([sys.executable, os.environ["OTHER_PYTHON"]])
    ]  # fmt: skip
    (out, err), (other_out, _) = (cell.communicate(timeout=120) for cell in cells)
    (version, bits), (other_version, other_bits) = out.split(), other_out.split()
    assert version != other_version and bits == other_bits
    head, *rows = [line.split()[1:] for line in err.splitlines()[1:]]
    assert head[:2] == ["cells", "torch"]
    assert [row[:3] for row in rows] == [["cell", "0", version], ["cell", "1", other_version]]


def exported(rank: int, world_size: int, cell: int, format_number: int, folder: str) -> None:
    sys.modules["xffl.aggregation.exports"].EXPORT_FORMAT = format_number
    with xffl.session() as state:
        export_cell(folder, xffl.shard(nn.Linear(2, 2), state), state, cell=cell, cells=2)


def test_an_export_in_another_exchange_format_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [str(tmp_path / name) for name in ("cell_0", "cell_1")]
    for cell, folder in enumerate(folders):
        run_world(1, exported, cell, 1 + cell, folder, init=False)
    assert main(["aggregate", *folders, "--out", str(tmp_path / "global")]) == 2
    here = f"(xffl {xffl.__version__})"
    told = f"the exchange format of {folders[1]} is 2 {here}, that of this process is 1 {here}; {ADVICE}"
    assert capsys.readouterr().err == f"xffl: CheckpointError: {told}\n"
    assert not (tmp_path / "global").exists()
    run_world(1, exported, 1, 1, folders[1], init=False)
    assert main(["aggregate", *folders, "--out", str(tmp_path / "global")]) == 0
    record = json.loads((tmp_path / "global" / "checkpoint.json").read_text())
    assert record["values"]["global"]["format"] == 1


def test_columns_of_the_table() -> None:
    one = Runtime("NVIDIA A100", "2.11.0", "12.6", "2.27.5", "0.1.0", "3.11.7")
    assert runtime_table([("cell 0", one)]) == runtime_table([("cell 0", one), ("cell 1", one)]) == []
    # What is not known of a cell is no difference.
    assert runtime_table([("cell 0", one), ("cell 1", Runtime(torch="2.11.0"))]) == []
    other = Runtime("NVIDIA H100", "2.11.0", "12.8", "", "0.1.0", "3.11.7")
    assert runtime_table([("cells 0-1", one), ("cell 2", other)]) == [
        "cells      processor    CUDA",
        "cells 0-1  NVIDIA A100  12.6",
        "cell 2     NVIDIA H100  12.8",
    ]
    assert [holders_text(ranks, (2, 1, 3)) for ranks in ([0, 1, 2, 3, 4, 5], [2, 4], [0], [3, 4, 5])] == [
        "cells 0-2",
        "cell 1, rank 4",
        "rank 0",
        "cell 2",
    ]
    assert own_runtime(torch.device("cpu")).torch == torch.__version__
