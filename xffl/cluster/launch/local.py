"""Local processes as the ranks of a job; without torch, which takes a second and more to import."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from xffl.checks import decimal
from xffl.cluster.launch.affinity import limit_threads
from xffl.cluster.launch.child import child_command
from xffl.cluster.launch.failure import ExitCode, FailureRecord, JobWatch, RankFailure, caught_signals, read_failure
from xffl.cluster.launch.job_layout import LaunchOptions
from xffl.cluster.launch.runner import LINGER_S, RankJob
from xffl.cluster.launch.script import check_command, check_script
from xffl.cluster.recognition.launchers import torchrun_variables
from xffl.errors import LaunchError

__all__ = ["held_port", "launch_distributed", "launch_local"]

_POLL_S = 0.05


def launch_local(processes: int, command: Sequence[str], options: LaunchOptions) -> RankFailure | int:
    """Run a Python script in several processes on this machine, and wait for them.

    The ranks get torchrun's variables; they meet at a free port of 127.0.0.1 that this process holds for them, so jobs
    do not collide. Output and input are this process's own. When a rank fails, the others are ended at once. SIGINT,
    SIGTERM, SIGHUP and SIGQUIT are passed on to the ranks and what they have started, and what is left after
    ``grace_s``, or at the next SIGINT, is killed; SIGUSR1 and SIGUSR2 are passed on to the ranks alone. If this process
    is killed, Linux ends the ranks. Call it from the main thread.
    """
    if options.source is None:
        check_command(command)
    watch = JobWatch(options.timeout_s, options.grace_s)
    # The variables of an agent above this process are not for the ranks.
    inherited = {name: text for name, text in os.environ.items() if not name.startswith("TORCHELASTIC_")}
    variables = {**inherited, **options.environ}
    limit_threads(variables)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if it is ignored, exit codes are lost
    folder = tempfile.TemporaryDirectory(prefix="xffl-exec-")
    with folder as failures, held_port() as port, caught_signals() as take_signals:
        job = RankJob(log_dir=options.log_dir, failures=failures, parent=os.getpid(), source=options.source)
        variables |= job.variables()
        ranks = _Ranks(watch, failures)
        try:
            ranks.start(processes, command, {**variables, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
            while ranks.are_left:
                time.sleep(_POLL_S)
                for number, ends in take_signals():
                    if not ends:
                        ranks.forward_signal(number)
                    elif not ranks.are_ending:
                        watch.stop(number)
                        ranks.terminate(number)
                    elif number == signal.SIGINT:  # somebody has no patience left; a batch system may say TERM twice
                        ranks.kill()
                if watch.is_late and not ranks.are_ending:
                    watch.stop(0)
                    ranks.terminate(signal.SIGTERM)
                ranks.poll()
                if watch.is_overdue():
                    ranks.kill()
        finally:
            ranks.kill()
    return watch.result() or ExitCode.OK


class _Ranks:
    """The ranks of a job, each in a session of its own: a terminal's Ctrl-C is for the launcher alone."""

    def __init__(self, watch: JobWatch, failures: str) -> None:
        self._watch = watch
        self._failures = failures
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._orphans: list[subprocess.Popen[bytes]] = []  # ended since all were asked to; may have left something
        self._ending_since: float | None = None
        self._echo_until: float | None = None  # for others to show that they failed before one that has lost them

    @property
    def are_left(self) -> bool:
        """Whether some have not ended yet, or what they have started and is to end with them."""
        return bool(self._running or self._orphans)

    @property
    def are_ending(self) -> bool:
        """Whether they were asked to end."""
        return self._ending_since is not None

    def start(self, processes: int, command: Sequence[str], environ: Mapping[str, str]) -> None:
        for rank in range(processes):
            place = {"rank": rank, "world_size": processes, "node_local_rank": rank, "node_local_size": processes}
            words = [*child_command("xffl.cluster.launch.runner"), *command]
            variables = {**environ, **torchrun_variables(**place)}
            try:
                self._running[rank] = subprocess.Popen(words, env=variables, start_new_session=True)
            except OSError as error:
                raise LaunchError(f"process {rank} of {processes} could not be started: {error}") from error

    def poll(self) -> None:
        """See who has ended, and end the others where one has failed."""
        for rank, process in list(self._running.items()):
            if (code := process.poll()) is None:
                continue
            del self._running[rank]
            if self.are_ending:
                self._orphans.append(process)
            elif code != 0:
                _kill(process, signal.SIGKILL)  # what it has started is of no more use
            else:
                self._watch.add_left(rank)
            if code != 0:
                self._collect_failure(rank, code)
        self._orphans = [process for process in self._orphans if _kill(process, 0)]
        if self._echo_until is not None and time.monotonic() > self._echo_until and not self.are_ending:
            self._watch.add_lasting(self._running)
            self.terminate(signal.SIGTERM)

    def terminate(self, number: int) -> None:
        """Tell those that are left to end, once."""
        if not self.are_ending:
            self._ending_since = time.time()
            self._watch.start_grace()
            for process in self._running.values():
                _kill(process, number)

    def forward_signal(self, number: int) -> None:
        for process in self._running.values():
            process.send_signal(number)

    def kill(self) -> None:
        """Kill what is left; what ranks have reported before counts."""
        for process in (*self._running.values(), *self._orphans):
            _kill(process, signal.SIGKILL)
        for rank, process in self._running.items():
            process.wait()
            self._collect_record(rank)
        self._running.clear()
        self._orphans.clear()

    def _collect_failure(self, rank: int, code: int) -> None:
        record = self._collect_record(rank)
        if record is None and not self.are_ending:
            self._watch.add_code(rank, code, is_own=True)
        if record is None or not record.lost_peer:
            self.terminate(signal.SIGTERM)
        elif self._echo_until is None:
            self._echo_until = time.monotonic() + LINGER_S

    def _collect_record(self, rank: int) -> FailureRecord | None:
        """Take over what a rank has reported, unless it is about its end on account of another one's failure."""
        record = read_failure(self._failures, rank)
        is_answer = self._watch.stopped_by is None and self._ending_since is not None
        if record is None or (is_answer and record.time > (self._ending_since or 0.0)):
            return None
        self._watch.add_record(rank, record)
        return record


