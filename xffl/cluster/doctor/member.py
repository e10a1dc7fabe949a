"""What the doctor does on each host: it checks the host, then, over rank 0's store, how the hosts reach each other."""

from __future__ import annotations

import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from xffl.checks import shorten
from xffl.cluster.doctor import probe
from xffl.cluster.doctor.compare import Survey
from xffl.cluster.doctor.messages import ERROR, OK, WARNING, Answer, Finding, Member, Plan, Report, RunView
from xffl.cluster.doctor.probe import Request
from xffl.cluster.lighthouse.page import visit_run
from xffl.cluster.listening import Opened, open_listener
from xffl.cluster.network import LOOPBACK, list_interfaces
from xffl.cluster.reaching import connection_error
from xffl.cluster.slurm.allocation import Host
from xffl.compat.libc import die_with_parent
from xffl.errors import ConfigError, LaunchError

if TYPE_CHECKING:
    from xffl.cluster.doctor.exchange import HostStore

__all__ = ["PATIENCE_S", "Part", "follow", "lead", "take_part"]

PATIENCE_S = 900
"""How long a program waits for rank 0, and how long it is waited for."""
_IMPORT_S = 45.0  # for importing torch, beside --timeout; a cold file system needs a minute
_SLACK_S = 30.0
_CONNECT_S = 5.0
_PAUSE_S = 0.1
_HAS_TOLD = 100  # added to the exit code of a child that has done its part: libraries end with 0 or 1, too
_BROKEN = 70  # the exit code of a child that cannot even tell


@dataclass(frozen=True, kw_only=True)
class Part:
    """What a program stands for: one rank, or over ssh all ranks of its host."""

    number: int = 0  # among the programs of the job; the first serves the store
    count: int = 1
    ranks: tuple[int, ...] = (0,)
    world_size: int = 1
    local_size: int | None = 1  # ranks of this host
    node: int = 0
    is_head: bool = True  # whether it is the one that checks its host
    machines: int = 1
    address: str = LOOPBACK  # of the host of the store; loopback if all ranks are on this one
    port: int = 0
    launcher: str = "none"
    host: Host | None = None  # as a list describes this one


def take_part(request: Request, part: Part, known: list[Finding], tell: Callable[[Report], object]) -> int:
    """Check this host, and meet the others, as one program of the job; return the exit code.

    Rank 0 gives the report of all hosts to ``tell``, a host that has not met it its own. torch is loaded in a child,
    since it may abort or hang: what is known by then is told all the same.
    """
    return _Host(request, part, known, tell).run()


