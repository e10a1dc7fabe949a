"""The lock on a run's folder: one job at a time writes into it.

It is a record lock of ``fcntl``. Where the file system answers that it has none, a file takes its place that is made
with ``O_EXCL`` and says which process has made it.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import BinaryIO

from xffl.checks import decimal
from xffl.cluster.network import host_identity
from xffl.errors import ConfigError
from xffl.files import ENOTSUPP, create, naming_errors, open_regular, read_text, remove_file
from xffl.json_text import parse_json
from xffl.reading import Fields

__all__ = ["run_lock"]

LOG = logging.getLogger(__name__)

LOCK, OWNER = ".lock", ".lock.owner"
LOCK_WAIT_S = 10.0
"""How long a job that was just asked to end may still hold the folder."""
LOCK_POLL_S = 0.1
HOLDER_BYTES = 2**16
"""The most bytes of a file that says who holds the folder"""
HELD = (errno.EACCES, errno.EAGAIN)
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, ENOTSUPP, errno.EBADF, errno.EINVAL)
"""What file systems without locks answer: NFS without its lock service, autofs, some mounts of EFS."""
FREE = "wait until that has ended, or give another experiment.output_dir"


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Hold the lock on a run's folder, or raise where another process still holds it after some seconds; local.

    A record lock: hosts that share the file system see it, processes that make batches do not inherit it, and it goes
    with its process. Where the file system has none, a warning says so, and the file ``.lock.owner`` keeps other jobs
    out. It is taken over from a process of this host that has ended, also before the last boot, and from an earlier
    start of the same SLURM job; whether any other of another host has ended nobody can tell, so the message names the
    file to delete.
    """
    lock = folder / LOCK
    if os.path.lexists(lock) and (lock.is_symlink() or not lock.is_file()):
        raise ConfigError(f"experiment.output_dir {folder} has a {LOCK} that is no regular file; remove {lock}")
    with create(lock, "append") as file:
        try:
            _lock(file, time.monotonic() + LOCK_WAIT_S)
        except OSError as error:
            if error.errno in HELD:
                with open_regular(lock) as held:
                    line = held.read(HOLDER_BYTES)
                holder = line.decode(errors="replace").strip() or "another job"
                raise ConfigError(f"experiment.output_dir {folder} is in use by {holder}; {FREE}") from error
            if error.errno not in NO_LOCKS:
                raise
            LOG.warning(
                "%s is on a file system without locks (%s); the file %s keeps other jobs out instead",
                folder,
                error.strerror or error,
                OWNER,
            )
            holding = _owner_file(folder)
        else:
            file.truncate(0)
            job = f", SLURM job {os.environ['SLURM_JOB_ID']}" if "SLURM_JOB_ID" in os.environ else ""
            with naming_errors(lock):
                file.write(f"process {os.getpid()} on {os.uname().nodename}{job}\n".encode())
            yield
            return
    with holding:
        yield


def _lock(file: BinaryIO, deadline: float) -> None:
    """Lock a file, or raise what kept it from that, until the deadline only where another process holds it."""
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if error.errno not in HELD or time.monotonic() > deadline:
                raise
        time.sleep(LOCK_POLL_S)


# Without locks --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Owner:
    """The process that holds a folder, as its file says."""

    host: str
    """Name of the host with the kernel's boot id"""
    namespace: int
    """Of process numbers: containers of a host have their own"""
    process: int
    started: int
    """When the process was started, in ticks since the boot; numbers of processes come again"""
    since: str
    machine: str = ""
    """The machine's own id, which stays over boots"""
    job: str = ""
    """SLURM's cluster and job, which stay where the job is put back into the queue"""
    restarts: int = 0
    """How often SLURM had started that job again"""
    token: str = ""
    """Random, so that no two files are the same"""

    @classmethod
    def here(cls) -> _Owner:
        """Describe this process."""
        state = _state_of(os.getpid())
        return cls(
            host=host_identity(),
            namespace=_namespace(),
            process=os.getpid(),
            started=0 if state is None else state[1],
            since=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            machine=_machine(),
            job=_slurm_job(),
            restarts=_slurm_restarts(),
            token=uuid.uuid4().hex,
        )

    @classmethod
    def parse(cls, text: str) -> _Owner | None:
        """Read what a file holds; ``None`` where it is not whole, as of a process that was killed while it wrote.

        Only where files cannot be linked is one seen before it is whole.
        """
        try:
            fields = Fields(parse_json(text), "the owner of a folder")
            owner = cls(
                host=fields.text("host"),
                namespace=fields.integer("namespace"),
                process=fields.integer("process", 1, 2**31 - 1),
                started=fields.integer("started"),
                since=fields.text("since"),
                machine=fields.optional("machine", Fields.text) or "",
                job=fields.optional("job", Fields.text) or "",
                restarts=fields.optional("restarts", Fields.integer) or 0,
                token=fields.optional("token", Fields.text) or "",
            )
            has_zone = datetime.fromisoformat(owner.since).tzinfo is not None
        except ValueError:  # ConfigError is one
            return None
        return owner if has_zone and "/" in owner.host else None

    @property
    def has_ended(self) -> bool:
        """Whether the process is known to have ended; that of another host is not known.

        It has where SLURM has started its job again since, on whatever host, and where this host has.
        """
        if self.job and self.job == _slurm_job() and self.restarts < _slurm_restarts():
            return True
        if self._is_of_earlier_boot:
            return True
        if (self.host, self.namespace) != (host_identity(), _namespace()):
            return False
        state = _state_of(self.process)
        if state is not None:
            return state[0] == "Z" or state[1] != self.started
        return not _is_there(self.process)  # where processes of other users do not show

    @property
    def _is_of_earlier_boot(self) -> bool:
        """Whether this machine has been started since; others may have its name, and copies of a disk its id."""
        (name, boot), (here, now) = self.host.split("/", 1), host_identity().split("/", 1)
        is_here = name == here and self.machine != "" and self.machine == _machine()
        return is_here and boot != "" and now != "" and boot != now and datetime.fromisoformat(self.since) < _booted()

    def __str__(self) -> str:
        """Name the process."""
        return f"process {self.process} on {self.host.partition('/')[0]} since {self.since}"


