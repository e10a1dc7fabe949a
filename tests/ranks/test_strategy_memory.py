"""What a rank holds: of a model cut over four ranks a fraction, and never all of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
MEGABYTES, WIDTH = 250, 512
"""docs/benchmarks/strategies.rst has more; with still less, what a process holds besides the model decides."""


@pytest.mark.long  # half a minute; CI counts what ranks hold in tests/ranks/test_memory_model.py
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux tells the peak of the resident memory")
def test_memory_of_fsdp_is_a_fraction_of_one_device(tmp_path: Path) -> None:
    def measure(processes: int) -> dict[str, Any]:
        out = tmp_path / f"{processes}.json"
        command = [sys.executable, "-m", "xffl", "exec", "--processes", str(processes), "benchmarks/strategies.py"]
        command += ["memory", "--megabytes", str(MEGABYTES), "--width", str(WIDTH), "--out", str(out)]
        subprocess.run(command, check=True, cwd=ROOT, timeout=240, stdout=subprocess.DEVNULL)
        found: dict[str, Any] = json.loads(out.read_text())
        return found

    fsdp = measure(4)
    assert fsdp["strategy"] == "fsdp"
    assert fsdp["parameter_bytes"] == pytest.approx(MEGABYTES * 1e6, rel=0.05)
    # One device holds weights, gradients and Adam's two moments.
    assert fsdp["peak_bytes"] < 0.4 * 4 * fsdp["parameter_bytes"]
    assert fsdp["made_bytes"] < 0.45 * fsdp["parameter_bytes"]