class _Host:
    """A program's own host, or a further rank of it."""

    def __init__(self, request: Request, part: Part, known: list[Finding], tell: Callable[[Report], object]) -> None:
        self._begun = time.monotonic()
        self._request = request
        self._part = part
        self._known = known
        self._tell = tell
        self._opened: Opened | None = None  # where rank 0 listens for the others
        self._gpus = 0
        self._listeners: list[socket.socket] = []  # where others try whether they reach this host
        self._me = probe.rank_facts(os.environ, part.ranks, part.node, part.local_size)
        if part.host is not None:
            self._me["host"] = part.host

    def run(self) -> int:
        """Check this host; then meet the other programs, if there are any."""
        trouble = self._reach_rank_0() if self._part.count > 1 and self._request.with_torch else None
        if self._part.is_head:
            try:
                self._me["report"], self._gpus, self._listeners = probe.examine_host(
                    self._request, os.environ, self._part.machines, self._part.world_size
                )
            except Exception as error:  # noqa: BLE001  # whatever is wrong with a host is reported
                name = self._me["host"].name
                finding = replace(_failed(f"{type(error).__name__}: {error}"), host=name)
                self._tell(Report((*self._known, finding), (name,)))
                return 1
        if not self._request.with_torch:
            if self._part.count > 1:
                text = "left out with --skip-torch: each host is checked alone"
                self._known.append(Finding("meeting", WARNING, text, "the hosts meet over torch's store"))
            return self._tell_alone()
        reader, writer = os.pipe()
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            code = _BROKEN
            try:
                die_with_parent(signal.SIGKILL)  # it would hold the port and the output until its waits end
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what torch says of its own is no finding
                ended = self._use_torch(trouble, writer)
                sys.stdout.flush()
                code = _HAS_TOLD + ended
            finally:
                os._exit(code)  # a thread of torch may still wait for a host that never came
        os.close(writer)
        if self._opened is not None:
            self._opened.socket.close()  # nobody is to connect once the child has ended
        why, is_loaded = _outlive(child, reader, _IMPORT_S + self._request.timeout_s)
        if isinstance(why, int):
            return why
        self._known.append(_failed(why) if is_loaded else probe.check_torch({"error": why}, 0, {}))
        return self._tell_alone()

    def _use_torch(self, trouble: str | None, writer: int) -> int:
        imported = time.monotonic()
        try:
            from xffl.cluster.doctor import exchange

            facts = exchange.describe_torch()
        except Exception as error:  # noqa: BLE001  # whatever is wrong with torch
            self._known.append(probe.check_torch({"error": f"{type(error).__name__}: {error}"}, 0, {}))
            return self._tell_alone()
        os.write(writer, b"x")
        patience_s = self._request.timeout_s + time.monotonic() - self._begun  # the others may take as long until here
        try:
            self._take_torch({**facts, "import_s": time.monotonic() - imported})
            if self._part.number == 0:
                return self._lead(patience_s)
            if trouble is not None:
                raise ConnectionError(trouble)
            store = exchange.HostStore(self._part.address, self._part.port, patience_s)
            follow(store, self._request, self._part.number, self._me)
        except Exception as error:  # noqa: BLE001  # whatever is wrong with a host is reported
            if self._part.number > 0 and isinstance(error, OSError | ConfigError):
                where, why = f"{self._part.address}:{self._part.port}", _explain(error)
                text = f"rank {self._part.ranks[0]} cannot reach rank 0 at {where} ({why})"
                advice = (
                    "see the line on interface; check the address (XFFL_CONTROL_IFNAME, MASTER_ADDR), and open the "
                )
                advice += "port between the compute nodes"
                self._known.append(Finding("meeting", ERROR, text, advice))
            else:
                self._known.append(_failed(f"{type(error).__name__}: {error}"))
            return self._tell_alone()
        return 0

    def _reach_rank_0(self) -> str | None:
        """Listen as rank 0; else try to connect, before torch is loaded, and return why that is not possible."""
        part = self._part
        if part.number == 0:
            try:
                self._opened = open_listener(part.address, part.port, is_local=part.address == LOOPBACK)
            except (OSError, LaunchError) as error:
                text = f"rank 0 cannot listen at port {part.port} ({error})"
                advice = "set MASTER_PORT; another job may use this one"
                self._known.append(Finding("meeting", ERROR, text, advice))
            return None
        deadline = time.monotonic() + self._request.timeout_s
        while (why := connection_error(part.address, part.port, _CONNECT_S)) is not None:
            if time.monotonic() > deadline:
                return why
            time.sleep(_PAUSE_S)
        return None

    def _take_torch(self, facts: dict[str, Any]) -> None:
        """Add what torch has told to the report of this host, and let gloo take what it takes in training."""
        report = self._me["report"]
        if report is None:
            return
        report["findings"].append(probe.check_torch(facts, self._gpus, os.environ))
        nccl = ".".join(map(str, facts["nccl"] or ())) or "none"
        report["runtime"] = replace(
            report["runtime"], torch=facts["torch"], cuda=facts["cuda"], processor=facts["processor"], nccl=nccl
        )
        report["nccl"] = probe.nccl_of(facts)
        interface = os.environ.get("XFFL_IFNAME")
        if report["address"] == LOOPBACK and "GLOO_SOCKET_IFNAME" not in os.environ:
            interface = next((each.name for each in list_interfaces() if each.address == LOOPBACK), interface)
        if interface:
            os.environ["GLOO_SOCKET_IFNAME"] = interface
        if report["address"] is None and self._part.number == 0 and self._part.count > 1:
            report["address"] = self._part.address  # where the others have met it
        elif report["address"] is None and self._part.number > 0:
            # Without a name or an interface that works, a host is at least known by the address that rank 0 sees.
            with suppress(OSError):
                place = self._part.address, self._part.port
                with socket.create_connection(place, _CONNECT_S) as connection:
                    report["address"] = str(connection.getsockname()[0])

    def _lead(self, patience_s: float) -> int:
        from xffl.cluster.doctor.exchange import HostStore

        opened = self._opened or open_listener(LOOPBACK, 0, is_local=True)
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # the store needs a file for each program
        store = HostStore(opened.address or LOOPBACK, opened.port, patience_s, opened.socket)
        part = replace(self._part, count=1) if self._opened is None else self._part  # nobody else can come
        report = lead(store, self._request, part=part, me=self._me, known=self._known, patience_s=patience_s)
        self._tell(report)
        return report.exit_code

    def _tell_alone(self) -> int:
        """Tell of this host alone, if this program checks it; return the exit code."""
        if self._me["report"] is None:
            return 1
        number = self._part.number
        members = {number: self._me}
        survey = Survey(self._request, members, self._part.world_size, with_pairs=False, findings=self._known)
        plan = survey.plan()
        survey.answers[number] = try_all(None, self._request, plan, 0)
        report = survey.report(plan)
        self._tell(report)
        return report.exit_code


