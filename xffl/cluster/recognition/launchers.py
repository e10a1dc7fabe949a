"""The table of launchers: how each one is recognized, which variables it sets, and how the rest is found.

A row tells the place of a process where all of its variables exist; MPI stands before SLURM, since ``mpirun`` inside an
allocation inherits SLURM's variables. Where no row does, but variables show that a launcher was at work that tells too
little, or is only known by name, the process is refused (:mod:`xffl.cluster.recognition.refusals`): it would train
alone, as each of the others would.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple

from xffl.cluster.host_lists import expand_counts, expand_hosts
from xffl.cluster.hosts import node_address, reachable_address
from xffl.cluster.network import control_address, host_identity
from xffl.cluster.recognition.claims import Claim
from xffl.cluster.recognition.launcher import Environ, Fields, Launcher, honour_master, read_number
from xffl.cluster.recognition.placement import place_ranks
from xffl.errors import LaunchError

__all__ = [
    "KNOWS_NODES",
    "LAUNCHERS",
    "launcher_variables",
    "meet",
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
    meeting: tuple[str, int] | str | None = None
    if claim.rank == 0:
        try:
            meeting = _listen_at(root, rows=rows, environ=environ, address=address, port=port)
        except LaunchError as error:
            meeting = str(error)
        except Exception as error:  # noqa: BLE001 - the others wait for whatever it is
            meeting = f"{type(error).__name__}: {error}; set MASTER_ADDR and MASTER_PORT"
    meeting = world.bcast(meeting, root=root)
    if not isinstance(meeting, tuple):
        raise LaunchError(f"rank 0 has no rendezvous: {meeting}")
    return Meeting(place.node_rank, place.node_world_size, place.local_size, *meeting)


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


def _complete_mpi(fields: Fields, environ: Environ) -> None:
    """Agree on a rendezvous over mpi4py, and find the nodes there; where the rendezvous is given, they are left open.

    Ranks that meet at a given address find the nodes together when they do (:func:`xffl.distributed.session`).
    """
    honour_master(fields, environ)
    complete_nodes(fields)
    if fields["world_size"] == 1 or {"master_addr", "master_port"} <= fields.keys():
        return
    claim = Claim(
        rank=fields["rank"],
        local_rank=fields["node_local_rank"],
        local_size=fields.get("node_local_size"),
        node_rank=fields.get("node_rank"),
        node_world_size=fields.get("node_world_size"),
        world_size=fields["world_size"],
    )
    met = meet(claim, fields["world_size"], environ, address=fields.get("master_addr"), port=fields.get("master_port"))
    fields.take("what the ranks said over MPI", **met._asdict())


def _complete_where_mpi_may_be_missing(title: str, fields: Fields, environ: Environ) -> None:
    """Do what :func:`_complete_mpi` does for a launcher whose processes need not be of MPI, and say so if it fails."""
    honour_master(fields, environ)
    try:
        _complete_mpi(fields, environ)
    except LaunchError as error:
        raise LaunchError(
            f"{fields.sources['rank']}={fields['rank']} looks like {title}, which does not tell where its ranks meet; "
            "set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a port that is free there, alike on all ranks. "
            f"Over MPI they cannot agree on it: {error}"
        ) from error


def complete_nodes(fields: Fields) -> None:
    """Fill in what follows of the nodes from the numbers that are known: all of it where there is one node."""
    world_size = fields["world_size"]
    if fields.get("node_local_size") == world_size:
        fields.take(fields.sources["node_local_size"], node_rank=0, node_world_size=1)
    elif world_size == 1 or fields.get("node_world_size") == 1:
        source = fields.sources["world_size" if world_size == 1 else "node_world_size"]
        fields.take(source, node_local_size=world_size, node_rank=0, node_world_size=1)


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


def _complete_slurm(fields: Fields, environ: Environ) -> None:
    """Take the node's size from the step's list of tasks, the rendezvous from its first host and its ids."""
    counts = expand_counts(environ["SLURM_STEP_TASKS_PER_NODE"])
    if len(counts) != fields["node_world_size"] or sum(counts) != fields["world_size"]:
        raise LaunchError(
            f"SLURM_STEP_TASKS_PER_NODE={environ['SLURM_STEP_TASKS_PER_NODE']} tells of {sum(counts)} tasks on "
            f"{len(counts)} nodes, but the step has {fields['world_size']} on {fields['node_world_size']}; start the "
            "script with srun itself"
        )
    if 0 <= fields["node_rank"] < len(counts):
        fields.take("SLURM_STEP_TASKS_PER_NODE", node_local_size=counts[fields["node_rank"]])
    honour_master(fields, environ)
    if fields["world_size"] == 1:
        return
    if "master_addr" not in fields:
        fields.take("SLURM_STEP_NODELIST", master_addr=node_address(expand_hosts(environ["SLURM_STEP_NODELIST"])[0]))
    job, step = (read_number(name, environ[name]) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    # 20000 to 31999 lies below the ports that Linux hands out by itself; 750 jobs in a row and 16 steps of each differ.
    fields.take("SLURM_JOB_ID", master_port=20000 + (job * 16 + step % 16) % 12000)


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
_MPICH = _local_fields("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_MVAPICH = _local_fields(*(f"MV2_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")))
_SLURM = {
    "rank": "SLURM_PROCID",
    "world_size": "SLURM_STEP_NUM_TASKS",
    "node_local_rank": "SLURM_LOCALID",
    "node_rank": "SLURM_NODEID",
    "node_world_size": "SLURM_STEP_NUM_NODES",
}
_SLURM_ALSO = ("JOB_ID", "STEP_ID", "STEP_NODELIST", "STEP_TASKS_PER_NODE", "NTASKS", "TASKS_PER_NODE")


def _mpi_row(name: str, title: str, variables: Mapping[str, str], *, sign: str) -> Launcher:
    """Return the row of a launcher whose ranks agree over MPI on where they meet."""
    return Launcher(name=name, title=title, variables=variables, signs=((sign,),), complete=_complete_mpi)


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
        complete=lambda fields, environ: complete_nodes(fields),
        accepts=lambda environ: (environ["RANK"], environ["WORLD_SIZE"]) != ("0", "1"),  # a process that is alone
        again="WORLD_SIZE={}",
        remedy="set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT for each process (LOCAL_RANK=0 where "
        "each host or container has one), or start with torchrun, mpirun or srun",
    ),
    # Open MPI, IBM Spectrum MPI (by jsrun, too) and others that are made of it; version 5 starts them by PRRTE.
    _mpi_row("openmpi", "Open MPI's mpirun", _OPENMPI, sign="OMPI_COMM_WORLD_RANK"),
    # Hydra, which starts MPICH and Intel MPI. "srun --mpi=pmi2" sets the first two only and is a SLURM step.
    _mpi_row("mpich", "the mpirun of MPICH or Intel MPI", _MPICH, sign="MPI_LOCALRANKID"),
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
    _mpi_row("mvapich", "MVAPICH's mpirun_rsh", _MVAPICH, sign="MV2_COMM_WORLD_RANK"),
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
