"""Where the ranks of a job start: on which hosts."""

from __future__ import annotations

from dataclasses import replace

from xffl.cluster.batch import find_job, is_here
from xffl.cluster.launch.job_layout import fit_hosts
from xffl.cluster.sizes import Federation
from xffl.cluster.slurm.allocation import Allocation, Host, ask_switches, own_host, parse_hosts
from xffl.errors import ConfigError, LaunchError
from xffl.jobs.options import JobOptions

__all__ = ["find_start"]


def find_start(
    options: JobOptions,
    processes: int | None,
    federated: Federation | None,
    *,
    knob: str,
    is_all: bool,
    default: int | None,
) -> Allocation | None:
    """Choose where the ranks start; ``None`` where it would be here, and nobody says how many.

    ``knob`` says who asks for the processes, ``is_all`` that the cells of an elastic run start, each by itself;
    ``default`` is how many there are here where nobody says it.
    """
    rule = federated if isinstance(federated, str) else ""
    needs_switches = rule.startswith("auto")
    way = options.launcher
    if options.hosts is not None and way not in ("auto", "ssh"):
        raise ConfigError(f"--hosts is for ssh, but --launcher is {way}; leave one of them out")
    if options.hosts is not None:
        hosts = parse_hosts(options.hosts)
        if needs_switches and not all(host.switches for host in hosts):
            hosts = ask_switches(hosts)
        allocation = Allocation("hosts", hosts)
        return replace(allocation, hosts=fit_hosts(allocation, processes, knob=knob))
    job = None
    if way != "local":
        job = find_job(wants_switches=bool(rule), needs_switches=needs_switches)
    if way == "ssh" and (job is None or job.kind == "slurm"):
        raise ConfigError("--launcher ssh needs to know the hosts; give --hosts a:4,b:4, or @FILE")
    if way == "srun" and job is not None and job.kind != "slurm":
        job = None
    if way == "auto" and job is not None and job.kind != "slurm" and len(job.hosts) == 1 and is_here(job.hosts[0]):
        # The whole job is on this host, where processes need no ssh; there may be more of them than slots.
        processes, job = processes or job.slots, None
    if job is not None:
        return replace(job, hosts=fit_hosts(job, processes, knob=knob))
    if way == "srun":
        hint = "start it with salloc, from a batch script, or with xffl submit"
        raise LaunchError(f"--launcher srun is for the inside of a SLURM job, and this is not. HINT: {hint}")
    if is_all and rule:
        raise ConfigError(
            f"federated {rule} finds cells of hosts, but all cells start on this machine; give sizes, such as 2,2"
        )
    if is_all and processes is None and isinstance(federated, tuple):
        processes = sum(federated)
    processes = default if processes is None else processes
    return None if processes is None else Allocation("local", (Host(own_host().name, processes),))
