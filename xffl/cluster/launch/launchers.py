"""The table of launchers: which variables each one sets, and how the rest is found.

A row matches only where all of its variables exist. MPI stands before SLURM, since ``mpirun`` inside an allocation
inherits SLURM's variables.
"""

from __future__ import annotations

import socket
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from xffl.checks import decimal, shown
from xffl.cluster.hosts import expand_counts, expand_hosts, host_identity, node_address, reachable_address
from xffl.cluster.network import control_address
from xffl.errors import LaunchError

__all__ = ["LAUNCHERS", "Fields", "honour_master", "meet", "read_number", "torchrun_variables"]


class Claim(NamedTuple):
    """What one rank knows of itself."""

    rank: int
    local_rank: int
    local_size: int
    host: str = ""  # identity of the machine, the same for all ranks on it; the rank's own finding where empty


class Meeting(NamedTuple):
    """What the ranks found out together."""

    node_rank: int
    node_world_size: int
    master_addr: str
    master_port: int


def number_nodes(claims: Sequence[Claim]) -> dict[int, int]:
    """Give numbers to the nodes, in the order of their lowest rank.

    Ranks on one machine with the same local size form a node. Where a local rank occurs several times there (several
    pretended hosts on one machine), the machine holds several nodes: the k-th rank, in rank order, with that local rank
    belongs to the k-th of them.
    """
    seen: Counter[tuple[str, int, int]] = Counter()
    members: defaultdict[tuple[str, int, int], list[Claim]] = defaultdict(list)
    for claim in sorted(claims):
        place = claim.host, claim.local_size, claim.local_rank
        members[claim.host, claim.local_size, seen[place]].append(claim)
        seen[place] += 1
    nodes: dict[int, int] = {}
    for number, ((host, size, _), node) in enumerate(members.items()):
        if sorted(claim.local_rank for claim in node) != list(range(size)):
            told = {claim.rank: claim.local_rank for claim in node}
            raise LaunchError(
                f"host {host.partition('/')[0]} should have local ranks 0 to {size - 1}, but its ranks have {told} "
                "(rank: local rank); give node_rank and node_world_size as arguments, or start with torchrun"
            )
        nodes.update((claim.rank, number) for claim in node)
    return nodes


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
            "MASTER_ADDR and MASTER_PORT and give node_rank and node_world_size as arguments"
        ) from error
    world = MPI.COMM_WORLD
    if world.Get_size() != world_size:
        library = MPI.Get_library_version().partition("\n")[0].strip("\0 ")
        raise LaunchError(
            f"the launcher started {world_size} ranks, but mpi4py has loaded {library!r} and sees {world.Get_size()}; "
            "use the mpirun of that library, or set MPI4PY_MPIABI or MPI4PY_LIBMPI to the launcher's"
        )
    claim = claim._replace(host=claim.host or host_identity())
    rows: list[tuple[Claim, str]] = world.allgather((claim, socket.gethostname()))
    ranks = [row[0].rank for row in rows]
    if sorted(ranks) != list(range(world_size)):
        raise LaunchError(f"ranks {ranks} are not 0 to {world_size - 1}, each once; give every process its own rank")
    # A rank given as an argument may differ from MPI's: whoever is called rank 0 listens.
    root = ranks.index(0)
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
    nodes = number_nodes([row[0] for row in rows])
    return Meeting(nodes[claim.rank], max(nodes.values()) + 1, *told)


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


@dataclass(frozen=True)
class Launcher:
    """One row of the table: a launcher and what it tells."""

    name: str
    variables: Mapping[str, str]  # field of ProcessEnvironment to the variable that holds it; all of them must exist
    complete: Callable[[Fields, Mapping[str, str]], None]  # fills in what the variables leave open
    also: tuple[str, ...] = ()  # further variables that must exist
    alone: bool = True  # whether the rank's variable alone proves that this launcher was at work
    accepts: Callable[[Mapping[str, str]], bool] = lambda environ: True  # a last look, for variables that may be stale

    def missing(self, environ: Mapping[str, str]) -> tuple[str, ...]:
        """Return the variables that keep this row from matching."""
        return tuple(name for name in (*self.variables.values(), *self.also) if name not in environ)

    def matches(self, environ: Mapping[str, str]) -> bool:
        """Tell whether this launcher started the process."""
        return not self.missing(environ) and self.accepts(environ)

    def read(self, environ: Mapping[str, str]) -> dict[str, Any]:
        """Read the fields that the variables hold."""
        return {
            name: environ[variable] if name == "master_addr" else read_number(variable, environ[variable])
            for name, variable in self.variables.items()
        }


def _complete_mpi(found: Fields, environ: Mapping[str, str]) -> None:
    """Find the nodes and agree on a rendezvous, over mpi4py where the variables do not suffice."""
    honour_master(found, environ)
    if found["node_local_size"] == found["world_size"]:
        found.take(found.sources["node_local_size"], node_rank=0, node_world_size=1)
    if found["world_size"] == 1 or all(name in found for name in Meeting._fields):
        return
    claim = Claim(found["rank"], found["node_local_rank"], found["node_local_size"])
    met = meet(claim, found["world_size"], environ, address=found.get("master_addr"), port=found.get("master_port"))
    found.take("what the ranks told over MPI", **met._asdict())


def _is_own_step(environ: Mapping[str, str]) -> bool:
    """Tell a task of a step from a batch script that was submitted from inside another step.

    Such a script inherits the other step's ``SLURM_STEP_*``, but its own job's counts. Step ids from 0xfffffff0 on are
    no ``srun`` steps: they are the batch script and the shell of an interactive ``salloc``.
    """
    same_counts = (
        environ["SLURM_NTASKS"] == environ["SLURM_STEP_NUM_TASKS"]
        and environ["SLURM_TASKS_PER_NODE"] == environ["SLURM_STEP_TASKS_PER_NODE"]
    )
    return same_counts and read_number("SLURM_STEP_ID", environ["SLURM_STEP_ID"]) < 0xFFFFFFF0


def _complete_slurm(found: Fields, environ: Mapping[str, str]) -> None:
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


def honour_master(found: Fields, environ: Mapping[str, str]) -> None:
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


_TORCHRUN = {
    **_local_fields("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "node_rank": "GROUP_RANK",
    "node_world_size": "GROUP_WORLD_SIZE",
    "master_addr": "MASTER_ADDR",
    "master_port": "MASTER_PORT",
}
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
    Launcher("torchrun", _TORCHRUN, lambda found, environ: None, alone=False),
    Launcher("openmpi", _OPENMPI, _complete_mpi),
    # Hydra, which starts MPICH and Intel MPI. "srun --mpi=pmi2" sets the first two only and is a SLURM step.
    Launcher("mpich", _local_fields("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"), _complete_mpi),
    Launcher("pals", _local_fields("PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"), _complete_mpi),
    Launcher("mvapich", _MVAPICH, _complete_mpi),
    # Only a step has SLURM_STEP_*: a batch script has SLURM_PROCID=0 and the job's SLURM_NTASKS, salloc neither.
    Launcher(
        "slurm",
        _SLURM,
        _complete_slurm,
        also=tuple(f"SLURM_{name}" for name in _SLURM_ALSO),
        alone=False,
        accepts=_is_own_step,
    ),
)
"""The launchers that are known, in the order in which they are tried."""


def torchrun_variables(**place: int) -> dict[str, str]:
    """Return torchrun's variables for fields of a process, by default on the only node; without where ranks meet."""
    return {_TORCHRUN[name]: str(number) for name, number in {"node_rank": 0, "node_world_size": 1, **place}.items()}
