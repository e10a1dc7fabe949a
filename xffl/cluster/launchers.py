"""The table of launchers: how each one is recognized, which variables it sets, and how the rest is found.

A row tells the place of a process where all of its variables exist; MPI stands before SLURM, since ``mpirun`` inside an
allocation inherits SLURM's variables. Where no row does, but variables show that a launcher was at work that tells too
little, or is only known by name, the process is refused (:func:`launcher_of`): it would train alone, as each of the
others would.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

from xffl.checks import decimal, shown
from xffl.cluster.claims import Claim
from xffl.cluster.host_lists import expand_counts, expand_hosts
from xffl.cluster.hosts import host_identity, node_address, reachable_address
from xffl.cluster.network import control_address
from xffl.cluster.placement import place_ranks
from xffl.errors import LaunchError

__all__ = [
    "KNOWS_NODES",
    "LAUNCHERS",
    "Fields",
    "Launcher",
    "find_launcher",
    "honour_master",
    "launcher_of",
    "launcher_variables",
    "meet",
    "read_number",
    "refuse_half_a_place",
    "refuse_other_launchers",
    "torchrun_variables",
]


class Meeting(NamedTuple):
    """What the ranks found out together."""

    node_rank: int
    node_world_size: int
    node_local_size: int
    master_addr: str
    master_port: int


def meet(
    claim: Claim, world_size: int, environ: Mapping[str, str], *, address: str | None, port: int | None
) -> Meeting:
    """Find the nodes and agree on a rendezvous; collective over ``MPI.COMM_WORLD``: a gather and a broadcast.

    Rank 0 takes the address of the interface that ``XFFL_CONTROL_IFNAME``, ``XFFL_IFNAME`` or ``GLOO_SOCKET_IFNAME``
    names, else 127.0.0.1 where all ranks are on one machine, else an address that the other hosts can reach; and a port
    that is free on its host.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise LaunchError(
            f"started by an MPI launcher, but mpi4py cannot be loaded ({reason}); run pip install mpi4py, or set "
            "MASTER_ADDR to the host of rank 0 and MASTER_PORT to a port that is free there, the same on all ranks"
        ) from error
    world = MPI.COMM_WORLD
    if world.Get_size() != world_size:
        library = MPI.Get_library_version().partition("\n")[0].strip("\0 ")
        raise LaunchError(
            f"the launcher started {world_size} ranks, but mpi4py has loaded {library!r} and sees {world.Get_size()}; "
            "use the mpirun of that library, set MPI4PY_MPIABI or MPI4PY_LIBMPI to the launcher's, or do without MPI: "
            "set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a port that is free there"
        )
    claim = claim._replace(host=claim.host or host_identity())
    rows: list[tuple[Claim, str]] = world.allgather((claim, socket.gethostname()))
    place = place_ranks([row[0] for row in rows], world_size)[claim.rank]
    # A rank given as an argument may differ from MPI's: whoever is called rank 0 listens.
    root = [row[0].rank for row in rows].index(0)
    told: tuple[str, int] | str | None = None
    if claim.rank == 0:
        try:
            told = _listen_at(root, rows, environ, address, port)
        except LaunchError as error:
            told = str(error)
        except Exception as error:  # noqa: BLE001 - the others wait for whatever it is
            told = f"{type(error).__name__}: {error}; set MASTER_ADDR and MASTER_PORT"
    told = world.bcast(told, root=root)
    if not isinstance(told, tuple):
        raise LaunchError(f"rank 0 has no rendezvous: {told}")
    return Meeting(place.node_rank, place.node_world_size, place.local_size, *told)


def _listen_at(
    root: int, rows: Sequence[tuple[Claim, str]], environ: Mapping[str, str], address: str | None, port: int | None
) -> tuple[str, int]:
    address = control_address(environ) if address is None else address
    if address is None and len({claim.host for claim, _ in rows}) == 1:
        address = "127.0.0.1"
    elif address is None:
        address = reachable_address(dict.fromkeys(name for _, name in rows if name != rows[root][1]))
    if port is None:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind(("", 0))
            port = int(probe.getsockname()[1])
    return address, port


