"""Draw elastic federations with faults, and compare their models with the steps that the journal's rounds took in.

    python -m tests.chaos.oracle [--runs 200] [--seed 0] [--only NUMBER ...] [--jobs 2] [--keep FOLDER] [--out FILE]

A run is two to four cells of one or two ranks, all started by one command, or a command for each, with a lighthouse and
a journal. It follows from its number which options the rounds have, which processes are killed when, which cells come
late or leave, and whether a start leaves out its newest checkpoint (``oracle_draws.py``). At its end all cells leave in
order.

The model has a slot for each local step of each cell (``oracle_cell.py``). The journal tells which rounds led to the
model at the end, and what each cell weighed in each of them. So for each round:

unequal    cells of one round have agreed on different models, to the bit. What a cell has agreed on is its model
           without the steps of which it was told that they still wait, so this also finds a step of which it was told
           the wrong thing
shares     a slot that moved has not got the share of its cell in the round, or has moved in a round before
weights    a cell's weight is not the number of its slots that moved, or of the steps that it was told have counted
residuals  with a codec: a slot has moved by something else than the share of its cell and what the codecs of the
           round's cells have left out before and after; or a cell has not what its last round, or its checkpoint, has
total      the sum of all weights so far that a cell is told is not that of the rounds
told       the slots that moved are not the steps of which the cell was told so
lost       steps that are not in the last model, though their cell has left in order, and was not told that they are
           gone with a model that was replaced
last       a cell that left in the last round has another model than that of the journal's newest round
failed     a cell has ended by itself with an error, or a round did not come in time
left       processes that were there after the end

Where a server or a client moves more than the steps do, the slots are not compared, all else is. A cell that is killed
takes along what its codecs have left out, unless it goes on from a checkpoint that has it, and no round has it since.
Printed as JSON: a line for each run, and one with the sums; ``dropped`` are the steps that went with a model that was
replaced, ``exact`` the rounds whose residuals could be compared. The exit code is 1 if something was found that must
not be.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.chaos.jobs import LIGHTHOUSE, Jobs
from tests.chaos.ledger import kill, read, tree
from tests.chaos.oracle_draws import PARTS, SLOTS, Draw, draw
from tests.chaos.storm import HERE, Job, System, environment, watch
from xffl.cluster.launch.local import held_port
from xffl.journal.folder import JournalFolder
from xffl.journal.records import RoundRecord

__all__ = ["FINDINGS", "audit", "run_draw"]

FINDINGS = ("unequal", "shares", "residuals", "weights", "total", "told", "lost", "last", "failed", "left")
"""What must not be."""
ENDED = re.compile(r"cell ([0-9]+) ended with exit code ([0-9]+)")
KILLED = "137"
RESTART_S = 0.5
LONGEST_S = 240.0
"""For a federation to make its first round, to make one after the last fault, and to end."""
MOVED = 1e-4
"""By how much a slot differs that has moved: means of equal values round."""

Slots = npt.NDArray[np.float32]
Told = dict[str, Any]


class Pauses:
    """Processes that are stopped for a while, as if their host did not answer."""

    def __init__(self) -> None:
        self._until: dict[int, float] = {}

    def begin(self, pids: list[int], seconds: float) -> None:
        """Stop processes."""
        for pid in pids:
            send(pid, signal.SIGSTOP)
            self._until[pid] = time.time() + seconds

    def end(self, *, everything: bool = False) -> None:
        """Let those go on whose time is over, or all."""
        for pid, until in list(self._until.items()):
            if everything or time.time() > until:
                send(pid, signal.SIGCONT)
                del self._until[pid]


def send(pid: int, number: int) -> None:
    """Send a signal to a process, which may have ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def ranks_of(system: System, cell: int) -> list[int]:
    """Return the processes of a cell's ranks that are at work."""
    return [pid for (owner, _), (pid, _) in system.living().items() if owner == cell]


