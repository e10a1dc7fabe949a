"""The order of the checks: alone on one host, or as the ranks of a job, which rank 0 leads."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from xffl.cluster.cells import arrange
from xffl.cluster.doctor.findings import ERROR, OK, WARNING, Finding, Report, merge
from xffl.cluster.doctor.folder import Folder, compare_folders
from xffl.cluster.doctor.host import check_threads
from xffl.cluster.doctor.lead import (
    CHECKS,
    FAILED,
    Lead,
    check_cells,
    folder_of,
    judge_torch,
    meeting_s,
    patience_s,
    unwritable,
)
from xffl.cluster.doctor.meeting import Hub, answer, attempt, join
from xffl.cluster.doctor.programs import MPI_LAUNCHERS, check_mpi
from xffl.cluster.doctor.rounds import Unit, add_in_rounds
from xffl.cluster.doctor.side import HostSide, Request, findings_of, introduce
from xffl.cluster.environment import ProcessEnvironment, detect_environment
from xffl.cluster.hosts import interface_address
from xffl.cluster.launch.launchers import LAUNCHERS, Launcher
from xffl.cluster.network import SLURM_PORTS
from xffl.cluster.slurm.allocation import find_allocation
from xffl.errors import LaunchError, XfflError

__all__ = ["examine"]

_MPI_LIMIT_S = 60.0

_Told = Callable[[Report], None]


def examine(request: Request, tell: _Told, environ: Mapping[str, str] | None = None) -> int:
    """Check this host, or all hosts of a job; under a launcher every rank calls it.

    Rank 0 tells about all hosts. A host whose ranks cannot reach rank 0 tells about itself.

    :param request: What to look at.
    :param tell: Gets the report, in the processes that have one.
    :param environ: Environment to read; ``None`` means the process's own.
    :return: Exit code: 1 where this process told of an error, else 0.
    """
    environ = dict(os.environ if environ is None else environ)
    row = next((row for row in LAUNCHERS if row.matches(environ)), None)
    launcher = "none" if row is None else row.name
    is_head = _is_first(row, environ)
    mpi = Finding("mpi", OK, "not looked at")
    # Other ranks ask only where MPI started them: MPI_Init of a wrong library may end the whole job.
    if is_head or launcher in MPI_LAUNCHERS:
        mpi = check_mpi(launcher, "mpi" in request.needs, environ)
    place, wrong = _find_place(row, mpi, tell if is_head else None, environ)
    is_head = place.node_local_rank == 0 if place is not None else is_head
    if place is not None and place.world_size > 1 and not is_head:
        return _follow(request, place, None, environ)
    if not is_head:
        return 0
    side = HostSide(request, place, launcher, mpi, environ)
    try:
        if place is None or place.world_size == 1:
            report = _alone(side, wrong)
        elif place.rank != 0:
            return _follow(request, place, side, environ, tell)
        else:
            report = _lead(side, place, environ)
    finally:
        side.close()
    tell(report)
    return report.exit_code


def _find_place(
    row: Launcher | None, mpi: Finding, tell: _Told | None, environ: Mapping[str, str]
) -> tuple[ProcessEnvironment | None, list[Finding]]:
    """Find out where this rank stands, or why that cannot be found out."""
    advice = "see the lines above; xffl env shows what the launcher has set"
    is_mpi = row is not None and row.name in MPI_LAUNCHERS
    if is_mpi and mpi.status == ERROR:
        # MPI_Init of a wrong library may abort, or make each rank a world of its own.
        return None, [Finding("launcher", ERROR, "the other ranks are not looked for without a working MPI", advice)]
    watch = threading.Timer(_MPI_LIMIT_S, _give_up, (tell, mpi))
    watch.daemon = True
    if is_mpi:
        watch.start()
    try:
        return detect_environment(_without_bad_interfaces(environ)), []
    except XfflError as error:
        return None, [Finding("launcher", ERROR, str(error), advice)]
    finally:
        watch.cancel()


def _give_up(tell: _Told | None, mpi: Finding) -> None:
    """End a rank whose MPI does not carry the first message; the first one of a node tells of it."""
    text = f"the ranks could not speak over MPI within {_MPI_LIMIT_S:g} s"
    advice = "name the network for MPI (OMPI_MCA_btl_tcp_if_include, UCX_NET_DEVICES, or -iface with MPICH)"
    if tell is not None:
        tell(Report((mpi, Finding("launcher", ERROR, text, advice))))
    os._exit(1)


def _without_bad_interfaces(environ: Mapping[str, str]) -> dict[str, str]:
    """Leave out interfaces that cannot be used, so that the ranks meet all the same; the check tells of them."""
    found = dict(environ)
    for variable in ("XFFL_IFNAME", "XFFL_CONTROL_IFNAME", "GLOO_SOCKET_IFNAME"):
        if not _can_be_used(found.get(variable, "").partition(",")[0]):
            found.pop(variable, None)
    return found


def _can_be_used(interface: str) -> bool:
    try:
        return bool(interface) and not interface_address(interface).startswith("127.")
    except LaunchError:
        return False


def _is_first(row: Launcher | None, environ: Mapping[str, str]) -> bool:
    """Tell by the launcher's variable alone whether this is the first rank of its node."""
    return row is None or environ.get(row.variables.get("node_local_rank", ""), "0") == "0"