class Fields(dict[str, Any]):
    """Fields of :class:`~xffl.cluster.environment.ProcessEnvironment` found so far; :meth:`take` alone fills them."""

    def __init__(self) -> None:
        super().__init__()
        self.sources: dict[str, str] = {}  # field to where its value came from: "argument rank", "MASTER_PORT"

    def take(self, source: str, **values: Any) -> None:
        """Take values from a source, each unless the field is found already."""
        for name, value in values.items():
            if name not in self:
                self[name], self.sources[name] = value, source


Environ = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """One row of the table: a launcher, how it is recognized, and what it tells."""

    name: str
    title: str
    """Who has started the processes, in messages"""
    variables: Mapping[str, str]
    """Field of ProcessEnvironment to the variable that holds it; all of them must exist"""
    more: Mapping[str, str] = field(default_factory=dict)
    """The same for variables that this launcher may leave out"""
    also: tuple[str, ...] = ()
    """Further variables that must exist"""
    signs: tuple[tuple[str, ...], ...] = ()
    """Variables that prove that it was at work; one of these sets suffices"""
    idle: Mapping[str, str] = field(default_factory=dict)
    """What signs hold in the script of a batch job, which is no process of the launcher"""
    complete: Callable[[Fields, Environ], None] = lambda found, environ: None
    """Fills in what the variables leave open"""
    accepts: Callable[[Environ], bool] = lambda environ: True
    """A last look, for variables that may be stale"""
    ignores: Callable[[Environ], bool] = lambda environ: False
    """Whether its signs are another launcher's"""
    again: str = "mpirun -n {}"
    """How to start so many processes"""
    remedy: str = ""
    """What to do where it tells too little, in place of what is to be done for all launchers"""

    @property
    def is_told(self) -> bool:
        """Whether its variables give rank, world size and local rank; other rows only recognize it."""
        return {"rank", "world_size", "node_local_rank"} <= self.variables.keys()

    def missing(self, environ: Environ) -> tuple[str, ...]:
        """Return the variables that keep this row from matching."""
        return tuple(name for name in (*self.variables.values(), *self.also) if name not in environ)

    def matches(self, environ: Environ) -> bool:
        """Tell whether this launcher started the process, and tells its place."""
        return self.is_told and not self.missing(environ) and self.accepts(environ)

    def read(self, environ: Environ) -> dict[str, Any]:
        """Read the fields that the variables hold."""
        named = {**self.variables, **{key: name for key, name in self.more.items() if name in environ}}
        return {
            key: environ[name] if key == "master_addr" else read_number(name, environ[name])
            for key, name in named.items()
        }

    def find_sign(self, environ: Environ) -> tuple[str, ...] | None:
        """Return the variables that show one of several processes of this launcher; ``None`` without any."""
        rank, size = (environ.get(self.variables.get(key, "")) for key in ("rank", "world_size"))
        if self.ignores(environ) or (size == "1" and rank in ("0", None)):
            return None
        for names in self.signs:
            # A variable that is empty is as good as none: templates leave such behind.
            if all(environ.get(name) and environ[name] != self.idle.get(name) for name in names):
                return names
        return None


def find_launcher(environ: Environ) -> Launcher | None:
    """Return the row of the launcher that started this process and tells its place; ``None`` where none does."""
    return next((row for row in LAUNCHERS if row.matches(environ)), None)


def launcher_of(environ: Environ) -> Launcher | None:
    """Return what :func:`find_launcher` does; raise where launchers contradict each other, or one tells too little."""
    row = find_launcher(environ)
    if row is None:
        refuse_other_launchers(environ)
    elif row.name == "variables":
        _refuse_contradiction(row, environ)
    return row


