"""A deadline for every test, by its tier, and an environment without a launcher's variables."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.night import mark_tests_of_the_night
from xffl.cluster.recognition.launchers import launcher_variables

HERE = Path(__file__).parent
NVIDIA = Path("/dev/nvidiactl")
DEADLINES_S = {"unit": 180, "ranks": 300, "cluster": 600}
LONG_FILES = (
    *("federate", "isolated", "federate_zero", "federate_trl", "lightning", "own_loops", "nanogpt"),
    *("nccl", "elastic_trainer", "elastic", "preemption", "fault_tolerance", "examples", "link_backend", "algorithms"),
    *("exports", "exec", "strategies", "session", "callbacks", "resume", "checkpoint", "example", "round_forms"),
    *("deepspeed", "noniid", "round", "exec_config", "memory_model", "hf_models", "oracle"),
)
"""Files of tests of ranks which take half a minute and more, the longest first, as they are to be started."""
LAUNCHER_PREFIXES = ("SLURM_", "OMPI_", "PMI_", "PMIX_", "PALS_", "MV2_", "TORCHELASTIC_", "XFFL_", "PBS_", "LSB_")
LAUNCHER_NAMES = launcher_variables()
KEPT = ("XFFL_SHARED", "XFFL_REQUIRE_CLUSTER")


def pytest_configure(config: pytest.Config) -> None:
    if not config.pluginmanager.hasplugin("timeout"):
        raise pytest.UsageError("pytest-timeout is missing: a test of ranks that hang would never end; install it")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # In the background of a shell: what tests start would ignore Ctrl-C, too.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if config.option.markexpr != "alone" and hasattr(os, "SCHED_BATCH"):
        # There are more ranks than cores. Who wakes another one up goes on first, then: else a rank that sends is put
        # aside while it holds a lock that gloo's own thread spins for, a fifth of all processor time.
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    if config.option.markexpr != "gpu" and NVIDIA.exists():
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # several ranks and one GPU do not go together
    for name in list(os.environ):
        if name in LAUNCHER_NAMES or (name.startswith(LAUNCHER_PREFIXES) and name not in KEPT):
            del os.environ[name]


@pytest.fixture(autouse=True)
def _keep_environment() -> Iterator[None]:
    """Take back what the command line has set in this process: a later test would be a cell of a run."""
    environ, before = os.environ, dict(os.environ)
    yield
    os.environ = environ  # noqa: B003 - a library may have replaced it (xffl/compat/datasets.py)
    environ.clear()
    environ.update(before)


def pytest_collection_finish() -> None:
    gc.freeze()  # what is imported by now stays; to look through it again and again took most of a worker's time


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()  # what the tests of a file have imported; each session's end looks through all the rest


@pytest.hookimpl(tryfirst=True)  # before -m looks at the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mark_tests_of_the_night(items, are_all=not any("::" in word for word in config.args))
    if "long" not in config.option.markexpr:
        # CI runs some rows of a table, `make nightly` all of them.
        left_out = [item for item in items if item.get_closest_marker("long") is not None]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item.get_closest_marker("long") is None]
    # Long files first: of three workers one would else begin with such a file when the others are nearly done.
    places = {HERE / "ranks" / f"test_{name}.py": place for place, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: places.get(item.path, len(places)))
    for item in items:
        if item.get_closest_marker("timeout") is None:
            tier = item.path.relative_to(HERE).parts[0] if HERE in item.path.parents else ""
            item.add_marker(pytest.mark.timeout(DEADLINES_S.get(tier, 60)))