class Federation(Jobs):
    """The jobs of a draw: some start late, what is killed starts again, and what has left in order does not."""

    def __init__(self, drawn: Draw, folder: Path, address: str) -> None:
        self.drawn = drawn
        self.begun = time.time()
        self._due: dict[int, float] = {int(cell): self.begun + late for cell, late in (drawn.late or {}).items()}
        self._is_started: set[int] = set()
        self._left: set[int] = set()
        self.failed: list[tuple[int, int]] = []
        self._pauses = Pauses()
        super().__init__(
            Job(cells=drawn.cells, sizes=drawn.sizes, every=drawn.every, step_s=drawn.step_s),
            folder,
            address=address,
            script="oracle_cell.py",
            wrap=self._with_fault,
            environ={"XFFL_JOURNAL": str(folder / "journal")} if drawn.is_shared else {},
        )

    def __post_init__(self) -> None:
        self.processes = {}
        self.poll()

    def _with_fault(self, place: int, command: list[str]) -> list[str]:
        """Return the command of a job, whose first start may have a fault."""
        is_first = place not in self._is_started
        self._is_started.add(place)
        return ["env", f"XFFL_FAULT={self.drawn.phase}", *command] if is_first and self.drawn.phase else command

    def poll(self) -> None:
        self._pauses.end()
        now = time.time()
        for place in {LIGHTHOUSE, *range(self.job.cells)} - self._left:
            process = self.processes.get(place)
            code = None if process is None else process.poll()
            if code is not None:
                del self.processes[place]  # somebody else may get its number
                self._due[place] = now + RESTART_S
            if code == 0 and place != LIGHTHOUSE:
                self._left.add(place)
            elif place not in self.processes and now >= self._due.get(place, 0.0):
                self._start(place)
            if code is not None and code > 0 and place != LIGHTHOUSE:  # whose journal's port may be somebody else's
                self.failed.append((place, code))

    def has_ended(self) -> bool:
        """Tell whether all cells have left in order."""
        return len(self._left) == self.job.cells

    def end(self, kind: str, cell: int) -> None:
        """Kill one kind of process, or several at once; or stop a cell for a while."""
        if kind == "pause":
            self._pauses.begin(ranks_of(self, cell), self.drawn.pause_s)
        elif cell in self.processes or kind in ("lighthouse", "all"):
            kill(kind, cell, self)

    def stop(self) -> None:
        self._pauses.end(everything=True)
        super().stop()


class OneCommand(System):
    """All cells of a draw and their lighthouse, started by one command; so all of them start at once."""

    def __init__(self, drawn: Draw, folder: Path) -> None:
        super().__init__(Job(cells=drawn.cells, sizes=drawn.sizes), folder)
        self.failed: list[tuple[int, int]] = []
        self._drawn = drawn
        self._pauses = Pauses()
        self._launcher = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "xffl", "exec", "--elastic", "--federated", ",".join(map(str, self.job.sizes))]
        command += ["--restarts", "1000", "--grace", "1", str(HERE / "oracle_cell.py"), str(self.folder)]
        variables = {"XFFL_JOURNAL": str(self.folder / "journal"), "XFFL_FAULT": self._drawn.phase}
        with (self.folder / "output.log").open("ab") as output:
            return subprocess.Popen(
                command, env=environment() | variables, stdout=output, stderr=output, start_new_session=True
            )

    def poll(self) -> None:
        self._pauses.end()
        if self._launcher.poll() not in (None, 0):
            self._launcher = self._start()

    def has_ended(self) -> bool:
        """Tell whether all cells have left in order."""
        return self._launcher.poll() == 0

    def end(self, kind: str, cell: int) -> None:
        """Kill one kind of process, or several at once, or stop a cell; the launcher is that of all cells."""
        family = tree(self._launcher.pid)
        ranks = ranks_of(self, cell)
        if kind == "pause":
            self._pauses.begin(ranks, self._drawn.pause_s)
            return
        victims = {
            "rank": ranks[-1:],
            "cell": ranks,
            "lighthouse": [pid for pid in family if b"lighthouse" in command_of(pid)],
            "launcher": [self._launcher.pid],
            "all": family,
        }
        for pid in victims[kind]:
            send(pid, signal.SIGKILL)

    def stop(self) -> None:
        self._pauses.end(everything=True)
        self._launcher.send_signal(signal.SIGTERM)
        try:
            self._launcher.wait(timeout=30)
        finally:
            for pid in tree(self._launcher.pid):
                send(pid, signal.SIGKILL)


