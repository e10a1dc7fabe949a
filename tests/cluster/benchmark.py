"""Runs of the benchmarks that make network namespaces."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ["BENCHMARKS", "Benchmark", "measure"]

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
DEADLINE_S = 240


class Benchmark:
    """A run, which is told to take its namespaces down, and waited for, whatever ends the test."""

    def __init__(self, script: str, environ: dict[str, str], *options: str) -> None:
        # What a shell has put into the background ignores interrupts, and what it starts does, too, unless told.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            self.process = subprocess.Popen(
                [sys.executable, str(BENCHMARKS / script), *options],
                env=environ,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        finally:
            signal.signal(signal.SIGINT, before)

    def __enter__(self) -> Benchmark:
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.terminate()
        self.process.communicate(timeout=DEADLINE_S)

    def output(self) -> str:
        output, _ = self.process.communicate(timeout=DEADLINE_S)
        return output


def measure(script: str, environ: dict[str, str], out: Path, *options: str) -> Any:
    """Run a benchmark to its end and give what it has written."""
    with Benchmark(script, environ, *options, "--out", str(out)) as benchmark:
        output = benchmark.output()
        assert benchmark.process.returncode == 0, output
    return json.loads(out.read_text())