@contextmanager
def _owner_file(folder: Path) -> Iterator[None]:
    """Hold the file that stands for the lock."""
    path = folder / OWNER
    owner_text = json.dumps(asdict(_Owner.here())) + "\n"
    deadline = time.monotonic() + LOCK_WAIT_S
    while not _make(path, owner_text):
        text = _read(path)
        owner = None if text is None else _Owner.parse(text)
        if text is not None and owner is not None and owner.has_ended and _take_away(path, text, owner_text):
            LOG.warning("%s was held by %s, which has ended: it is taken over", folder, owner)
            continue
        if time.monotonic() > deadline:
            holder = "another job" if owner is None else str(owner)
            raise ConfigError(
                f"experiment.output_dir {folder} is in use by {holder}; {FREE}; if that has ended without removing it, "
                f"delete {path}"
            )
        time.sleep(LOCK_POLL_S)
    try:
        # What killed processes have left beside; who holds the folder knows that nobody takes it over now.
        for left in folder.glob(f"{OWNER}.*"):
            remove_file(left)
        yield
    finally:
        if _read(path) == owner_text:
            remove_file(path)


def _make(path: Path, text: str) -> bool:
    """Make the file with its text in it at once, and tell whether there was none."""
    # A kill, or a full disk, must not leave the name with half of the text in it, of which nobody knows whose it is.
    aside = path.with_name(f"{OWNER}.{os.urandom(8).hex()}")
    try:
        _write_new(aside, text)
        try:
            os.link(aside, path)
        except FileExistsError:
            return _read(path) == text  # NFS asks again where an answer was lost, and finds what it has made itself
        except OSError:  # file systems without links: CIFS, some of FUSE
            LOG.debug("%s cannot be linked, and is made where it lies", path)
        else:
            return True
    finally:
        with suppress(OSError):
            aside.unlink(missing_ok=True)
    try:
        _write_new(path, text)
    except FileExistsError:
        return False
    return True


def _write_new(path: Path, text: str) -> None:
    """Write a file that is not there yet; where that fails it is removed."""
    opened = create(path)
    try:
        with naming_errors(path), opened as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        with suppress(OSError):  # what kept it from being written is what its user has to see
            path.unlink()
        raise


def _read(path: Path) -> str | None:
    try:
        return read_text(path, HOLDER_BYTES)
    except FileNotFoundError:
        return None
    except ValueError:
        return ""


def _take_away(path: Path, text: str, own: str) -> bool:
    """Remove a file of a process that has ended, and tell whether this process did; one at a time may.

    A file named after the text says who may. No two files have the same text, so once this one is deleted its name
    cannot come back with this text in it, and a late process finds another text and removes nothing. If the process
    that may has ended, too, its file is removed in the same way.
    """
    claim = path.with_name(f"{OWNER}.{hashlib.sha256(text.encode()).hexdigest()[:32]}")
    if not _make(claim, own):
        its = _read(claim)
        claimer = None if its is None else _Owner.parse(its)
        if its is not None and claimer is not None and claimer.has_ended and _take_away(claim, its, own):
            return _take_away(path, text, own)
        return False
    try:
        if _read(path) != text:
            return False
        remove_file(path)
        return True
    finally:
        remove_file(claim)


def _state_of(process: int) -> tuple[str, int] | None:
    """Return a process's state, such as ``R`` or ``Z``, and when it was started; ``None`` where that is not known."""
    try:
        # The name stands in parentheses, and may have spaces and parentheses in it.
        fields = Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return fields[0], int(fields[19])
    except (OSError, ValueError, IndexError):
        return None


def _is_there(process: int) -> bool:
    """Tell whether there is a process of this number."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _machine() -> str:
    """Return the machine's id, empty where it has none."""
    try:
        return Path("/etc/machine-id").read_text(errors="replace").strip()
    except OSError:
        return ""


def _booted() -> datetime:
    """Return when this machine was started; long ago where nobody tells."""
    try:
        seconds = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return datetime.min.replace(tzinfo=timezone.utc)
    return datetime.now(timezone.utc) - timedelta(seconds=seconds)


def _slurm_job() -> str:
    """Return SLURM's cluster and job, empty outside of a job."""
    job = os.environ.get("SLURM_JOB_ID", "")
    return f"{os.environ.get('SLURM_CLUSTER_NAME', '')}/{job}" if job else ""


def _slurm_restarts() -> int:
    count = os.environ.get("SLURM_RESTART_COUNT", "")
    return decimal(count) or 0


def _namespace() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0