def _outlive(child: int, reader: int, import_limit_s: float) -> tuple[int | str, bool]:
    """Wait for the child with torch; return its exit code or why it has none, and whether it has loaded torch."""
    is_loaded, limit_s = False, import_limit_s
    with open(reader, "rb", buffering=0) as pipe:
        while select.select([pipe], [], [], limit_s)[0] and pipe.read(1):
            is_loaded, limit_s = True, PATIENCE_S
        has_ended = bool(select.select([pipe], [], [], 0)[0])
    if not has_ended:
        os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if not has_ended:
        return "it did not answer in time", is_loaded
    return (code - _HAS_TOLD if code in (_HAS_TOLD, _HAS_TOLD + 1) else f"exit code {code}"), is_loaded


def _failed(why: str) -> Finding:
    return Finding("host", ERROR, f"the check failed: {why}", "repair what is named here, and run the doctor again")


def lead(store: HostStore, request: Request, part: Part, me: Member, known: list[Finding], patience_s: float) -> Report:
    """Wait for the other programs, let the hosts try each other, and compare what they have told; as rank 0.

    :param store: The store that this program serves.
    :param request: The options of the command.
    :param part: What this program stands for.
    :param me: What it tells of itself.
    :param known: What has been found before.
    :param patience_s: How long the others are waited for.
    :return: The report of all hosts.
    """
    members, failures = {0: me}, {}
    by_key = {f"member/{number}": number for number in range(1, part.count)}
    for key in store.wait(list(by_key), patience_s):
        try:
            members[by_key[key]] = store.read(Member, key, request.timeout_s)
        except ConfigError as error:
            failures[by_key[key]] = _explain(error)
    survey = Survey(request, members, part.world_size, findings=known, failures=failures)
    if part.count > 1:
        where = f"{part.address}:{part.port}"
        status, hosts = OK, f"{len(survey.hosts)} host{'s' * (len(survey.hosts) > 1)}"
        text = f"{part.world_size - len(survey.missing)} ranks of {hosts} met at {where} ({part.launcher})"
        if len(members) < part.count:
            status = ERROR
            text = f"rank {shorten(survey.missing)} did not connect to {where} within {patience_s:.0f} s"
        advice = "see what its host reports; open the port, name the interface (XFFL_CONTROL_IFNAME), or --timeout"
        survey.findings.append(Finding("meeting", status, text, advice))
    for number in members:
        if number != 0:
            is_asked = number in survey.hosts
            sent, started = time.time(), time.monotonic()
            store.write(f"ping/{number}", is_asked)
            if (
                is_asked
                and (clock := _read(store, survey, number, kind=float, key="pong", timeout_s=request.timeout_s))
                is not None
            ):
                # It tells its time in the middle of a round trip, so half the trip bounds the error.
                half = (time.monotonic() - started) / 2
                survey.clocks[number] = clock - (sent + half), half
    plan = survey.plan()
    store.write("plan", plan)
    survey.answers[0] = try_all(store, request, plan, 0)
    turns = 2 + len(plan["pairs"]) // probe.THREADS
    limit_s = request.timeout_s * turns + 2 * min(probe.FOLDER_S, request.timeout_s) + _SLACK_S
    if request.elastic is not None:
        limit_s += 4 * request.timeout_s + _SLACK_S  # its page, its stores, and their keys
    deadline = time.monotonic() + limit_s
    for number in [place["number"] for place in plan["hosts"][1:]]:
        answer = _read(store, survey, number, kind=Answer, key="answer", timeout_s=deadline - time.monotonic())
        if answer is not None:
            survey.answers[number] = answer
    store.write("end", True)
    return survey.report(plan)


