"""``mpirun xffl exec SCRIPT``: each process is a rank, and nobody watches the ranks but mpirun."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tests.cluster.exec_jobs import (
    ALIKE,
    FOLDER,
    HOSTILE,
    ISOLATED,
    OWN_ERROR,
    RANK,
    SESSION,
    XFFL,
    check_isolated,
    finish,
    seconds_since_one_left,
    start,
    told,
)

if TYPE_CHECKING:
    from tests.cluster.conftest import Mpi

LIMIT_S = 30


def test_arguments_and_folder_survive(mpi: Mpi, tmp_path: Path) -> None:
    folder = tmp_path / FOLDER
    folder.mkdir()
    # Both mpiruns take a ":" on the command line for themselves, and Open MPI drops empty words.
    hostile = [word for word in HOSTILE if word not in ("", ":")]
    words = [RANK, str(folder), "end", "0", *hostile]
    command = [*mpi.command(4), *XFFL, "exec", "--federated", "3,1", "--log-dir", "logs", *words]
    code, _, err = finish(start(command, mpi.environ, folder))
    assert code == 0, err
    for rank, one in enumerate(told(folder, 4)):
        assert one["argv"] == words and one["cwd"] == str(folder) and one["rank"] == rank
        assert one["XFFL_FEDERATED"] == "3,1"
    names = {f"rank_0000{rank}_cell_{rank // 3}.log" for rank in range(4)}
    assert {file.name for file in (folder / "logs").iterdir()} == names
    assert "hello from 3\n" in (folder / "logs" / "rank_00003_cell_1.log").read_text()


def test_isolated_cells(mpi: Mpi, tmp_path: Path) -> None:
    command = [*mpi.command(3), *XFFL, "exec", "--isolate", "--federated", "2,1", ISOLATED, str(tmp_path)]
    code, _, err = finish(start(command, mpi.environ, tmp_path))
    assert code == 0, err
    check_isolated(tmp_path, (2, 1))


def test_what_does_not_fit(mpi: Mpi, tmp_path: Path) -> None:
    for words, message in (
        ("--processes 3", "--processes is 3, but"),
        ("--federated 2,1", "sum to 3, but the world has"),
    ):
        command = [*mpi.command(2), *XFFL, "exec", *words.split(), RANK, str(tmp_path), "end", "0"]
        code, _, err = finish(start(command, mpi.environ, tmp_path))
        assert code == 2 and message in err and "Traceback" not in err
    assert not list(tmp_path.glob("told.*"))


def test_what_ends_a_rank_is_told_where_its_output_goes_to_a_file(mpi: Mpi, tmp_path: Path) -> None:
    for number, (text, message) in enumerate(
        (
            (
                "from xffl.errors import ConfigError\nraise ConfigError('it is wrong')",
                "xffl: ConfigError: it is wrong (at train.py:2)",
            ),
            ("import sys\nsys.exit('no more')", "no more"),
        )
    ):
        (tmp_path / "train.py").write_text(text)
        command = [*mpi.command(1), *XFFL, "exec", "--log-dir", f"logs{number}", "train.py"]
        code, _, err = finish(start(command, mpi.environ, tmp_path))
        assert code != 0 and message in err.splitlines(), err
        assert message in (tmp_path / f"logs{number}" / "rank_00000.log").read_text()


def test_a_session_that_loses_a_rank(mpi: Mpi, tmp_path: Path) -> None:
    """One that raises; of one that is killed, test_two_hosts.py tells."""
    command = [*mpi.command(3), *XFFL, "exec", "--federated", "2,1", SESSION, "raise"]
    code, out, err = finish(start(command, mpi.environ, tmp_path))
    assert code != 0 and {"joined 0 0", "joined 1 0", "joined 2 1"} <= set(out.splitlines())
    assert seconds_since_one_left(out) < LIMIT_S
    assert err.count("Traceback") == 1 and "xffl: rank 2 failed with ValueError: mine" in err


def test_whose_error_it_is(mpi: Mpi, tmp_path: Path) -> None:
    """The script's own connection is no lost rank, and what all ranks raise is told once, with xffl exec or without."""
    (tmp_path / "own.py").write_text(OWN_ERROR)
    code, _, err = finish(start([*mpi.command(2), *XFFL, "exec", "own.py"], mpi.environ, tmp_path))
    assert code != 0 and "xffl: rank 1 failed with ConnectionRefusedError" in err, err
    assert "create_connection(closed" in err and "rank 1 lost" not in err
    (tmp_path / "alike.py").write_text(ALIKE)
    for words in ([*XFFL, "exec", "alike.py"], [sys.executable, "alike.py"]):
        code, _, err = finish(start([*mpi.command(2), *words], mpi.environ, tmp_path))
        assert code != 0 and err.count("sum to 3, but the world has 2 ranks") == 1 and "Traceback" not in err, err
        assert err.count("alike.py:2)") == 1


def test_a_module(mpi: Mpi, tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "value.py").write_text("VALUE = 7\n")
    (tmp_path / "pkg" / "train.py").write_text("import sys\nfrom .value import VALUE\nprint(VALUE, sys.argv[1:])\n")
    command = [*mpi.command(2), *XFFL, "exec", "-m", "pkg.train", "--lr", "1"]
    code, out, err = finish(start(command, mpi.environ, tmp_path))
    assert code == 0 and sorted(out.splitlines()) == ["7 ['--lr', '1']"] * 2, err


FAILING = """
import sys, time
from mpi4py import MPI
import xffl
from xffl.errors import ConfigError

place = MPI.COMM_WORLD
place.Barrier()
if place.rank == 1:
    if sys.argv[1] == "refuse": raise ConfigError("mine")
    sys.exit(7)
time.sleep(60)
"""


def test_the_exit_code_of_an_error_is_that_of_the_job(mpi: Mpi, tmp_path: Path) -> None:
    """The end of MPI waits for ranks that still work; the limit on that is no end of its own kind."""
    (tmp_path / "train.py").write_text(FAILING)
    code, _, err = finish(start([*mpi.command(2), *XFFL, "exec", "train.py", "exit"], mpi.environ, tmp_path))
    assert code == 7, err


def test_ranks_that_fail_alike_end_mpi_together(mpi: Mpi, tmp_path: Path) -> None:
    text = FAILING.replace("place.rank == 1", "True").replace("time.sleep(60)", "")
    (tmp_path / "train.py").write_text("import atexit\natexit.register(print, 'handlers run', flush=True)\n" + text)
    code, out, err = finish(start([*mpi.command(2), *XFFL, "exec", "train.py", "refuse"], mpi.environ, tmp_path))
    assert code == 2 and out.count("handlers run") == 2 and "ConfigError: mine" in err
