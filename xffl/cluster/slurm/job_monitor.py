"""A job that was submitted: its way through the queue, its output as it grows, and how it ended."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from xffl.checks import decimal, is_decimal
from xffl.cluster.launch.failure import ExitCode, code_of_signal
from xffl.cluster.launch.logs import LineBuffer
from xffl.cluster.slurm.submit import Job, run_slurm
from xffl.errors import ConfigError, LaunchError

__all__ = ["Ending", "Follower", "exit_code_of", "expand_pattern", "find_endings", "log_pattern", "read_queue"]

_ENDED = {
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"),
    *("REVOKED", "TIMEOUT"),
}
_CODES = {"TIMEOUT": ExitCode.TIMEOUT, "DEADLINE": ExitCode.TIMEOUT, "CANCELLED": ExitCode.INTERRUPTED}
"""Exit codes where the job's own says nothing."""
_PIECE_BYTES = 2**24  # what is read of a log at a time
_PATIENCE_S = 30.0  # how long the accounting may take to know that a job has ended


@dataclass(frozen=True)
class Ending:
    """How a job, or a task of an array, ended."""

    state: str
    exit_code: int  # its own exit code, or 128 + n after signal n; 0 only where it completed


def log_pattern(folder: str, is_array: bool) -> str:
    """Return the name of a job's output in a folder, as SLURM takes it."""
    if "\\" in folder:
        raise ConfigError(
            f"SLURM drops backslashes from names of files, and the output would go to {folder!r}; give slurm.output"
        )
    return f"{folder.replace('%', '%%')}/{'%A_%a' if is_array else '%j'}.log"


def expand_pattern(pattern: str, names: Mapping[str, str]) -> str | None:
    """Return the file that SLURM makes of a pattern; ``None`` where only the job's nodes know it."""
    if "\\" in pattern:
        return None
    known = {"%": "%", **names}
    if any(match[2] not in known for match in re.finditer(r"%([0-9]*)(.?)", pattern)):
        return None
    return re.sub(
        r"%([0-9]*)(.)",
        lambda match: known[match[2]].zfill(min(decimal(match[1]) or 0, 10)) if match[2] != "%" else "%",
        pattern,
    )


def read_queue(job: str) -> dict[str, tuple[str, str]] | None:
    """Return state and reason of a job or of its tasks (``12_0``); ``None`` where the controller does not answer."""
    ran = run_slurm(["squeue", "--noheader", "--array", "--states=all", f"--jobs={job}", "--format=%i|%T|%r"])
    if ran.returncode != 0:
        return {} if "invalid job id" in ran.stderr.lower() else None
    rows = (line.strip().split("|", 2) for line in ran.stdout.splitlines() if line.count("|") >= 2)
    return {number: (state, reason) for number, state, reason in rows}


def find_endings(job: str, *, patience_s: float = _PATIENCE_S, look_s: float = 1.0) -> dict[str, Ending]:
    """Ask the accounting, else the controller, how a job or its tasks ended; empty where nobody knows."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            ran = run_slurm(["sacct", "--noheader", "-X", "-P", "-j", job, "--format=JobID,State,ExitCode"])
        except LaunchError:
            break  # there is no such command, or nobody answers it
        if ran.returncode != 0:
            break  # there is no accounting
        rows = [line.split("|") for line in ran.stdout.splitlines() if line.count("|") == 2]
        endings = {number: _ending(state, code) for number, state, code in rows}
        if endings and all(ending.state in _ENDED for ending in endings.values()):
            return endings
        if time.monotonic() >= deadline:
            break
        time.sleep(look_s)
    shown = run_slurm(["scontrol", "--oneliner", "show", "job", job]).stdout
    return dict(one for line in shown.splitlines() if (one := _shown_ending(line)) is not None)


def _shown_ending(line: str) -> tuple[str, Ending] | None:
    """Return a job's number and its ending from a line of scontrol; ``None`` where it has not ended."""
    # The job's name comes early and may hold anything, also what looks like a field.
    plain = re.sub(r" JobName=.* UserId=(?=\S+ GroupId=)", " UserId=", line, count=1)
    fields: dict[str, str] = {}
    for name, value in re.findall(r"(?:^|\s)(\w+)=(\S*)", plain):
        fields.setdefault(name, value)
    if fields.get("JobState") not in _ENDED:
        return None
    number = f"{fields['ArrayJobId']}_{fields['ArrayTaskId']}" if "ArrayTaskId" in fields else fields["JobId"]
    return number, _ending(fields["JobState"], fields.get("ExitCode", "0:0"))


def _ending(state: str, text: str) -> Ending:
    """Return an ending from a state such as ``CANCELLED by 0``, and a code such as ``2:0``."""
    state = (state.split() or ["UNKNOWN"])[0].rstrip("+")
    code, _, signal = text.partition(":")
    number = decimal(code) or 0
    if signal_number := decimal(signal):
        number = code_of_signal(signal_number)
    return Ending(state, ExitCode.OK if state == "COMPLETED" else _CODES.get(state, number or ExitCode.FAILED))