def _kill(process: subprocess.Popen[bytes], number: int) -> bool:
    """Send a signal to a rank and what it has started, and return whether anything of it is left."""
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return False
    return True


@contextmanager
def held_port() -> Iterator[int]:
    """Hold a free port of all addresses while the block runs: no other program gets it, but a rank may listen there.

    A program that asks for it by number with SO_REUSEADDR, as torch's store does, gets it while no one listens.
    """
    both = socket.has_dualstack_ipv6()
    with socket.socket(socket.AF_INET6 if both else socket.AF_INET) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if both:
            holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        holder.bind(("", 0))
        yield holder.getsockname()[1]


def launch_distributed(
    script: str,
    config: str,
    num_nodes: int = 1,
    gpus_per_node: int = 8,
    master_addr: str = "localhost",
    master_port: int | None = None,
) -> None:
    """Run a training script with torchrun, on each node of a job that is called there; wait for its processes.

    Call it on every node with the same arguments, and with ``NODE_RANK`` set where there are several. Where ``xffl
    exec``, SLURM or mpirun start the processes, it is not needed.

    :param script: Path of the Python script.
    :param config: Its one argument, such as the path of a configuration.
    :param num_nodes: Nodes of the job.
    :param gpus_per_node: Processes on each node.
    :param master_addr: Host of node 0.
    :param master_port: Port where node 0 listens; with one node a free one by default.
    :raises LaunchError: if the arguments do not fit each other, or a process fails.
    """
    check_script(script)
    if num_nodes < 1 or gpus_per_node < 1:
        raise LaunchError(f"{num_nodes} nodes of {gpus_per_node} processes are invalid; give at least 1 of each")
    command = [*child_command("torch.distributed.run"), f"--nproc-per-node={gpus_per_node}"]
    if num_nodes == 1 and master_port is None:
        command.append("--standalone")
    elif master_port is None:
        raise LaunchError(f"{num_nodes} nodes need a port to meet at; give master_port, the same on all of them")
    else:
        node = os.environ.get("NODE_RANK", "0" if num_nodes == 1 else "")
        if (number := decimal(node)) is None or number >= num_nodes:
            raise LaunchError(f"NODE_RANK is {node!r} on one of {num_nodes} nodes; set it to 0 to {num_nodes - 1}")
        command += [f"--nnodes={num_nodes}", f"--node-rank={node}"]
        command += [f"--master-addr={master_addr}", f"--master-port={master_port}"]
    code = subprocess.run([*command, script, config], check=False).returncode
    if code != 0:
        raise LaunchError(f"torchrun of {script!r} ended with exit code {code}; see the output of its processes")