def _alone(side: HostSide, before: Sequence[Finding]) -> Report:
    """Check this host only."""
    told = introduce(side.place, side.environ)
    name = told["host"]["name"]
    found = [*before, *_look(side, 1), check_threads([told]), *_cells_alone(side)]
    folder, unseen = Folder(folder_of(side.request), secrets.token_hex(4)), []
    error = folder.open()
    if error is None:
        seen = attempt(lambda _: folder.turn(), {})
        unseen = folder.close({0: name}, 1.0)
        if "failed" in seen:
            found.append(Finding(CHECKS["folder"], ERROR, f"cannot be looked at: {seen['failed']}", FAILED))
        else:
            found += compare_folders(folder.path, {0: name}, {0: seen}, unseen)
    else:
        found.append(unwritable(side.request, folder, error))
    answers = {0: side.torch(2)}
    found += judge_torch({0: name}, answers)
    ports = [told.get("port") for told in answers[0]["told"]]
    if len(ports) == 2 and None not in ports:
        units = [Unit(f"process {at} of {name}", 0, at, ("127.0.0.1", int(port))) for at, port in enumerate(ports)]
        found += add_in_rounds(units, lambda asked, _: {0: side.pairs(asked[0])}, side.request.timeout_s)
    return Report(merge([replace(finding, host=name) for finding in found], [name]), (name,))


def _look(side: HostSide, machines: int) -> list[Finding]:
    """Let this host look at itself; an error there is a finding too."""
    seen = attempt(lambda question: side.look(question["machines"]), {"machines": machines})
    if "failed" in seen:
        return [Finding(CHECKS["look"], ERROR, f"cannot be looked at: {seen['failed']}", FAILED)]
    return findings_of(seen)


def _cells_alone(side: HostSide) -> list[Finding]:
    """Judge the cells by the hosts of the job in whose batch script this process stands."""
    federated = side.request.federated
    if federated is None:
        return []
    advice = "look from inside the job: in its batch script, or with srun, mpirun or --hosts"
    try:
        allocation = find_allocation(side.environ, needs_switches=str(federated).startswith("auto"))
        if allocation is None:
            return [Finding("cells", WARNING, "not looked at: the hosts of the job are not known here", advice)]
        hosts = allocation.hosts
        if isinstance(federated, str):
            hosts = arrange(hosts, federated).hosts
    except XfflError as error:
        return [Finding("cells", ERROR, str(error), f"mend {side.request.federated_by}")]
    ranks = [host for host in hosts for _ in range(host.slots)]
    return [check_cells(federated, ranks, side.request.federated_by)[1]]


def _lead(side: HostSide, place: ProcessEnvironment, environ: Mapping[str, str]) -> Report:
    """Lead the others, or look at this host alone where no port is free for them."""
    port = _meeting_port(place, environ)
    try:
        hub = Hub(port, place.world_size)
    except LaunchError as error:
        report = _alone(side, [Finding("meeting", ERROR, str(error), "set MASTER_PORT")])
        return replace(report, ranks=place.world_size)
    return Lead(side, place, hub, port).examine()


def _follow(
    request: Request,
    place: ProcessEnvironment,
    side: HostSide | None,
    environ: Mapping[str, str],
    tell: _Told | None = None,
) -> int:
    """Tell rank 0 about this rank, and answer for its host if it is the first rank there."""
    assert place.master_addr is not None
    told = introduce(place, environ)
    try:
        port = _meeting_port(place, environ)
        connection = join(place.master_addr, port, place.rank, place.world_size, told, meeting_s(request.timeout_s))
    except LaunchError as error:
        if side is None or tell is None:
            return 1
        advice = "see the lines on interface and names; open the port between the compute nodes"
        found = [*_look(side, place.node_world_size), Finding("meeting", ERROR, str(error), advice)]
        name = told["host"]["name"]
        tell(Report(merge([replace(finding, host=name) for finding in found], [name]), (name,)))
        return 1
    return 0 if answer(connection, {} if side is None else side.handlers, patience_s(request.timeout_s)) else 1


def _meeting_port(place: ProcessEnvironment, environ: Mapping[str, str]) -> int:
    """Return the port to meet at: the rendezvous's, unless torchrun's agent listens there already."""
    assert place.master_port is not None
    if place.launcher != "torchrun" or environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() != "true":
        return place.master_port
    first, last = SLURM_PORTS
    return first + place.master_port * 7919 % (last - first + 1)