def command_of(pid: int) -> bytes:
    """Return the command line of a process; empty where it has ended."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def run_draw(drawn: Draw, folder: Path) -> Told:
    """Run a federation until all cells have left, kill what is drawn, and audit what is left."""
    (folder / "models").mkdir(parents=True)
    (folder / "draw.json").write_text(json.dumps(asdict(drawn)))
    begun = time.time()
    with held_port() as port:
        address = f"127.0.0.1:{port}"
        federation = OneCommand(drawn, folder) if drawn.is_one_command else Federation(drawn, folder, address)
        try:
            ends = _strike(drawn, federation)
        finally:
            federation.stop()
    result = audit(drawn, folder)
    log = (folder / "output.log").read_text()
    failed = [f"cell {cell}: exit code {code}" for cell, code in ENDED.findall(log) if code != KILLED]
    result["failed"] = [*federation.failed, *failed, *ends]
    result["left"] = federation.left()
    result["seconds"] = round(time.time() - begun, 1)
    return result


def _strike(drawn: Draw, federation: Federation | OneCommand) -> list[str]:
    """Let a federation train and end, and kill what is drawn; return what did not come about in time."""
    folder = federation.folder
    if not _await_round(federation, 0.0):
        return ["no first round of all cells"]
    for pause, kind, cell in drawn.faults:
        watch([federation], time.time() + pause)
        federation.end(kind, cell)
    watch([federation], time.time() + 0.5)
    if not _await_round(federation, time.time()):
        return ["no round of all cells after the faults"]
    watch([federation], time.time() + random.Random(drawn.number).uniform(0.0, 1.0))
    (folder / "finish").touch()
    deadline = time.time() + LONGEST_S
    while not federation.has_ended():
        if time.time() > deadline:
            return ["the cells have not ended"]
        watch([federation], time.time() + 0.1)
    return []


def _await_round(federation: Federation | OneCommand, since: float) -> bool:
    """Wait for a round after a time to which all cells contribute that have not left, and tell whether it came.

    They all have to tell of it: ranks whose launcher was killed may still have a part in rounds.
    """
    deadline = time.time() + LONGEST_S
    while time.time() < deadline:
        watch([federation], time.time() + 0.1)
        lines = read(federation.folder, federation.job.cells)
        staying = [cell for cell, told in enumerate(lines) if not any(line["what"] == "end" for line in told)]
        given = [
            {
                line["lineage"]
                for line in lines[cell]
                if line["time"] > since and "weights" in line and line["weights"][cell]
            }
            for cell in staying
        ]
        if not given or set.intersection(*given):
            return True
    return False


# What is left of a run ------------------------------------------------------------------------------------------------


@dataclass
class Change:
    """What one or more rounds of a fragment have moved, between two models that are known."""

    rounds: list[RoundRecord]
    before: Slots
    after: Slots


def audit(drawn: Draw, folder: Path) -> Told:
    """Compare what cells have told with the journal and the models."""
    lines = read(folder, drawn.cells)
    chain = surviving(folder)
    told = {
        cell: {line["lineage"]: line for line in lines[cell] if line["what"] == "round"} for cell in range(drawn.cells)
    }
    result: Told = {name: [] for name in FINDINGS}
    models, result["unequal"] = agreed_models(folder, lines)
    result["weights"] = check_told_weights(drawn, chain, told)
    result["total"] = check_totals(drawn, chain, told)
    if drawn.shows_steps:
        for part in range(PARTS):
            handed: dict[int, list[int]] = {cell: [] for cell in range(drawn.cells)}
            for change in changes(drawn, chain, models, part):
                check_change(drawn, change, told, handed, result)
        check_lost(drawn, lines, models, chain, result)
    if drawn.shows_residuals:
        result["residuals"], result["exact"] = check_residuals(drawn, folder, lines, chain, models)
    ends = {line["lineage"] for cell in lines for line in cell if line["what"] == "end"}
    result["last"] = [record.number for record in chain[-1:] if record.lineage not in ends]
    counts = Counter(line["what"] for cell in lines for line in cell)
    dropped = {
        (cell, slot)
        for cell, told_by in enumerate(lines)
        for line in told_by
        if line["what"] == "dropped"
        for steps in line["steps"].values()
        for slot in steps
    }
    sums = {"rounds": len(chain), "steps": counts["step"], "lives": counts["start"], "dropped": len(dropped)}
    return sums | result


def surviving(folder: Path) -> list[RoundRecord]:
    """Return the rounds that led to the model at the end, the first one first."""
    journal = JournalFolder(folder / "journal")
    records: list[Any] = []
    while more := journal.read_from(len(records)):
        records += more
    chain: list[RoundRecord] = []
    at = next((record for record in reversed(records) if isinstance(record, RoundRecord)), None)
    while at is not None:
        chain.append(at)
        at = None if at.base is None else records[at.base.number]
    return chain[::-1]


def agreed_models(folder: Path, lines: list[list[Told]]) -> tuple[dict[str, Slots], list[Any]]:
    """Return what the cells have agreed on by lineage, and where that was not the same in all of them."""
    digests: dict[str, dict[tuple[str, ...], set[int]]] = {}
    for cell, told in enumerate(lines):
        for line in told:
            if line["what"] == "model" and line["lineage"]:
                digests.setdefault(line["lineage"], {}).setdefault(tuple(line["digests"]), set()).add(cell)
    unequal = [
        [lineage, {".".join(names): sorted(cells) for names, cells in by.items()}]
        for lineage, by in digests.items()
        if len(by) > 1
    ]
    models = {}
    for lineage, by in digests.items():
        path = folder / "models" / f"{lineage}.{'.'.join(next(iter(by)))}.npz"
        if path.exists():
            models[lineage] = load_model(path, len(lines))
    return models, unequal


def load_model(path: Path, cells: int) -> Slots:
    """Return a model of which only the values are saved that are not 0."""
    saved = np.load(path)
    model = np.zeros((PARTS, cells * SLOTS), dtype=np.float32)
    model[saved["rows"], saved["columns"]] = saved["values"]
    return model


def check_told_weights(drawn: Draw, chain: list[RoundRecord], told: dict[int, dict[str, Told]]) -> list[Any]:
    """Return the rounds in which a cell's weight is not the number of the steps that it was told have counted."""
    wrong = []
    for record in chain:
        for cell, weight in zip(record.cells, record.weights, strict=True):
            line = told[cell].get(record.lineage)
            if line is None or "weights" not in line:
                continue
            expected = len(line["steps"]) if drawn.is_weighed else float(bool(line["steps"]))
            if weight != expected and record.base is not None:
                wrong.append([record.round, cell, weight, len(line["steps"])])
    return wrong


