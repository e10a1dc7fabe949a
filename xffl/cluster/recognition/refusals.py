"""Why a process is refused whose variables say that it is one of several, and not which one: it would train alone."""

from __future__ import annotations

from xffl.checks import decimal
from xffl.cluster.recognition.launcher import Environ, Launcher
from xffl.cluster.recognition.launchers import LAUNCHERS
from xffl.errors import LaunchError

__all__ = ["refuse_contradiction", "refuse_half_a_place", "refuse_other_launchers", "told_rank"]

_REMEDY = (
    "set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT for each process, or start with torchrun, mpirun or "
    "srun. Where each process is to start ranks of its own, give xffl exec --launcher local"
)


def told_rank(environ: Environ) -> int | None:
    """Return this process's number among those that a launcher has started, as far as it tells one.

    For errors about what else it tells: other variables may be missing, or contradict it. ``None`` where no launcher
    was at work, or none that numbers its processes.
    """
    names = [row.variables.get("rank", "") for row in LAUNCHERS if row.matches(environ) or row.find_sign(environ)]
    numbers = (decimal(environ.get(name, "").strip()) for name in (*names, "RANK"))
    return next((number for number in numbers if number is not None), None)


def refuse_other_launchers(environ: Environ) -> None:
    """Raise where a launcher was at work that tells this process too little: every rank would train alone."""
    if (environ.get("RANK", "0"), environ.get("WORLD_SIZE")) == ("0", "1"):
        return  # somebody has said that it is to be alone
    for row in LAUNCHERS:
        if (names := row.find_sign(environ)) is None or (row.is_told and not row.missing(environ)):
            continue
        variables = ", ".join(f"{name}={environ[name]}" for name in names)
        lack = "which does not tell its ranks how many there are and which they are on their host"
        if row.is_told:
            lack = f"but {', '.join(row.missing(environ))} is missing"
        raise LaunchError(
            f"{variables} looks like {row.title}, {lack}; {row.remedy or _REMEDY}. For a single process unset "
            f"{names[0]}, or set RANK=0 and WORLD_SIZE=1"
        )


def refuse_half_a_place(environ: Environ) -> None:
    """Raise where RANK, WORLD_SIZE or LOCAL_RANK are set without the others: each of several ranks would train alone.

    A world of one process, and the first process of a host, may be said by one variable.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    values = {name: text for name in names if (text := environ.get(name, "").strip())}
    is_alone = values.get("WORLD_SIZE") == "1" and values.get("RANK", "0") == "0"
    if is_alone or values in ({}, {"LOCAL_RANK": "0"}):
        return
    raise LaunchError(
        f"{', '.join(f'{name}={text}' for name, text in values.items())} is set, but "
        f"{', '.join(name for name in (*names, 'MASTER_ADDR', 'MASTER_PORT') if not environ.get(name))} is missing, so "
        f"this process would train alone; {_REMEDY}. For a single process unset {', '.join(values)}, or set RANK=0 and "
        "WORLD_SIZE=1"
    )


def refuse_contradiction(row: Launcher, environ: Environ) -> None:
    """Raise where variables set by hand and the launcher that started the process tell different ranks of one world.

    Processes that torchrun or ``xffl exec`` has started under another launcher have more variables than these.
    """
    claimed = row.read(environ)
    other = next((other for other in LAUNCHERS if other is not row and other.matches(environ)), None)
    if other is None:
        return
    theirs = other.read(environ)
    if theirs["world_size"] == claimed["world_size"] and theirs["rank"] != claimed["rank"]:
        variable = other.variables["rank"]
        raise LaunchError(
            f"RANK={claimed['rank']}, but {variable}={theirs['rank']}, of {claimed['world_size']} processes in both; "
            f"set RANK=${variable} in each process, or leave RANK, WORLD_SIZE and LOCAL_RANK out"
        )