def exit_code_of(endings: Mapping[str, Ending]) -> int:
    """Return the exit code of the first task that did not complete; 0 where all completed."""
    return next((ending.exit_code for _, ending in sorted(endings.items()) if ending.exit_code), 0)


@dataclass
class Follower:
    """Follows jobs until all have ended."""

    jobs: Mapping[str, Job]  # by their numbers
    user: str
    write: Callable[[str], None]
    tell: Callable[[str], None]
    longest_s: float = 10.0  # longest time between two questions to the queue; they begin with a tenth of it
    look_s: float = 0.5  # time between two looks at the output
    _read: dict[str, int] = field(default_factory=dict)
    _buffers: defaultdict[str, LineBuffer] = field(default_factory=lambda: defaultdict(LineBuffer))
    _known: dict[str, tuple[str, str]] = field(default_factory=dict)

    def follow(self) -> dict[str, Ending]:
        """Show the output as it grows and each change of state; return how jobs or their tasks ended, if known."""
        wait_s, is_silent = self.longest_s / 10, False
        endings: dict[str, dict[str, Ending]] = {}
        while True:
            queue = read_queue(",".join(number for number in self.jobs if number not in endings))
            if queue is None and not is_silent:
                who = "jobs go on, and are" if len(self.jobs) > 1 else f"job {next(iter(self.jobs))} goes on, and is"
                self.tell(f"the controller does not answer; {who} asked for again")
            is_silent = queue is None
            if queue is not None:
                changed = {task: seen for task, seen in queue.items() if self._known.get(task) != seen}
                for task, (state, reason) in sorted(changed.items()):
                    self.tell(f"job {self.name(task)} is {state}" + ("" if reason in ("None", "") else f" ({reason})"))
                self._known.update(changed)
                wait_s = self.longest_s / 10 if changed else wait_s
                left = {_number(task) for task, (state, _) in queue.items() if state not in _ENDED}
                for number in sorted(self.jobs.keys() - left - endings.keys()):
                    # At once, since a controller without accounting forgets a job before others of a run have ended.
                    self._show_rest(number)
                    endings[number] = find_endings(number, look_s=2 * self.look_s)
                if len(endings) == len(self.jobs):
                    return {task: ending for of_job in endings.values() for task, ending in of_job.items()}
            until = time.monotonic() + wait_s
            while True:
                self._show()
                if time.monotonic() >= until:
                    break
                time.sleep(self.look_s)
            wait_s = min(self.longest_s, wait_s * 1.5)

    def name(self, task: str) -> str:
        """Return the number of a job or a task, with its cell."""
        job = self.jobs[_number(task)]
        return task if job.cell is None else f"{task} (cell {job.cell})"

    def logs(self) -> dict[str, str]:
        """Return the files of output by job or task; without those whose names only the nodes know."""
        by_task = {}
        for name in {**dict.fromkeys(self.jobs.keys() - set(map(_number, self._known))), **self._known}:
            number, _, task = name.partition("_")
            if is_decimal(task) or not task:
                # The first letters: of an array, %j is the task's own number, which only SLURM knows.
                names = {"A": number, "a": task, "x": self.jobs[number].name, "u": self.user}
                file = expand_pattern(self.jobs[number].log, names | ({} if task else {"j": number}))
                if file is not None:
                    by_task[name] = file
        return by_task

    def _show(self, ended: str | None = None) -> bool:
        """Show what has come since, and tell whether that was something; of an ended job also what ends no line."""
        is_new = False
        for task, file in self.logs().items():
            try:
                with open(file, "rb") as log:
                    log.seek(self._read.get(file, 0))
                    piece = log.read(_PIECE_BYTES)
            except OSError:
                continue  # not there yet
            self._read[file] = self._read.get(file, 0) + len(piece)
            is_new = is_new or bool(piece)
            cell = self.jobs[_number(task)].cell
            prefix = f"[{task}] " if "_" in task else "" if cell is None or len(self.jobs) == 1 else f"[cell {cell}] "
            is_last = _number(task) == ended
            lines = [*self._buffers[file].feed(piece), *([self._buffers[file].flush()] if is_last else [])]
            if shown := b"".join(lines).decode(errors="replace"):
                self.write("".join(prefix + line for line in shown.splitlines(keepends=True)) if prefix else shown)
        return is_new

    def _show_rest(self, ended: str) -> None:
        """Show what comes after the end: a shared file system may be late."""
        deadline = time.monotonic() + 10 * self.look_s
        time.sleep(self.look_s)
        while self._show() and time.monotonic() < deadline:
            time.sleep(self.look_s)
        self._show(ended)


def _number(task: str) -> str:
    """Return the number of the job that a task is one of."""
    return task.partition("_")[0]