def refuse_other_launchers(environ: Environ) -> None:
    """Raise where a launcher was at work that tells this process too little: every rank would train alone."""
    if (environ.get("RANK", "0"), environ.get("WORLD_SIZE")) == ("0", "1"):
        return  # somebody has said that it is to be alone
    for row in LAUNCHERS:
        if (names := row.find_sign(environ)) is None or (row.is_told and not row.missing(environ)):
            continue
        told = ", ".join(f"{name}={environ[name]}" for name in names)
        lack = "which does not tell its ranks how many there are and which they are on their host"
        if row.is_told:
            lack = f"but {', '.join(row.missing(environ))} is missing"
        raise LaunchError(
            f"{told} looks like {row.title}, {lack}; {row.remedy or _REMEDY}. For a single process unset {names[0]}, "
            "or set RANK=0 and WORLD_SIZE=1"
        )


def refuse_half_a_place(environ: Environ) -> None:
    """Raise where RANK, WORLD_SIZE or LOCAL_RANK are set without the others: each of several ranks would train alone.

    A world of one process, and the first process of a host, may be said by one variable.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    told = {name: text for name in names if (text := environ.get(name, "").strip())}
    is_alone = told.get("WORLD_SIZE") == "1" and told.get("RANK", "0") == "0"
    if is_alone or told in ({}, {"LOCAL_RANK": "0"}):
        return
    raise LaunchError(
        f"{', '.join(f'{name}={text}' for name, text in told.items())} is set, but "
        f"{', '.join(name for name in (*names, 'MASTER_ADDR', 'MASTER_PORT') if not environ.get(name))} is missing, so "
        f"this process would train alone; {_REMEDY}. For a single process unset {', '.join(told)}, or set RANK=0 and "
        "WORLD_SIZE=1"
    )


def _refuse_contradiction(row: Launcher, environ: Environ) -> None:
    """Raise where variables set by hand and the launcher that started the process tell different ranks of one world.

    Processes that torchrun or ``xffl exec`` has started under another launcher have more variables than these.
    """
    told = row.read(environ)
    other = next((other for other in LAUNCHERS if other is not row and other.matches(environ)), None)
    if other is None:
        return
    theirs = other.read(environ)
    if theirs["world_size"] == told["world_size"] and theirs["rank"] != told["rank"]:
        variable = other.variables["rank"]
        raise LaunchError(
            f"RANK={told['rank']}, but {variable}={theirs['rank']}, of {told['world_size']} processes in both; set "
            f"RANK=${variable} in each process, or leave RANK, WORLD_SIZE and LOCAL_RANK out"
        )


_REMEDY = (
    "set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT for each process, or start with torchrun, mpirun or "
    "srun. Where each process is to start ranks of its own, give xffl exec --launcher local"
)


def _complete_mpi(found: Fields, environ: Environ) -> None:
    """Agree on a rendezvous over mpi4py, and find the nodes there; where the rendezvous is given, they are left open.

    Ranks that meet at a given address find the nodes together when they do (:func:`xffl.distributed.session`).
    """
    honour_master(found, environ)
    complete_nodes(found)
    if found["world_size"] == 1 or {"master_addr", "master_port"} <= found.keys():
        return
    claim = Claim(
        rank=found["rank"],
        local_rank=found["node_local_rank"],
        local_size=found.get("node_local_size"),
        node_rank=found.get("node_rank"),
        node_world_size=found.get("node_world_size"),
        world_size=found["world_size"],
    )
    met = meet(claim, found["world_size"], environ, address=found.get("master_addr"), port=found.get("master_port"))
    found.take("what the ranks told over MPI", **met._asdict())


def _complete_where_mpi_may_be_missing(title: str, found: Fields, environ: Environ) -> None:
    """Do what :func:`_complete_mpi` does for a launcher whose processes need not be of MPI, and say so if it fails."""
    honour_master(found, environ)
    try:
        _complete_mpi(found, environ)
    except LaunchError as error:
        raise LaunchError(
            f"{found.sources['rank']}={found['rank']} looks like {title}, which does not tell where its ranks meet; "
            "set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a port that is free there, alike on all ranks. "
            f"Over MPI they cannot agree on it: {error}"
        ) from error


def complete_nodes(found: Fields) -> None:
    """Fill in what follows of the nodes from the numbers that are known: all of it where there is one node."""
    world_size = found["world_size"]
    if found.get("node_local_size") == world_size:
        found.take(found.sources["node_local_size"], node_rank=0, node_world_size=1)
    elif world_size == 1 or found.get("node_world_size") == 1:
        source = found.sources["world_size" if world_size == 1 else "node_world_size"]
        found.take(source, node_local_size=world_size, node_rank=0, node_world_size=1)


def _is_own_step(environ: Environ) -> bool:
    """Tell a task of a step from a batch script that was submitted from inside another step.

    Such a script inherits the other step's ``SLURM_STEP_*``, but its own job's counts. Step ids from 0xfffffff0 on are
    no ``srun`` steps: they are the batch script and the shell of an interactive ``salloc``.
    """
    same_counts = (
        environ["SLURM_NTASKS"] == environ["SLURM_STEP_NUM_TASKS"]
        and environ["SLURM_TASKS_PER_NODE"] == environ["SLURM_STEP_TASKS_PER_NODE"]
    )
    return same_counts and read_number("SLURM_STEP_ID", environ["SLURM_STEP_ID"]) < 0xFFFFFFF0


def _are_slurms(environ: Environ) -> bool:
    """Tell whether the variables of a process manager (PMI, PMIx, PALS) are those of a SLURM step.

    Its plugins set them for each task, and what is submitted from there inherits them. SLURM names its job in them; or
    they agree with the step's own numbers.
    """
    if "SLURM_JOB_ID" not in environ:
        return False
    if environ.get("PMIX_NAMESPACE", "").startswith("slurm.pmix."):
        return True
    if re.fullmatch(r"[0-9]+\.[0-9]+", environ.get("PMI_JOBID", "")):
        return True
    rank = environ.get("PMI_RANK", environ.get("PALS_RANKID", environ.get("PMIX_RANK")))
    size = environ.get("PMI_SIZE", environ.get("SLURM_STEP_NUM_TASKS"))
    return rank == environ.get("SLURM_PROCID") and size in (
        environ.get("SLURM_STEP_NUM_TASKS"),
        environ.get("SLURM_NTASKS"),
    )


def _complete_slurm(found: Fields, environ: Environ) -> None:
    """Take the node's size from the step's list of tasks, the rendezvous from its first host and its ids."""
    counts = expand_counts(environ["SLURM_STEP_TASKS_PER_NODE"])
    if len(counts) != found["node_world_size"] or sum(counts) != found["world_size"]:
        raise LaunchError(
            f"SLURM_STEP_TASKS_PER_NODE={environ['SLURM_STEP_TASKS_PER_NODE']} tells of {sum(counts)} tasks on "
            f"{len(counts)} nodes, but the step has {found['world_size']} on {found['node_world_size']}; start the "
            "script with srun itself"
        )
    if 0 <= found["node_rank"] < len(counts):
        found.take("SLURM_STEP_TASKS_PER_NODE", node_local_size=counts[found["node_rank"]])
    honour_master(found, environ)
    if found["world_size"] == 1:
        return
    if "master_addr" not in found:
        found.take("SLURM_STEP_NODELIST", master_addr=node_address(expand_hosts(environ["SLURM_STEP_NODELIST"])[0]))
    job, step = (read_number(name, environ[name]) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    # 20000 to 31999 lies below the ports that Linux hands out by itself; 750 jobs in a row and 16 steps of each differ.
    found.take("SLURM_JOB_ID", master_port=20000 + (job * 16 + step % 16) % 12000)


def honour_master(found: Fields, environ: Environ) -> None:
    """Take ``MASTER_ADDR`` and ``MASTER_PORT``, each where it is set and not found already."""
    if environ.get("MASTER_ADDR"):
        found.take("MASTER_ADDR", master_addr=environ["MASTER_ADDR"])
    if environ.get("MASTER_PORT") and "master_port" not in found:
        found.take("MASTER_PORT", master_port=read_number("MASTER_PORT", environ["MASTER_PORT"]))


def read_number(name: str, text: str) -> int:
    """Read the integer that a variable holds."""
    number = decimal(text.strip().removeprefix("-"))
    if number is None:
        raise LaunchError(f"{name} is {shown(text)}; it must be an integer")
    return -number if text.strip().startswith("-") else number


def _local_fields(rank: str, world_size: str, local_rank: str, local_size: str) -> dict[str, str]:
    return {"rank": rank, "world_size": world_size, "node_local_rank": local_rank, "node_local_size": local_size}


_NODES = {"node_local_size": "LOCAL_WORLD_SIZE", "node_rank": "GROUP_RANK", "node_world_size": "GROUP_WORLD_SIZE"}
_PLACE = {
    "rank": "RANK",
    "world_size": "WORLD_SIZE",
    "node_local_rank": "LOCAL_RANK",
    "master_addr": "MASTER_ADDR",
    "master_port": "MASTER_PORT",
}
_TORCHRUN = {**_PLACE, **_NODES}
_OPENMPI = _local_fields(*(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")))
_MVAPICH = _local_fields(*(f"MV2_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")))
_SLURM = {
    "rank": "SLURM_PROCID",
    "world_size": "SLURM_STEP_NUM_TASKS",
    "node_local_rank": "SLURM_LOCALID",
    "node_rank": "SLURM_NODEID",
    "node_world_size": "SLURM_STEP_NUM_NODES",
}
_SLURM_ALSO = ("JOB_ID", "STEP_ID", "STEP_NODELIST", "STEP_TASKS_PER_NODE", "NTASKS", "TASKS_PER_NODE")

LAUNCHERS: tuple[Launcher, ...] = (
    Launcher(
        name="torchrun",
        title="torchrun",
        variables=_TORCHRUN,
        again="torchrun --nproc-per-node={}",
    ),
    # Wrappers of sites, the launchers of DeepSpeed and Lightning, and whoever sets what torch itself reads.
    Launcher(
        name="variables",
        title="a launcher that sets RANK and WORLD_SIZE",
        variables=_PLACE,
        more=_NODES,
        signs=(("RANK", "WORLD_SIZE"),),
        complete=lambda found, environ: complete_nodes(found),
        accepts=lambda environ: (environ["RANK"], environ["WORLD_SIZE"]) != ("0", "1"),  # a process that is alone
        again="WORLD_SIZE={}",
        remedy="set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT for each process (LOCAL_RANK=0 where "
        "each host or container has one), or start with torchrun, mpirun or srun",
    ),
    # Open MPI, IBM Spectrum MPI (by jsrun, too) and others that are made of it; version 5 starts them by PRRTE.
    Launcher(
        name="openmpi",
        title="Open MPI's mpirun",
        variables=_OPENMPI,
        signs=(("OMPI_COMM_WORLD_RANK",),),
        complete=_complete_mpi,
    ),
    # Hydra, which starts MPICH and Intel MPI. "srun --mpi=pmi2" sets the first two only and is a SLURM step.
    Launcher(
        name="mpich",
        title="the mpirun of MPICH or Intel MPI",
        variables=_local_fields("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
        signs=(("MPI_LOCALRANKID",),),
        complete=_complete_mpi,
    ),
    Launcher(
        name="pals",
        title="the mpiexec of Cray PALS",
        variables={"rank": "PALS_RANKID", "world_size": "PMI_SIZE", "node_local_rank": "PALS_LOCAL_RANKID"},
        more={"node_local_size": "PALS_LOCAL_SIZE", "node_rank": "PALS_NODEID"},
        signs=(("PALS_RANKID",),),
        complete=partial(_complete_where_mpi_may_be_missing, "the mpiexec of Cray PALS"),
        accepts=lambda environ: not _are_slurms(environ),
        ignores=_are_slurms,
        again="mpiexec -n {}",
    ),
    Launcher(
        name="mvapich",
        title="MVAPICH's mpirun_rsh",
        variables=_MVAPICH,
        signs=(("MV2_COMM_WORLD_RANK",),),
        complete=_complete_mpi,
    ),
    Launcher(
        name="jsrun",
        title="jsrun",
        variables={
            "rank": "JSM_NAMESPACE_RANK",
            "world_size": "JSM_NAMESPACE_SIZE",
            "node_local_rank": "JSM_NAMESPACE_LOCAL_RANK",
        },
        signs=(("JSM_NAMESPACE_RANK",),),
        complete=partial(_complete_where_mpi_may_be_missing, "jsrun"),
        again="jsrun -n {}",
    ),
    Launcher(
        name="flux",
        title="flux run",
        variables={
            "rank": "FLUX_TASK_RANK",
            "world_size": "FLUX_JOB_SIZE",
            "node_local_rank": "FLUX_TASK_LOCAL_ID",
        },
        more={"node_world_size": "FLUX_JOB_NNODES"},
        signs=(("FLUX_TASK_RANK",),),
        complete=partial(_complete_where_mpi_may_be_missing, "flux run"),
        again="flux run -n {}",
    ),
    Launcher(
        name="horovod",
        title="horovodrun",
        variables=_local_fields("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
        signs=(("HOROVOD_RANK",),),
        complete=partial(_complete_where_mpi_may_be_missing, "horovodrun"),
        again="horovodrun -np {}",
    ),
    # Only a step has SLURM_STEP_*: a batch script has SLURM_PROCID=0 and the job's SLURM_NTASKS, salloc neither.
    Launcher(
        name="slurm",
        title="srun",
        variables=_SLURM,
        also=tuple(f"SLURM_{name}" for name in _SLURM_ALSO),
        signs=(("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),),
        complete=_complete_slurm,
        accepts=_is_own_step,
        again="srun --ntasks={}",
    ),
    # From here on launchers that do not tell enough.
    Launcher(
        name="pmi",
        title="a launcher that speaks PMI",
        variables={"rank": "PMI_RANK", "world_size": "PMI_SIZE"},
        signs=(("PMI_RANK",),),
        ignores=_are_slurms,
    ),
    Launcher(
        name="prrte",
        title="PRRTE's prterun or another launcher that speaks PMIx",
        variables={"rank": "PMIX_RANK"},
        signs=(("PMIX_RANK",),),
        ignores=_are_slurms,
        again="prterun -n {}",
    ),
    Launcher(
        name="aprun",
        title="aprun",
        variables={"rank": "ALPS_APP_PE"},
        signs=(("ALPS_APP_PE",),),
        ignores=lambda environ: "SLURM_JOB_ID" in environ,  # SLURM's plugins for Cray systems set it for each task
        again="aprun -n {}",
    ),
    # The script of a job is task 1 on its first host.
    Launcher(
        name="pbsdsh",
        title="pbsdsh",
        variables={},
        signs=(("PBS_TASKNUM",), ("PBS_NODENUM",), ("PBS_VNODENUM",)),
        idle={"PBS_TASKNUM": "1", "PBS_NODENUM": "0", "PBS_VNODENUM": "0"},
        again="pbsdsh -n {}",
    ),
    Launcher(
        name="blaunch",
        title="LSF's blaunch",
        variables={},
        signs=(("LSF_PM_TASKID",),),
        again="blaunch",
    ),
)
"""The launchers that are known, in the order in which they are tried."""

KNOWS_NODES = ("torchrun", "openmpi", "mpich", "pals", "mvapich", "slurm")
"""Those that tell, or whose ranks find out, on how many nodes a job runs."""


def launcher_variables() -> frozenset[str]:
    """Return the names of all variables by which a launcher of the table tells a process its place."""
    return frozenset(
        name
        for row in LAUNCHERS
        for name in (*row.variables.values(), *row.more.values(), *row.also, *chain(*row.signs))
    )


def torchrun_variables(**place: int) -> dict[str, str]:
    """Return torchrun's variables for fields of a process, by default on the only node; without where ranks meet."""
    return {_TORCHRUN[name]: str(number) for name, number in {"node_rank": 0, "node_world_size": 1, **place}.items()}
