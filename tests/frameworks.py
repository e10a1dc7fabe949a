"""The frameworks whose trainers train cells, in their oldest and newest versions: ``make frameworks``, by hand.

A row is an environment below ``MATRIX_DIR``, made anew where the versions, the constraints or the requirements have
changed: with PyTorch and all else as in ``constraints.txt``, but for the packages of the row. In each run the tests of
the framework. What came out replaces the row in the table of ``docs/frameworks.rst``; a row that fails makes the exit
code 1. ``make frameworks ROWS="trl-oldest trl-newest"`` runs some rows only.

A package whose version is empty is the newest one that goes together with the others.
"""

from __future__ import annotations

import datetime
import re
import subprocess
import sys
import time
from dataclasses import dataclass

from tests.matrix import MATRIX_DIR, REPO, Table, output, run, run_rows, run_tests

NEWEST = ""


@dataclass(frozen=True)
class Row:
    """The versions of an environment, and what is run in it."""

    versions: dict[str, str]
    """By package"""
    extras: str
    tests: tuple[str, ...]


TRANSFORMERS = ("tests/unit/test_federate.py", "tests/ranks/test_federate.py")
TRL = ("tests/ranks/test_federate_trl.py",)
LIGHTNING = ("tests/ranks/test_lightning.py",)
TORCHTITAN = ("tests/ranks/test_torchtitan.py",)
ROWS = {
    "transformers-oldest": Row(
        {"transformers": "5.0.*", "accelerate": "1.12.*", "peft": "0.18.*"}, "hf,lora", TRANSFORMERS
    ),
    "transformers-newest": Row(dict.fromkeys(("transformers", "accelerate", "peft"), NEWEST), "hf,lora", TRANSFORMERS),
    "trl-oldest": Row(
        {"trl": "0.29.*", "transformers": "5.0.*", "accelerate": "1.12.*", "peft": "0.18.*", "datasets": "4.7.*"},
        "trl,lora",
        TRL,
    ),
    "trl-newest": Row(
        dict.fromkeys(("trl", "transformers", "accelerate", "peft", "datasets"), NEWEST), "trl,lora", TRL
    ),
    # Its tests share parts with those of Trainer.
    "lightning-oldest": Row({"lightning": "2.6.0"}, "lightning,hf,lora", LIGHTNING),
    "lightning-newest": Row({"lightning": NEWEST}, "lightning,hf,lora", LIGHTNING),
    # What came before 0.3 has other names in the script of the page. 0.3 imports Triton, which PyTorch for CPUs leaves
    # out, and goes together with no newer datasets.
    "torchtitan-newest": Row({"torchtitan": NEWEST, "triton": NEWEST, "datasets": "4.7.*"}, "safetensors", TORCHTITAN),
}
SCRIPT = (
    "import sys; from importlib.metadata import version; print(', '.join(f'{p} {version(p)}' for p in sys.argv[1:]))"
)
TOOLS = ("pytest", "pytest-timeout", "pytest-xdist", "expecttest", "hypothesis")
TABLE = Table(
    page=REPO / "docs/frameworks.rst",
    command="frameworks",
    head=("Environment", "Versions", "Date", "Tests"),
    rows=ROWS,
)


def make_environment(name: str, row: Row) -> list[str]:
    """Make a row's environment, or take the one that is there; how its Python is called."""
    folder, stamp = MATRIX_DIR / name, MATRIX_DIR / f"{name}.complete"
    constraints = MATRIX_DIR / f"{name}.txt"
    varied = "|".join(map(re.escape, row.versions))
    pins = re.sub(rf"^({varied})==.*\n", "", (REPO / "constraints.txt").read_text(), flags=re.MULTILINE)
    pins += "".join(f"{package}=={version}\n" for package, version in row.versions.items() if version)
    python = [f"{folder}/bin/python"]
    # The newest versions of a day are not those of the next one.
    day = datetime.date.today().isoformat() if NEWEST in row.versions.values() else ""
    made_of = f"{REPO}\n{day}\n{row}\n{pins}\n{(REPO / 'setup.cfg').read_text()}"
    if not stamp.exists() or stamp.read_text() != made_of:
        constraints.write_text(pins)
        packages = ("-e", f".[{row.extras}]", *row.versions, *TOOLS)
        install = [*python, "-m", "pip", "install", "--quiet", "--upgrade", *packages]
        # The variable takes the place of what a site's configuration of pip may say.
        if run([sys.executable, "-m", "venv", "--clear", str(folder)]) or run(install, PIP_CONSTRAINT=str(constraints)):
            raise SystemExit(f"{name}: the environment could not be made")
        stamp.write_text(made_of)
    return python


def try_row(name: str) -> bool:
    """Run a row and put it into the table; whether all passed."""
    print(f"\n== {name}", flush=True)
    row = ROWS[name]
    began = time.monotonic()
    try:
        python = make_environment(name, row)
        versions = output([*python, "-c", SCRIPT, *row.versions, "torch"]).strip()
        passed, counts = run_tests(python, name, "-m", "long or not long", *row.tests)
    except (SystemExit, OSError, subprocess.SubprocessError) as error:
        print(error, flush=True)
        passed, versions, counts = False, "-", "not run"
    print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
    TABLE.replace_row([name, versions, datetime.date.today().isoformat(), counts])
    return passed


if __name__ == "__main__":
    sys.exit(run_rows(__doc__, ROWS, try_row))