def check_totals(drawn: Draw, chain: list[RoundRecord], told: dict[int, dict[str, Told]]) -> list[Any]:
    """Return the rounds after which a cell was told another sum of weights than that of all rounds so far."""
    wrong = []
    total = 0.0
    for record in chain:
        total += sum(record.weights) if record.base is not None else 0.0
        for cell in range(drawn.cells):
            found = told[cell].get(record.lineage, {}).get("total")
            if found is not None and found != total / drawn.fragments:
                wrong.append([record.round, cell, found, total / drawn.fragments])
    return wrong


def changes(drawn: Draw, chain: list[RoundRecord], models: dict[str, Slots], part: int) -> Iterator[Change]:
    """Yield what the rounds have moved of a part of the model; those whose model nobody has told go with the next."""
    before = np.zeros(drawn.cells * SLOTS, dtype=np.float32)
    rounds: list[RoundRecord] = []
    for record in chain:
        rounds.append(record)
        if record.lineage not in models:
            continue
        after = models[record.lineage][part]
        moved = [one for one in rounds if (one.round - 1) % drawn.fragments == part % drawn.fragments]
        yield Change(moved, before, after)
        before, rounds = after, []


def check_change(
    drawn: Draw, change: Change, told: dict[int, dict[str, Told]], handed: dict[int, list[int]], result: Told
) -> None:
    """Compare the slots that have moved with the shares of the cells, and with what these were told.

    ``handed`` are the steps that came with a model that its cell has handed over, in a round to which nobody gave
    anything. They are in the model as they are, and count in a later round of their cell.
    """
    moved = np.flatnonzero(np.abs(change.after - change.before) > MOVED)
    numbers = [record.round for record in change.rounds]
    again = [int(slot) for slot in moved if change.before[slot]]
    if again:
        result["shares"].append([numbers, "moved before", again[:5], len(again)])
    is_idle = any(not any(record.weights) for record in change.rounds)
    for cell in range(drawn.cells):
        slots = [int(slot) for slot in moved if slot // SLOTS == cell]
        weights = [dict(zip(record.cells, record.weights, strict=True)).get(cell, 0.0) for record in change.rounds]
        shares = [weight / sum(record.weights) for record, weight in zip(change.rounds, weights, strict=True) if weight]
        strange = []
        for slot in slots:
            if any(abs(change.after[slot] / share - 1) < drawn.allowed for share in shares):
                continue
            if is_idle and abs(change.after[slot] - 1) < drawn.allowed:
                handed[cell].append(slot)
            else:
                strange.append(slot)
        if strange:
            values = sorted({round(float(change.after[slot]), 5) for slot in strange})
            result["shares"].append([numbers, cell, values[:5], len(strange)])
        if len(change.rounds) != 1 or change.rounds[0].base is None or is_idle:
            continue
        line = told[cell].get(change.rounds[0].lineage)
        steps = [cell * SLOTS + slot for slot in (line or {}).get("steps", [])]
        before = [slot for slot in steps if slot in handed[cell]]
        if drawn.is_weighed and len(slots) + len(before) != weights[0] and (line is not None or not handed[cell]):
            result["weights"].append([*numbers, cell, weights[0], f"{len(slots)} slots"])
        if line is not None and sorted(steps) != sorted([*slots, *before]):
            result["told"].append([*numbers, cell, len(steps), f"{len(slots)} slots"])
        handed[cell] = [slot for slot in handed[cell] if slot not in before]


class Residuals:
    """What the codecs of a cell had left out, by what its lives have told, along the rounds that led to the model."""

    def __init__(self, drawn: Draw, folder: Path, told: list[Told]) -> None:
        self._drawn = drawn
        self._folder = folder
        self._told = {(line["life"], line["lineage"]): line["file"] for line in told if line["what"] == "residuals"}
        self._lives = {line["lineage"]: line["life"] for line in told if line["what"] == "round"}
        self._starts = {line["life"]: line["lineage"] for line in told if line["what"] == "start"}
        self._life = ""
        self._held: Slots | None = np.zeros((PARTS, drawn.cells * SLOTS), dtype=np.float32)
        """What it has left out by its last round; ``None`` where it has not told"""
        self._given: dict[str, list[int]] = {}
        """By lineage of a round, fragments of later rounds to which the cell has given something"""

    def follow(self, record: RoundRecord, *, gives: bool) -> tuple[Slots | None, Slots | None]:
        """Return what the cell had left out before a round that it was in, and after it; ``None`` if not told."""
        life = self._lives.get(record.lineage)
        before = self._held
        if life is not None and life != self._life:
            before = self._of_start(life)
            self._life = life
        after = None if life is None else self._load(life, record.lineage)
        self._held = after
        fragment = (record.round - 1) % self._drawn.fragments
        if gives:
            for given in self._given.values():
                given.append(fragment)
        self._given[record.lineage] = []
        return before, after

    def _of_start(self, life: str) -> Slots | None:
        """Return what a life of the cell had when it started: without what rounds have that it does not know of."""
        lineage = self._starts.get(life, "")
        held = self._load(life, lineage)
        if held is not None and lineage in self._given:
            for part in range(PARTS):
                if part % self._drawn.fragments in self._given[lineage]:
                    held[part] = 0
        return held

    def _load(self, life: str, lineage: str) -> Slots | None:
        name = self._told.get((life, lineage))
        return None if name is None else load_model(self._folder / "models" / name, self._drawn.cells)


def check_residuals(
    drawn: Draw, folder: Path, lines: list[list[Told]], chain: list[RoundRecord], models: dict[str, Slots]
) -> tuple[list[Any], int]:
    """Return where what a round has moved is not what the cells gave, and how many rounds could be compared."""
    wrong: list[Any] = []
    compared = 0
    steps = {
        (cell, line["lineage"]): line.get("steps", [])
        for cell, told in enumerate(lines)
        for line in told
        if line["what"] == "round"
    }
    cells = [Residuals(drawn, folder, told) for told in lines]
    for last, record in zip([None, *chain], chain, strict=False):
        moved = [part for part in range(PARTS) if part % drawn.fragments == (record.round - 1) % drawn.fragments]
        expected = np.zeros((PARTS, drawn.cells * SLOTS), dtype=np.float32)
        is_known = last is not None and last.lineage in models and record.lineage in models
        for cell, weight in zip(record.cells, record.weights, strict=True):
            before, after = cells[cell].follow(record, gives=weight > 0)
            if before is None or after is None:
                is_known = is_known and not weight
                continue
            expected += before - after
            unmoved = [part for part in range(PARTS) if part not in moved or not weight]
            if not np.allclose(before[unmoved], after[unmoved], atol=MOVED):
                wrong.append([record.round, cell, "not given, and changed"])
            for slot in steps.get((cell, record.lineage), []):
                expected[moved, cell * SLOTS + slot] += weight / sum(record.weights)
        if not is_known or last is None:
            continue
        compared += 1
        difference = models[record.lineage] - models[last.lineage] - expected
        strange = np.flatnonzero(np.abs(difference).max(0) > MOVED)
        if len(strange):
            values = sorted({round(float(np.abs(difference[:, slot]).max()), 5) for slot in strange})
            wrong.append([record.round, sorted({int(slot) // SLOTS for slot in strange}), values[-5:], len(strange)])
    return wrong, compared


def check_lost(
    drawn: Draw, lines: list[list[Told]], models: dict[str, Slots], chain: list[RoundRecord], result: Told
) -> None:
    """Find steps of lives that have left in order that are not in the last model, without a word to them."""
    last = next((models[record.lineage] for record in reversed(chain) if record.lineage in models), None)
    if last is None:
        return
    for cell, told in enumerate(lines):
        ended = {line["life"]: line for line in told if line["what"] == "end"}
        for life, end in ended.items():
            for fragment in range(drawn.fragments):
                dropped = {
                    slot
                    for line in told
                    if line["what"] == "dropped" and line["life"] == life
                    for slot in line["steps"].get(str(fragment), [])
                }
                steps = {line["slot"] for line in told if line["what"] == "step" and line["life"] == life}
                gone = [slot for slot in sorted(steps - dropped) if not last[fragment][cell * SLOTS + slot]]
                if gone or end["waiting"][fragment]:
                    result["lost"].append([cell, fragment, gone[:5], len(gone), len(end["waiting"][fragment])])


def run_number(number: int, keep: Path | None) -> Told:
    """Run what is drawn for a number in a folder, which stays if something was found."""
    folder = Path(tempfile.mkdtemp(prefix=f"oracle-{number}-", dir=keep))
    result = run_draw(draw(number), folder)
    found = [name for name in FINDINGS if result[name]]
    if not found:
        shutil.rmtree(folder)
    return {"run": number, "found": found} | result | ({"folder": str(folder)} if found else {})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="the number of the first run")
    parser.add_argument("--only", type=int, nargs="+")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument("--keep", type=Path, help="where the folders of runs are made that found something")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.keep is not None:
        args.keep.mkdir(parents=True, exist_ok=True)
    counts: Counter[str] = Counter()
    with ThreadPoolExecutor(args.jobs) as pool:
        numbers = args.only or range(args.seed, args.seed + args.runs)
        for run in as_completed(pool.submit(run_number, number, args.keep) for number in numbers):
            result = run.result()
            found = result["found"]
            counts.update(found)
            counts.update(
                runs=1, wrong=bool(found), **{name: result[name] for name in ("rounds", "steps", "lives", "dropped")}
            )
            line = json.dumps(result)
            print(line, flush=True)
            if args.out is not None:
                with args.out.open("a") as file:
                    file.write(line + "\n")
    print(json.dumps(counts))
    return int(bool(counts["wrong"]))


if __name__ == "__main__":
    sys.exit(main())