def _read(store: HostStore, survey: Survey, number: int, kind: Any, key: str, timeout_s: float) -> Any:
    """Return what a program has written, or None where it has not: that is noted as its failure."""
    try:
        return store.read(kind, f"{key}/{number}", timeout_s)
    except (OSError, ConfigError) as error:
        survey.failures[number] = f"{'lost: ' if isinstance(error, OSError) else ''}{_explain(error)}"
    return None


def _explain(error: Exception) -> str:
    return f"it sent what no doctor of this version sends: {error}" if isinstance(error, ConfigError) else str(error)


def follow(store: HostStore, request: Request, number: int, me: Member) -> None:
    """Tell rank 0 of this program, and do what it plans for this host; an OSError says that rank 0 does not go on."""
    store.write(f"member/{number}", me)
    if me["report"] is None or not store.read(bool, f"ping/{number}", PATIENCE_S):
        return
    store.write(f"pong/{number}", time.time())
    plan = store.read(Plan, "plan", PATIENCE_S)
    for at, place in enumerate(plan["hosts"]):
        if place["number"] == number:
            store.write(f"answer/{number}", try_all(store, request, plan, at))
            with suppress(OSError):  # others may still try whether they reach this host
                store.wait(["end"], PATIENCE_S)


def try_all(store: HostStore | None, request: Request, plan: Plan, at: int) -> Answer:
    """Try what a plan asks the host at a place for, all-reduces beside the rest; without a store no all-reduces."""
    read_proofs, pairs = None, {}
    with ThreadPoolExecutor(probe.THREADS) as pool:
        if store is not None:
            from xffl.cluster.doctor import exchange

            read_proofs = partial(exchange.read_proofs, request.timeout_s)
            for low, high, *ends in plan["pairs"]:
                for rank in (rank for rank in range(2) if ends[rank] == at):
                    pair, partner = f"{low}-{high}", plan["hosts"][ends[1 - rank]]
                    pairs[f"{pair}.{rank}"] = pool.submit(
                        exchange.all_reduce, store, request.timeout_s, pair, rank=rank, partner=partner
                    )
        answer = probe.try_others(request, plan, at)
        answer["pairs"] = {name: pair.result() for name, pair in pairs.items()}
    if request.elastic is not None:
        answer["run"] = cast(RunView, visit_run(request.elastic, request.timeout_s, os.environ, read_proofs))
    return answer
